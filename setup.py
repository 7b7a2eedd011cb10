"""Build of the one C++ extension, trn_dist._C. Everything else stands in pyproject.toml."""

import pathlib
import shutil
import sys

from setuptools import setup

REQUIRED_TORCH = "2.13.0"

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        f"trn_dist: building needs torch {REQUIRED_TORCH}, and it is not installed: pip install torch=={REQUIRED_TORCH}"
    )
if torch.__version__.split("+")[0] != REQUIRED_TORCH:
    sys.exit(
        f"trn_dist: building needs torch {REQUIRED_TORCH}, found {torch.__version__}: pip install torch=={REQUIRED_TORCH}"
    )
if shutil.which("c++") is None and shutil.which("g++") is None:
    sys.exit("trn_dist: building needs a C++17 compiler, and neither c++ nor g++ is on PATH: install g++ 11 or newer")

root = pathlib.Path(__file__).parent
sources = sorted(str(path.relative_to(root)) for path in (root / "trn_dist" / "csrc").rglob("*.cpp"))

setup(
    ext_modules=[
        CppExtension(
            "trn_dist._C",
            sources,
            include_dirs=[str(root / "trn_dist" / "csrc")],
            # No contraction: a fused multiply-add in place of two roundings would make bits depend on the CPU.
            extra_compile_args=["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
