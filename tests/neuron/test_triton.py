"""A Triton kernel with neuron tensors: one sentence. Triton needs a GPU, so a package of its layout stands in."""

import subprocess
import sys

import pytest

KERNEL = """
class JITFunction:
    def __init__(self, fn):
        self.__name__ = fn.__name__

    def run(self, *args, grid, warmup, **kwargs):
        return "launched"

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)
"""

PROGRAM = """
import torch
from triton.runtime.jit import JITFunction


@JITFunction
def add_kernel(x, y, n):
    pass


x = torch.ones(4, device={device!r})
print(add_kernel[(1,)](x, {argument}))
"""


@pytest.mark.parametrize("argument", ["x, 4", "y=x, n=4"])
@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_launch(tmp_path, device, argument):
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "jit.py").write_text(KERNEL)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(device=device, argument=argument))
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    if device == "cpu":
        assert result.stdout == "launched\n"
    else:
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("RuntimeError: neuron: the Triton kernel add_kernel was called with neuron tensors")
        assert "give the operator a CPU kernel by torch.library, or write it in NKI" in last
