"""The operators of ``torch.ops.symm_mem`` on neuron, registered when PyTorch's module for it is imported.

The memory itself (``empty``, ``rendezvous``, ``get_buffer``, signals) is ``csrc/c10d/SymmetricMemoryNeuron.h``.

[Note: Fused operators]
``fused_all_gather_matmul`` and its relatives, which asynchronous tensor parallelism consists of, overlap a collective
with the matrix product on its input or output, part by part (one part a rank). Here their *numbers* are those of the
operators they stand for: the group's collective and one product of the whole, so they have the bits of the unfused
program. Their *virtual time* is that of the parts. An all-gather brings part k of p after k/(p-1) of its time, and the
product of a part starts when the part is there. A reduce-scatter starts when the product of the first part is done; its
last step starts when the last part that travels is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from trn_dist import _C

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def _reduction(name: str, operator: str) -> Any:
    if name not in _REDUCTIONS:
        raise ValueError(f"symm_mem::{operator}: reduce_op is sum or avg, got {name!r}")
    return _REDUCTIONS[name]


@contextlib.contextmanager
def _untimed() -> Iterator[None]:
    """Operators inside take no virtual time; what they stand for is launched apart."""
    scope = _C._UntimedScope()
    try:
        yield
    finally:
        del scope


def _check_divides(size: int, parts: int, dim: int, operator: str) -> None:
    if size % parts != 0:
        raise ValueError(
            f"symm_mem::{operator}: dimension {dim} of {size} elements must be a multiple of the {parts} ranks"
        )


class _PartialProduct:
    """The product [rows, inner] x [inner, columns] of one part, in virtual time alone."""

    def __init__(
        self, operator: str, rows: int, inner: int, columns: int, left: torch.Tensor, right: torch.Tensor, made: Any
    ) -> None:
        self.operator = operator
        self.device = left.device.index
        self.left = torch.empty(rows, inner, dtype=left.dtype, device="meta")
        self.right = torch.empty(inner, columns, dtype=right.dtype, device="meta")
        self.made = torch.empty(rows, columns, dtype=made, device="meta")

    def launch(self) -> int:
        """Launches it on the current stream; returns when it is done, in picoseconds."""
        return int(_C._launch_untouched(self.device, self.operator, [[self.left], [self.right]], [self.made]))


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Starts to gather ``shard``; returns [ranks, *shard.shape] and its Work."""
    shard = shard.contiguous()
    gathered = shard.new_empty((group.size(), *shard.shape))
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    work = group._allgather_base(gathered.view(group.size() * shard.shape[0], *shard.shape[1:]), shard, options)
    return gathered, work


def _all_gather_products(
    operator: str,
    shard: torch.Tensor,
    rights: list[torch.Tensor],
    dim: int,
    group: dist.ProcessGroup,
    multiply: Callable[[torch.Tensor, int], torch.Tensor],
    product_operator: str,
    out_dtypes: list[torch.dtype],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[Note: Fused operators]. ``multiply(whole, i)`` is the product of the gathered [.., inner] with ``rights[i]``."""
    if shard.dim() < 2 or any(right.dim() != 2 for right in rights):
        raise ValueError(
            f"symm_mem::{operator}: A_shard needs two or more dimensions and each B two, got {list(shard.shape)} and "
            f"{[list(right.shape) for right in rights]}"
        )
    if not -shard.dim() <= dim < shard.dim():
        raise ValueError(f"symm_mem::{operator}: gather_dim {dim} of a tensor of {shard.dim()} dimensions")
    dim %= shard.dim()
    ranks = group.size()
    # Parts of the inner dimension of A meet the rows of B that belong to them; all others meet the whole of B.
    rows, inner = shard.numel() // shard.shape[-1], shard.shape[-1]
    parts = [
        _PartialProduct(product_operator, rows, inner, right.shape[1], shard, right, out_dtype)
        for right, out_dtype in zip(rights, out_dtypes, strict=True)
    ]
    gathered, work = _gather(shard, group)
    for part in parts:
        part.launch()  # of this rank's own shard, which is there
    start, end = _C._finish_collective(work)
    for k in range(1, ranks):
        _C._stream_wait_ps(shard.device.index, start + (end - start) * k // (ranks - 1))
        for part in parts:
            part.launch()
    _C._stream_wait_ps(shard.device.index, end)
    with _untimed():
        whole = gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim)
        return whole, [multiply(whole, i) for i in range(len(rights))]


def fused_all_gather_matmul(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """A: ``A_shard`` [.., K] of all ranks put together along ``gather_dim``, and ``A @ B`` for each B [K, N].

    Raises:
        ValueError: of shapes and dimensions that do not fit.
    """

    def multiply(whole: torch.Tensor, i: int) -> torch.Tensor:
        return torch.mm(whole.flatten(0, -2), Bs[i]).view(*whole.shape[:-1], Bs[i].shape[1])

    group = c10d._resolve_process_group(c10d.GroupName(group_name))
    A, products = _all_gather_products(
        "fused_all_gather_matmul", A_shard, Bs, gather_dim, group, multiply, "aten::mm", [B.dtype for B in Bs]
    )
    return (A if return_A else None), products


def fused_all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same for float8 with scales: ``A_scale`` is one number, of each row of the shard, or of each row of A."""
    from torch.distributed import _symmetric_memory as upstream

    group = c10d._resolve_process_group(c10d.GroupName(group_name))
    dtypes = upstream._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    mode = upstream._check_and_verify_fp8_all_gather_scale_mode(A_shard, A_scale, gather_dim, group.size())
    if mode == upstream._ScaleMode.ROW_WISE_SHARDED:
        gathered, work = _gather(A_scale, group)
        work.wait()
        with _untimed():
            A_scale = torch.cat(gathered.unbind(0), gather_dim)
    row_wise = mode != upstream._ScaleMode.TENSOR_WISE
    scale = A_scale.flatten(0, -2).contiguous() if row_wise else A_scale

    def multiply(whole: torch.Tensor, i: int) -> torch.Tensor:
        product = torch._scaled_mm(
            whole.flatten(0, -2),
            Bs[i],
            scale,
            B_scales[i],
            biases[i],
            result_scales[i],
            out_dtype=dtypes[i],
            use_fast_accum=use_fast_accum[i],
        )
        return product.view(*whole.shape[:-1], Bs[i].shape[1])

    return _all_gather_products(
        "fused_all_gather_scaled_matmul",
        A_shard,
        Bs,
        gather_dim,
        group,
        multiply,
        "aten::_scaled_mm",
        [dtype or B.dtype for dtype, B in zip(dtypes, Bs, strict=True)],
    )


def _product_reduce_scatter(
    operator: str,
    multiply: Callable[[], torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
    reduce_op: str,
    dim: int,
    group: dist.ProcessGroup,
    product_operator: str,
    out_dtype: torch.dtype,
    shape: list[int],
) -> torch.Tensor:
    """[Note: Fused operators]. ``multiply()`` is the whole product, of ``shape``; ``left``: its [rows, inner]."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"symm_mem::{operator}: scatter dimension {dim} of a product of {len(shape)} dimensions")
    dim %= len(shape)
    reduction = _reduction(reduce_op, operator)
    ranks = group.size()
    _check_divides(shape[dim], ranks, dim, operator)
    rows, inner = left.shape
    columns = right.shape[1]
    if dim == len(shape) - 1:
        columns //= ranks
    else:
        rows //= ranks
    product_part = _PartialProduct(product_operator, rows, inner, columns, left, right, out_dtype)
    with _untimed():
        product = multiply().view(shape)
        stacked = torch.cat(product.chunk(ranks, dim)) if dim > 0 else product.contiguous()
        result = stacked.new_empty((stacked.shape[0] // ranks, *stacked.shape[1:]))
    product_part.launch()
    options = c10d.ReduceScatterOptions()
    options.reduceOp = reduction
    options.asyncOp = True
    work = group._reduce_scatter_base(result, stacked, options)
    sent = 0  # when the product of the last part that travels is done
    for k in range(1, ranks):
        done = product_part.launch()
        sent = done if k < ranks - 1 else sent
    start, end = _C._finish_collective(work)
    if ranks > 1:
        end = max(end, sent + (end - start) // (ranks - 1))
    _C._stream_wait_ps(left.device.index, end)
    return result


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """``A @ B`` ([.., K] and [K, N]) summed ("sum") or averaged ("avg") over the ranks; each keeps its part.

    Raises:
        ValueError: of shapes and dimensions that do not fit, and of another reduction.
    """
    if A.dim() < 2 or B.dim() != 2:
        raise ValueError(
            f"symm_mem::fused_matmul_reduce_scatter: A needs two or more dimensions and B two, got {list(A.shape)} and "
            f"{list(B.shape)}"
        )
    with _untimed():
        flat = A.flatten(0, -2)
    return _product_reduce_scatter(
        "fused_matmul_reduce_scatter",
        lambda: torch.mm(flat, B),
        flat,
        B,
        reduce_op,
        scatter_dim,
        c10d._resolve_process_group(c10d.GroupName(group_name)),
        "aten::mm",
        A.dtype,
        [*A.shape[:-1], B.shape[1]],
    )


def fused_scaled_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int],
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The same for float8 with scales; ``output_shape`` is the product's."""
    from torch.distributed import _symmetric_memory as upstream

    if A_scale.numel() > 1 and A_scale.shape[:-1] != A.shape[:-1]:
        raise ValueError(
            "symm_mem::fused_scaled_matmul_reduce_scatter: A_scale is one number or one of each row of A, got "
            f"{list(A_scale.shape)} for {list(A.shape)}"
        )
    dtype = upstream._maybe_convert_scalar_types_to_dtypes([out_dtype])[0]
    with _untimed():
        flat = A.flatten(0, -2).contiguous()
        scale = A_scale.flatten(0, -2).contiguous() if A_scale.numel() > 1 else A_scale
    return _product_reduce_scatter(
        "fused_scaled_matmul_reduce_scatter",
        lambda: torch._scaled_mm(flat, B, scale, B_scale, bias, result_scale, dtype, use_fast_accum),
        flat,
        B,
        reduce_op,
        orig_scatter_dim,
        c10d._resolve_process_group(c10d.GroupName(group_name)),
        "aten::_scaled_mm",
        dtype or A.dtype,
        [*output_shape[:-1], B.shape[1]],
    )


# ---- Collectives on symmetric memory: those of the group, with its bits and its time ---------------------------------


def _check_symmetric(tensor: torch.Tensor, group_name: str, operator: str) -> None:
    from torch.distributed import _symmetric_memory as upstream

    if upstream._SymmetricMemory.rendezvous(tensor, c10d.GroupName(group_name)) is None:
        raise ValueError(f"symm_mem::{operator}: the tensor must come from torch.distributed._symmetric_memory.empty()")


def _all_reduce(
    out: torch.Tensor, source: torch.Tensor, reduce_op: str, group_name: str, operator: str
) -> torch.Tensor:
    options = c10d.AllreduceOptions()
    options.reduceOp = _reduction(reduce_op, operator)
    if out is not source:
        with _untimed():  # the reduction reads the source in place
            out.copy_(source)
    c10d._resolve_process_group(c10d.GroupName(group_name)).allreduce([out], options).wait()
    return out


def one_shot_all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """The sum ("sum") or mean ("avg") of the ranks' symmetric ``input``, in a new tensor."""
    return one_shot_all_reduce_out(input, reduce_op, group_name, torch.empty_like(input))


def one_shot_all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> torch.Tensor:
    _check_symmetric(input, group_name, "one_shot_all_reduce")
    return _all_reduce(out, input, reduce_op, group_name, "one_shot_all_reduce")


def one_shot_all_reduce_copy(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    """The same of ``local_input``, which is copied into ``symm_buffer`` first."""
    out = torch.empty_like(local_input)
    return one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, out)


def one_shot_all_reduce_copy_out(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    if symm_buffer.numel() < local_input.numel() or symm_buffer.dtype != local_input.dtype:
        raise ValueError(
            "symm_mem::one_shot_all_reduce_copy: symm_buffer needs the dtype and at least the elements of local_input, "
            f"got {symm_buffer.dtype} {list(symm_buffer.shape)} for {local_input.dtype} {list(local_input.shape)}"
        )
    _check_symmetric(symm_buffer, group_name, "one_shot_all_reduce_copy")
    symm_buffer.flatten()[: local_input.numel()].view(local_input.shape).copy_(local_input)
    return _all_reduce(out, local_input, reduce_op, group_name, "one_shot_all_reduce_copy")


def two_shot_all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """The same in place."""
    _check_symmetric(input, group_name, "two_shot_all_reduce_")
    return _all_reduce(input, input, reduce_op, group_name, "two_shot_all_reduce_")


def two_shot_all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor) -> torch.Tensor:
    _check_symmetric(input, group_name, "two_shot_all_reduce_out")
    return _all_reduce(output, input, reduce_op, group_name, "two_shot_all_reduce_out")


def reduce_scatter_out(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    """The sum of the ranks' symmetric ``input``; each rank keeps its part along the first or the last dimension."""
    _check_symmetric(input, group_name, "reduce_scatter_out")
    group = c10d._resolve_process_group(c10d.GroupName(group_name))
    dim = input.dim() - 1 if split_last_dim else 0
    _check_divides(input.shape[dim], group.size(), dim, "reduce_scatter_out")
    with _untimed():
        stacked = torch.cat(input.chunk(group.size(), dim)) if dim > 0 else input.contiguous()
    group._reduce_scatter_base(output, stacked, c10d.ReduceScatterOptions()).wait()
    return output


def _low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    """To be waited for by ``_c10d_functional.wait_tensor``, as the other functional collectives."""
    size = c10d._get_group_size_by_name(c10d.GroupName(group_name))
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), size, group_name)


def _low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    size = c10d._get_group_size_by_name(c10d.GroupName(group_name))
    return torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), reduce_op, size, group_name)


def get_remote_tensors(x: torch.Tensor, group_name: str) -> list[torch.Tensor]:
    """The tensors of all ranks that lie where ``x`` does, by rank."""
    from torch.distributed import _symmetric_memory as upstream

    _check_symmetric(x, group_name, "get_remote_tensors")
    handle = upstream._SymmetricMemory.rendezvous(x, c10d.GroupName(group_name))
    return [handle.get_remote_tensor(rank, x.shape, x.dtype) for rank in range(handle.world_size)]


def memset32_(input: torch.Tensor, offset: int, val: int, count: int) -> torch.Tensor:
    """Writes ``val`` to ``count`` words of four bytes from word ``offset`` on."""
    if input.element_size() != 4 or not input.is_contiguous():
        raise ValueError(
            f"symm_mem::memset32_: a contiguous tensor of four-byte elements is needed, got {input.dtype} "
            f"{list(input.shape)} with strides {list(input.stride())}"
        )
    if offset < 0 or count <= 0 or offset + count > input.numel():
        raise ValueError(
            f"symm_mem::memset32_: words {offset} to {offset + count} of a tensor of {input.numel()} do not exist"
        )
    input.flatten().view(torch.int32)[offset : offset + count].fill_(val - (1 << 32) if val >= 1 << 31 else val)
    return input


def stream_write_value32_(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
    """Writes one word: operators of a stream run in order, so this one needs no more."""
    return memset32_(input, offset, val, 1)


_OPERATORS = (
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
    one_shot_all_reduce,
    one_shot_all_reduce_out,
    one_shot_all_reduce_copy,
    one_shot_all_reduce_copy_out,
    two_shot_all_reduce_,
    two_shot_all_reduce_out,
    reduce_scatter_out,
    _low_contention_all_gather,
    _low_contention_reduce_scatter,
    get_remote_tensors,
    memset32_,
    stream_write_value32_,
)
_library: torch.library.Library | None = None


def register(module: Any) -> None:
    """Gives ``torch.distributed._symmetric_memory``, just imported, its operators on neuron and its workspace there."""
    global _library
    if _library is None:
        _library = torch.library.Library("symm_mem", "IMPL", "PrivateUse1")
        for function in _OPERATORS:
            _library.impl(function.__name__, function)
    of_cuda = module.get_symm_mem_workspace

    @functools.wraps(of_cuda)
    def get_symm_mem_workspace(group_name: Any, min_size: int) -> Any:
        # PyTorch's allocates on device "cuda" by name.
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "neuron":
            return of_cuda(group_name, min_size)
        workspaces = module._group_name_to_workspace_tensor
        tensor = workspaces.get(group_name)
        if tensor is None or tensor.numel() < min_size:
            device = torch.device("neuron", torch.neuron.current_device())  # type: ignore[attr-defined]
            tensor = module._SymmetricMemory.empty_strided_p2p((min_size,), [1], torch.uint8, device, group_name)
            workspaces[group_name] = tensor
        return module._SymmetricMemory.rendezvous(tensor, group_name)

    module.get_symm_mem_workspace = get_symm_mem_workspace
