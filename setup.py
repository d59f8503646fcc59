"""Builds the native kernel where there is a C++ compiler; all else is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src", "zenflow", "kernels", "native")
# By its path: importing zenflow would need torch, which an isolated build does not have.
recipe = runpy.run_path(str(Path(__file__).parent / NATIVE / "build.py"))


class BuildKernel(build_ext):
    """A plain shared library instead of a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], recipe["LIBRARY"].name))

    def build_extension(self, ext: Extension) -> None:
        try:
            recipe["build"](Path(self.get_ext_fullpath(ext.name)))
        except recipe["BuildError"] as error:
            raise CompileError(str(error)) from error


setup(
    cmdclass={"build_ext": BuildKernel},
    ext_modules=[
        Extension(
            "zenflow.kernels.native.libzenflow_kernel",
            sources=sorted(map(str, NATIVE.glob("*.cpp"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            # Without a compiler, the kernel in plain torch serves.
            optional=True,
        )
    ],
)
