"""Runs one of PyTorch's OpInfo entries on ``cpu`` and on ``neuron`` and compares what comes out, bit for bit.

Used by the tests of this folder and by ``python -m tests.conformance``. The samples are made on the CPU and moved with
their storages, strides and offsets as they are, so that both devices see the same views of the same bytes. Random
operators draw from PyTorch's CPU generator on both sides (as TRN_CPU_RNG=1 has it), so their results compare as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

FORWARD, INPLACE, OUT, BACKWARD = CHECKS = ("forward", "inplace", "out", "backward")

# Their elements are whatever the memory held: only geometry and dtype compare.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# The CPU's own result changes in the last bits from call to call, for LAPACK's gelsy is given pivots that nobody
# initialised. Numbers compare within rounding.
UNREPRODUCIBLE = {"linalg.lstsq"}
# Their tensor arguments beside the first stay on the CPU, where CUDA wants them, too.
CPU_ARGUMENTS = {"tensor_split"}


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One comparison that failed: of which check, on which sample, and what differed."""

    check: str
    sample: int
    what: str


@dataclasses.dataclass
class Comparison:
    """What came of one operator and dtype: the checks that the CPU could carry out, and those that differed."""

    checks: set[str] = dataclasses.field(default_factory=set)
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)

    def failed_checks(self) -> set[str]:
        return {mismatch.check for mismatch in self.mismatches}


class Mover:
    """Copies tensors to a device with their geometry; tensors that share a storage still do afterwards."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(self._device)
        if isinstance(value, str) and value == "cpu":
            return self._device
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            moved = plain.to(self._device, copy=True)
        elif tensor.is_conj():
            moved = self._tensor(plain.conj()).conj()
        elif tensor.is_neg():
            moved = torch._neg_view(self._tensor(torch._neg_view(plain)))
        elif tensor._is_zerotensor():
            moved = plain.to(self._device, copy=True)
        else:
            storage = plain.untyped_storage()
            if storage._cdata not in self._storages:
                # The CPU's storage is kept, so that no other one can get its address.
                fresh = torch.UntypedStorage(storage.nbytes(), device=self._device)
                fresh.copy_(storage)
                self._storages[storage._cdata] = (storage, fresh)
            moved = torch.empty(0, dtype=tensor.dtype, device=self._device)
            fresh = self._storages[storage._cdata][1]
            moved.set_(fresh, plain.storage_offset(), plain.size(), plain.stride())
        return moved.requires_grad_(tensor.requires_grad)


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def difference(expected: Any, actual: Any, values: bool = True) -> str | None:
    """What differs between the CPU's result and the device's, or None. Values compare bit for bit; NaN equals NaN.
    Without ``values`` only geometry and dtype compare.
    """
    expected_leaves, expected_tree = tree_flatten(expected)
    actual_leaves, actual_tree = tree_flatten(actual)
    if expected_tree != actual_tree:
        return f"structure {actual_tree} instead of {expected_tree}"
    for left, right in zip(expected_leaves, actual_leaves, strict=True):
        if isinstance(left, torch.Tensor):
            found = _tensor_difference(left, right, values)
        elif left in ("cpu", torch.device("cpu")):
            found = None if torch.device(right).type == "neuron" else f"device {right}"
        else:
            found = None if left == right or (left != left and right != right) else f"{right!r} instead of {left!r}"
        if found:
            return found
    return None


def _tensor_difference(expected: torch.Tensor, actual: Any, values: bool) -> str | None:
    if not isinstance(actual, torch.Tensor):
        return f"a {type(actual).__name__} instead of a tensor"
    if expected.device.type == "cpu" and actual.device.type != "neuron":
        return f"a result on {actual.device}"
    for attribute in ("dtype", "layout", "shape"):
        left, right = getattr(expected, attribute), getattr(actual, attribute)
        if left != right:
            return f"{attribute} {right} instead of {left}"
    if expected.is_nested:
        return difference(list(expected.unbind()), list(actual.unbind()))
    if expected.layout == torch.sparse_coo:
        return _parts_difference(expected, actual, "_indices", "_values")
    if expected.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _parts_difference(expected, actual, "crow_indices", "col_indices", "values")
    if expected.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _parts_difference(expected, actual, "ccol_indices", "row_indices", "values")
    if expected.stride() != actual.stride():
        return f"strides {actual.stride()} instead of {expected.stride()} for shape {tuple(expected.shape)}"
    if not values:
        return None
    left, right = expected.detach(), actual.detach().cpu()
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if left.numel() == 0 or torch.equal(_bits(left), _bits(right)):
        return None
    if left.dtype.is_floating_point and left.dtype.itemsize > 1:
        number = ~(left.isnan() & right.isnan())
        left, right = left[number], right[number]
    differing = _bits(left) != _bits(right)
    if not differing.any():
        return None
    at = int(differing.flatten().nonzero()[0])
    first = f"{right.flatten()[at].item()!r} instead of {left.flatten()[at].item()!r}"
    return f"{int(differing.sum())} of {differing.numel()} elements differ, first {first}"


def _parts_difference(expected: torch.Tensor, actual: torch.Tensor, *names: str) -> str | None:
    return difference([getattr(expected, name)() for name in names], [getattr(actual, name)() for name in names])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_conj().resolve_neg().contiguous().view(integer[tensor.dtype.itemsize])


def samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool, most: int | None) -> Iterator[SampleInput]:
    """The first ``most`` of the operator's samples on the CPU (all for None), from a fixed seed."""
    seed_everything()
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), most)


def compare(op: OpInfo, dtype: torch.dtype, most: int | None = None) -> Comparison:
    """Compares the two devices on the operator's samples of ``dtype``: forward, in place, ``out=`` and backward."""
    result = Comparison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype in op.supported_dtypes("cpu"):
            for index, sample in enumerate(samples(op, dtype, False, most)):
                arguments = (sample.input, sample.args, sample.kwargs)
                expected = _compare_call(result, op, FORWARD, index, op.get_op(), arguments)
                inplace = op.get_inplace()
                if inplace is not None and not sample.broadcasts_input:
                    _compare_call(result, op, INPLACE, index, inplace, arguments)
                if op.supports_out and expected is not None:
                    _compare_call(result, op, OUT, index, _with_out(op, expected), arguments)
        if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
            for index, sample in enumerate(samples(op, dtype, True, most)):
                arguments = (sample.input, sample.args, sample.kwargs)
                _compare_call(result, op, BACKWARD, index, _with_gradients(op, sample), arguments)
    return result


def _compare_call(result: Comparison, op: OpInfo, check: str, index: int, function: Callable, arguments: Any) -> Any:
    """Calls ``function`` on the CPU and on the device. Returns the CPU's result, None where the CPU raised."""
    on_cpu = tree_map(Mover("cpu"), arguments)
    if op.name in CPU_ARGUMENTS:
        on_neuron = (tree_map(Mover("neuron"), arguments[0]), *arguments[1:])
    else:
        on_neuron = tree_map(Mover("neuron"), arguments)
    # Some samples of factories name no device: they go to the default one.
    default_device = "neuron" if not _on_neuron(on_neuron) else None
    seed_everything()
    try:
        expected = function(on_cpu[0], *on_cpu[1], **on_cpu[2])
    except Exception:
        return None
    result.checks.add(check)
    seed_everything()
    try:
        with torch.device(default_device) if default_device else contextlib.nullcontext():
            actual = function(on_neuron[0], *on_neuron[1], **on_neuron[2])
        # The arguments too: an operator may write to them, and must not where the CPU's does not.
        if op.name in CPU_ARGUMENTS:
            found = difference(expected, actual)
        else:
            bits = op.name not in UNINITIALISED | UNREPRODUCIBLE
            found = difference((expected, on_cpu), (actual, on_neuron), values=bits)
        if op.name in UNREPRODUCIBLE and not found:
            tensors = zip(tree_flatten(expected)[0], tree_flatten(actual)[0], strict=True)
            for left, right in tensors:
                torch.testing.assert_close(left, right, check_device=False)
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found:
        result.mismatches.append(Mismatch(check, index, found))
    return expected


def _with_out(op: OpInfo, expected: Any) -> Callable:
    """The operator with ``out=`` tensors of the right shape, of no element, and with strides of their own."""
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(expected)[0]):
        return op.get_op()

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        device = "neuron" if _on_neuron((first, args, kwargs)) else torch.get_default_device()
        results = []
        for kind in ("right", "empty", "strided"):

            def out_of(tensor: torch.Tensor, kind: str = kind) -> torch.Tensor:
                if kind == "empty":
                    return torch.empty(0, dtype=tensor.dtype, device=device)
                if kind == "strided":
                    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=device)
                    return wide[..., 0]
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

            seed_everything()
            out = tree_map(out_of, expected)
            returned = op.get_op()(first, *args, out=out, **kwargs)
            same = [a is b for a, b in zip(tree_flatten(returned)[0], tree_flatten(out)[0], strict=True)]
            results.append((returned, same))
        return results

    return call


def _on_neuron(value: Any) -> bool:
    return any(
        (isinstance(leaf, torch.Tensor | torch.device) and "neuron" in str(getattr(leaf, "device", leaf)))
        or leaf == "neuron"
        for leaf in tree_flatten(value)[0]
        if isinstance(leaf, torch.Tensor | torch.device | str)
    )


def _with_gradients(op: OpInfo, sample: SampleInput) -> Callable:
    """The operator's gradients for every input that wants one, from output gradients made on the CPU."""

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = [
            leaf
            for leaf in tree_flatten((first, args, kwargs))[0]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        output = sample.output_process_fn_grad(op.get_op()(first, *args, **kwargs))
        outputs = [
            leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        if not inputs or not outputs:
            raise RuntimeError("nothing to differentiate")
        generator = torch.Generator().manual_seed(0)
        grad_outputs = []
        for leaf in outputs:
            like = torch.randn(leaf.shape, dtype=torch.promote_types(leaf.dtype, torch.float32), generator=generator)
            grad_outputs.append(like.to(leaf.dtype).to(leaf.device))
        grads = torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)
        return [leaf.detach() for leaf in outputs], list(grads)

    return call
