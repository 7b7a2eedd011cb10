"""Rounding made visible: a model whose every module output and its gradient is moved by a few rounding units.

An ensemble of such runs spreads as far as rounding alone can carry a training run: each product that enters a sum is
moved by what its rounding may be, so sums of large addends that cancel (ill-conditioned ones) move as much as another
order of summation could move them, and training itself carries the difference on from step to step. The method is
Monte Carlo arithmetic (Parker 1997), applied at the modules' borders. Runs inside the ranks, called by
:mod:`trn_dist.titan.observe`. Also writes, for each step, the gradient norm as the trainer has it and the norm of the
same gradients in float64 to ``norms.jsonl``: the CPU's kernel adds squares one after the other, and what that loses
depends on how many there are and on how unequal they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

MEMBER = "TRN_PARITY_MEMBER"
AMPLITUDE = "TRN_PARITY_AMPLITUDE"
NORMS_FILE = "norms.jsonl"


class Perturbation:
    """Multiplies what passes through the leaf modules by 1 + amplitude * x, x drawn evenly from [-1, 1]."""

    def __init__(self, model_parts: list[torch.nn.Module], member: int, amplitude: float, folder: Path) -> None:
        self.amplitude = amplitude
        self.folder = folder
        self.generator = torch.Generator().manual_seed(member)
        for part in model_parts:
            for module in part.modules():
                if not any(True for _ in module.children()):
                    module.register_forward_hook(self._after_forward)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float32).mul_(2).sub_(1)
            # Adding 1 in float32 first would round the noise itself away.
            return tensor + tensor * noise.mul_(self.amplitude).to(device=tensor.device, dtype=tensor.dtype)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        return _Move.apply(output, self)

    def before_clipping(self, parameters: list[torch.Tensor]) -> None:
        squares = [p.grad.detach().cpu().double().square().sum().item() for p in parameters if p.grad is not None]
        self.exact_norm = sum(squares) ** 0.5

    def after_clipping(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        with (self.folder / NORMS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"norm": norm.item(), "exact": self.exact_norm}) + "\n")


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, perturbation: Perturbation) -> torch.Tensor:
        ctx.perturbation = perturbation
        return perturbation._moved(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return ctx.perturbation._moved(grad_outputs[0]), None


def read_norm_error(folder: Path) -> list[float]:
    """How far the trainer's gradient norm was off, step by step, in a perturbed run."""
    lines = (folder / NORMS_FILE).read_text(encoding="utf-8").splitlines()
    return [abs(line["norm"] - line["exact"]) for line in map(json.loads, lines)]


def observe(model_parts: list[torch.nn.Module], optimizers: Any, parallel_dims: Any) -> Perturbation:
    folder = Path(os.environ["TRN_OBSERVER_FOLDER"])
    return Perturbation(model_parts, int(os.environ[MEMBER]), float(os.environ[AMPLITUDE]), folder)
