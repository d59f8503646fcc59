"""Builds the native kernel: one shared library, loaded by ``ctypes``, without torch or Python in
it.

``pip install`` runs this through ``setup.py``. In a source tree that is not installed
(``PYTHONPATH=src``), run it by hand::

    python src/zenflow/kernels/native/build.py

Nothing is ever built at run time. Only the standard library is used, because an isolated build has
nothing else.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = SOURCES / "libzenflow_kernel.so"

_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    # The bits must not depend on the compiler: no fused products and sums, no reassociation.
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
]
ISA_FLAGS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mf16c"],
    "neon": [],
    "portable": ["-DZENFLOW_PORTABLE"],
}
"""What the kernels can be compiled for, and how."""

_PER_ISA = ["sweep.cpp", "select.cpp"]
"""Compiled once for each instruction set."""

_ISAS = {
    "x86_64": ["portable", "avx2", "avx512"],
    "aarch64": ["portable", "neon"],
    "arm64": ["portable", "neon"],
}


class BuildError(Exception):
    """No compiler, or it refused."""


def build_id() -> str:
    """Digest of all that decides what the library does, to tell one built from other sources."""
    files = sorted(p for p in SOURCES.iterdir() if p.suffix in (".cpp", ".h"))
    digest = hashlib.sha256(repr((_FLAGS, ISA_FLAGS, _ISAS, _PER_ISA)).encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The C++ compiler: ``CXX``, or the first of the usual names that is on the PATH."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    configured = shlex.split(sysconfig.get_config_var("CXX") or "")[:1]
    return next(
        ([name] for name in ["c++", "g++", "clang++", *configured] if shutil.which(name)), None
    )


def build(library: Path = LIBRARY, extra_flags: Sequence[str] = ()) -> None:
    """Compile and link ``library``.

    Raises:
        BuildError: if there is no compiler or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++ or clang++) was found, and CXX is not set")
    flags = [*_FLAGS, *extra_flags]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [str(Path(scratch, "dispatch.o"))]
        macro = f'-DZENFLOW_BUILD_ID="{build_id()}"'
        _run([*compiler, *flags, macro, "-c", str(SOURCES / "dispatch.cpp"), "-o", objects[0]])
        for isa in _ISAS.get(platform.machine(), ["portable"]):
            isa_flags = [f"-DZENFLOW_ISA={isa}", *ISA_FLAGS[isa]]
            for source in _PER_ISA:
                objects.append(str(Path(scratch, f"{isa}_{source}.o")))
                path = str(SOURCES / source)
                _run([*compiler, *flags, *isa_flags, "-c", path, "-o", objects[-1]])
        library.parent.mkdir(parents=True, exist_ok=True)
        linked = Path(scratch, "linked.so")
        _run([*compiler, "-shared", *extra_flags, *objects, "-o", str(linked)])
        # Moved, not overwritten: a process may have the old one mapped.
        staged = library.with_suffix(".new")
        shutil.copyfile(linked, staged)
        staged.replace(library)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        build(extra_flags=sys.argv[1:])
    except BuildError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"built {LIBRARY}\n")
