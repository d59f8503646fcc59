"""When the native library is there, and why it is not."""

import pytest

from zenflow.kernels import native
from zenflow.kernels.native import build


def test_where_there_is_a_compiler_there_is_the_library():
    try:
        library = native.load()
    except native.NativeUnavailable as error:
        if build.find_compiler() is not None:
            pytest.fail(str(error))
        pytest.skip(f"native kernel: {error}")
    assert library.usable
    assert set(library.usable) <= set(library.compiled) <= set(native.INSTRUCTION_SETS)


def test_a_library_of_other_sources_is_refused(monkeypatch):
    if not build.LIBRARY.exists():
        pytest.skip("native kernel: it was not built")
    monkeypatch.setattr(build, "build_id", lambda: "another")
    with pytest.raises(native.NativeUnavailable, match="built from other sources"):
        native.Library()


def test_a_file_that_is_no_library_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "kernel.so")
    with pytest.raises(native.NativeUnavailable, match="was not built"):
        native.Library()
    build.LIBRARY.write_bytes(b"nothing")
    with pytest.raises(native.NativeUnavailable, match="could not be loaded"):
        native.Library()


@pytest.mark.covers("no compiler")
def test_building_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build(tmp_path / "kernel.so")
    monkeypatch.setenv("CXX", "not-a-compiler")
    with pytest.raises(build.BuildError, match="not-a-compiler could not be started"):
        build.build(tmp_path / "kernel.so")
    assert not list(tmp_path.iterdir())
