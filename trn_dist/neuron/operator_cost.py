"""What operators of the user's own cost on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trn_dist import _C


@dataclass(frozen=True)
class OperatorCost:
    """What one call of an operator has to do on a logical core; the engines work at the same time, beside HBM.

    matmul: batch, m, k, n of a matrix product ``[batch, m, k] x [batch, k, n]`` on TensorE, None for none.
    matmul_dtype: dtype of its operands.
    vector_elements, scalar_elements, gpsimd_elements: elements of all passes of VectorE, ScalarE and GpSimdE.
    hbm_bytes: bytes read from and written to HBM, None for those of the operator's arguments and results.
    """

    matmul: tuple[int, int, int, int] | None = None
    matmul_dtype: torch.dtype = torch.bfloat16
    vector_elements: int = 0
    scalar_elements: int = 0
    gpsimd_elements: int = 0
    hbm_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.matmul is not None and (len(self.matmul) != 4 or min(self.matmul) < 0):
            raise ValueError(f"matmul = {self.matmul}: expected the sizes (batch, m, k, n), none below 0, or None")
        if not isinstance(self.matmul_dtype, torch.dtype):
            raise ValueError(f"matmul_dtype = {self.matmul_dtype!r}: expected a torch.dtype")
        for name in ("vector_elements", "scalar_elements", "gpsimd_elements", "hbm_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} = {value}: expected a number from 0 on")


def register_operator_cost(
    operator: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str,
) -> Callable[[Callable[..., OperatorCost]], Callable[..., OperatorCost]]:
    """Decorate a function that says what one call of ``operator`` costs; it gets the operator's arguments.

    ``operator``: of ``torch.library``, as ``"mylib::swiglu"``, ``"mylib::swiglu.out"`` or ``torch.ops.mylib.swiglu``.
    From then on it runs whole by its CPU kernel, as one launch, also if it was defined for all devices: its body's own
    operators are not launched one by one. The function runs before each call; it may read shapes, dtypes and numbers
    that are not tensors, and must give equal costs for equal arguments.

    Raises ValueError for an operator that is not there, that has a kernel of its own for neuron, or that PyTorch
    decomposes before it reaches the device.
    """
    if isinstance(operator, torch._ops.OpOverload):
        qualified = operator._schema.name + (
            f".{operator._overloadname}" if operator._overloadname != "default" else ""
        )
    elif isinstance(operator, torch._ops.OpOverloadPacket):
        qualified = operator._qualified_op_name
    else:
        qualified = operator
    name, _, overload = qualified.partition(".")

    def register(function: Callable[..., OperatorCost]) -> Callable[..., OperatorCost]:
        def fields(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            cost = function(*args, **kwargs)
            if not isinstance(cost, OperatorCost):
                found = type(cost).__name__
                raise TypeError(f"the cost of {qualified} must be a torch.neuron.OperatorCost, not {found}")
            elements = (cost.vector_elements, cost.scalar_elements, cost.gpsimd_elements)
            bytes_or_counted = -1 if cost.hbm_bytes is None else cost.hbm_bytes
            return cost.matmul or (0, 0, 0, 0), cost.matmul_dtype, elements, bytes_or_counted

        _C._register_operator_cost(name, overload, fields)
        return function

    return register
