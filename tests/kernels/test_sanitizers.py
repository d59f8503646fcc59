"""The native kernel under the compiler's sanitizers, in one thread and in several."""

import shutil
import subprocess
from pathlib import Path

import pytest

from zenflow.kernels.native import build

DRIVER = Path(__file__).with_name("driver.cpp")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers, tmp_path):
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = [*compiler, *flags, str(empty), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip(f"{compiler[0]} has no runtime library for -fsanitize={sanitizers}")
    library, driver = tmp_path / "libkernel.so", tmp_path / "driver"
    build.build(library, flags)
    sources = ["-std=c++17", f"-I{build.SOURCES}", str(DRIVER), str(library), "-pthread"]
    subprocess.run([*compiler, *flags, *sources, "-o", str(driver)], check=True)
    # The thread sanitizer of older compilers does not bear the address layout of newer kernels.
    prefix = ["setarch", "-R"] if shutil.which("setarch") else []
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        prefix = []
    done = subprocess.run([*prefix, str(driver)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
