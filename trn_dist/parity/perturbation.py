"""Rounding made visible: a model whose every module output and its gradient is moved by a few rounding units.

An ensemble of such runs spreads as far as rounding alone can carry a training run: each product that enters a sum is
moved by what its rounding may be, so sums of large addends that cancel (ill-conditioned ones) move as much as another
order of summation could move them, and training itself carries the difference on from step to step. The method is
Monte Carlo arithmetic (Parker 1997), applied at the modules' borders. Where activations have a lower precision than
float32, a layout may keep more in it than the reference: FSDP2 casts all parameters and the residual stream, autocast
only what goes into matrix products. That is no random error, for an update of a norm's weight that bfloat16 cannot hold
is lost for all tokens at once. Such runs therefore also use rounded parameters in every module, and move what passes
between modules that hold others. Runs inside the ranks, called by
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
DTYPE = "TRN_PARITY_DTYPE"
NORMS_FILE = "norms.jsonl"


class Perturbation:
    """Multiplies what passes through the leaf modules by 1 + amplitude * x, x drawn evenly from [-1, 1].

    Args:
        model_parts: this rank's modules.
        member: of the ensemble; seeds the draws.
        amplitude: relative.
        dtype: of activations; for another than float32, see the top of this file.
        folder: for the norms.
    """

    def __init__(
        self, model_parts: list[torch.nn.Module], member: int, amplitude: float, dtype: torch.dtype, folder: Path
    ) -> None:
        self.amplitude = amplitude
        self.dtype = dtype
        self.folder = folder
        self.generator = torch.Generator().manual_seed(member)
        low = dtype != torch.float32
        for part in model_parts:
            for module in part.modules():
                if low and any(True for _ in module.parameters(recurse=False)):
                    self._round_parameters(module)
                if low or not any(True for _ in module.children()):
                    module.register_forward_hook(self._after_forward)

    def _round_parameters(self, module: torch.nn.Module) -> None:
        """Has a module compute with its parameters rounded, and puts them back for the optimizer."""
        kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

        def before(module: torch.nn.Module, inputs: Any) -> None:
            for parameter in module.parameters(recurse=False):
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.to(self.dtype).to(parameter.dtype)

        def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            while kept:
                parameter, data = kept.pop()
                parameter.data = data

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

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
    dtype = getattr(torch, os.environ[DTYPE])
    return Perturbation(model_parts, int(os.environ[MEMBER]), float(os.environ[AMPLITUDE]), dtype, folder)
