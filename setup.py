"""Build of the one C++ extension, trn_dist._C, and of the data folders. Everything else stands in pyproject.toml."""

import os
import pathlib
import shutil
import sys
import sysconfig

from setuptools import setup
from setuptools.command.build_py import build_py

REQUIRED_TORCH = "2.13.0"

# An extension of an earlier build may not load any more; that must not stop the one that replaces it.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        f"trn_dist: building needs torch {REQUIRED_TORCH}, and it is not installed: pip install torch=={REQUIRED_TORCH}"
    )
if torch.__version__.split("+")[0] != REQUIRED_TORCH:
    sys.exit(
        f"trn_dist: building needs torch {REQUIRED_TORCH}, found {torch.__version__}: "
        f"pip install torch=={REQUIRED_TORCH}"
    )
if "CXX" not in os.environ and shutil.which("c++") is None and shutil.which("g++") is None:
    sys.exit("trn_dist: building needs a C++20 compiler, and neither c++ nor g++ is on PATH: install g++ 11 or newer")
python_header = pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h"
if not python_header.exists():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.exit(f"trn_dist: building needs the headers of Python, {python_header} is missing: install python{version}-dev")

root = pathlib.Path(__file__).parent

# tests/sanitize/run.sh builds with TRN_BUILD_SANITIZER=address or thread, in a copy of the tree.
SANITIZER = os.environ.get("TRN_BUILD_SANITIZER", "")
if SANITIZER not in ("", "address", "thread"):
    sys.exit(f"trn_dist: TRN_BUILD_SANITIZER={SANITIZER!r}: must be address or thread")
OPTIMISATION = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-omit-frame-pointer"] if SANITIZER else ["-O3", "-g0"]
csrc = root / "trn_dist" / "csrc"


def relative_paths(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in csrc.rglob(pattern))


class BuildWithData(build_py):
    """Puts configs/ and recipes/ (with the model that one brings) into the wheel; trn_dist.shipped finds them there."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ("configs", "recipes"):
            for source in sorted(path for path in (root / name).rglob("*") if path.suffix in (".toml", ".py", ".md")):
                target = pathlib.Path(self.build_lib, "trn_dist", source.relative_to(root))
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target))


class BuildIncrementally(BuildExtension):
    """Keeps the objects in build/, whichever command builds, so that only what changed is compiled again."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(root / "build" / f"objects-{sys.implementation.cache_tag}")


setup(
    ext_modules=[
        CppExtension(
            "trn_dist._C",
            relative_paths("*.cpp"),
            depends=relative_paths("*.h"),
            include_dirs=[str(csrc)],
            extra_compile_args=[
                *OPTIMISATION,
                "-std=c++20",
                "-fvisibility=hidden",
                # No contraction: a fused multiply-add in place of two roundings would make bits depend on the CPU.
                "-ffp-contract=off",
                "-Wall",
                "-Wno-unknown-pragmas",
            ],
            extra_link_args=[f"-fsanitize={SANITIZER}"] if SANITIZER else [],
        )
    ],
    cmdclass={"build_ext": BuildIncrementally, "build_py": BuildWithData},
)
