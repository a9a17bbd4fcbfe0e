"""Compiles the native kernels into the package; all else is in pyproject.toml.

The library has no Python in it and is loaded by ctypes, so that one wheel of a platform serves every Python. Where it
cannot be compiled, the package is installed without it.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("specdec/engine/cpu")
COMPILING = runpy.run_path(str(Path(__file__).parent / FOLDER / "compile_kernels.py"))


class BuildKernels(build_ext):
    """The one extension is compiled by compile_kernels.py, as everywhere else."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, extension: Extension) -> None:
        library = Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # none is better than one of other sources
        try:
            print(COMPILING["describe"](COMPILING["compile_kernels"](library)))
        except COMPILING["NotCompiled"] as error:
            print(f"no native kernels, steps on a CPU will be slow: {error}")


class WheelOfAPlatform(bdist_wheel):
    """Tagged with the platform, and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "specdec.engine.cpu._kernels",
            sources=sorted(map(str, FOLDER.glob("native/*.c"))),
            depends=sorted(map(str, FOLDER.glob("native/*.h"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelOfAPlatform},
)
