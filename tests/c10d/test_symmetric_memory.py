"""torch.distributed._symmetric_memory: buffers and signals between ranks, its operators, and what they cost."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.c10d import ranks
from trn_dist import _C

COUNT = 1000
PAD_BYTES = 2048


def setup(rank):
    import torch.distributed._symmetric_memory as symm_mem

    torch.neuron.set_device(rank)
    return symm_mem, dist.group.WORLD.group_name


def tail_ps(rank):
    return _C._virtual_stream_ps(rank, torch.neuron.current_stream().stream_id)


def on_buffers_and_signals(rank, size):
    symm_mem, name = setup(rank)
    tensor = symm_mem.empty(COUNT, device=f"neuron:{rank}")
    assert symm_mem.is_symm_mem_tensor(tensor) and not symm_mem.is_symm_mem_tensor(torch.empty(4, device="neuron"))
    assert symm_mem.get_backend(tensor.device) == "NEURON"
    tensor.fill_(rank)
    handle = symm_mem.rendezvous(tensor, name)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, size, 4 * COUNT)
    assert symm_mem.rendezvous(tensor, dist.group.WORLD) == handle
    handle.barrier()
    for r in range(size):
        buffer = handle.get_buffer(r, (10, 10), torch.float32, 100)
        assert buffer.device == tensor.device and torch.equal(buffer.cpu(), torch.full((10, 10), float(r)))
        assert (handle.get_remote_tensor(r, (COUNT,), torch.float32) == r).all()
    handle.barrier(channel=1)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for turn in range(50):
        handle.get_buffer(following, (COUNT,), torch.float32).fill_(100 * turn + rank)
        handle.put_signal(following, channel=3)
        handle.wait_signal(previous, channel=3)
        assert (tensor == 100 * turn + previous).all()
        handle.barrier(channel=turn % 2)
    dist.barrier()
    assert (handle.get_signal_pad(rank) == 0).all()
    dist.barrier()
    remote = torch.ops.symm_mem.get_remote_tensors(tensor, name)
    assert [t[0].item() for t in remote] == [4900 + (r - 1) % size for r in range(size)]
    handle.barrier()
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buffers_and_signals(size):
    assert all(ranks.run(size, on_buffers_and_signals))


def on_workspace_and_memory(rank, size):
    symm_mem, name = setup(rank)
    before = torch.neuron.memory_allocated()
    workspace = symm_mem.get_symm_mem_workspace(name, 1 << 20)
    assert symm_mem.get_symm_mem_workspace(name, 1 << 10) == workspace
    held = torch.neuron.memory_allocated() - before
    assert held >= (1 << 20) + symm_mem.get_signal_pad_size()
    larger = symm_mem.get_symm_mem_workspace(name, 1 << 22)
    assert larger.buffer_size >= 1 << 22
    # The smaller one is free again, on the chip: the larger was rounded as the first was.
    assert torch.neuron.memory_allocated() - before < held + (1 << 22)
    # What a peer still looks at is not used for anything else.
    tensor = symm_mem.empty(1 << 18, device=f"neuron:{rank}").fill_(rank)
    handle = symm_mem.rendezvous(tensor, name)
    handle.barrier()
    if rank == 0:
        del tensor
        kept = [torch.full((1 << 18,), 7.0, device="neuron") for _ in range(4)]
    dist.barrier()
    if rank == 1:
        assert (handle.get_buffer(0, (1 << 18,), torch.float32) == 0).all()
        del tensor
    dist.barrier()
    if rank == 0:
        used = [torch.empty(1 << 18, device="neuron").data_ptr() for _ in kept]
        symm_mem.empty(4, device="neuron")  # gives back what no rank uses any more
        again = [torch.empty(1 << 18, device="neuron") for _ in kept]
        assert len(used) == len(again)
    return True


def test_memory_is_charged_and_freed_when_no_peer_looks_any_more():
    assert all(ranks.run(2, on_workspace_and_memory))


def on_virtual_time(rank, size):
    symm_mem, name = setup(rank)
    tensor = symm_mem.empty(1 << 20, device=f"neuron:{rank}").fill_(0)
    handle = symm_mem.rendezvous(tensor, name)
    dist.barrier()
    for _ in range(20 * rank):
        tensor.add_(1)
    ready = tail_ps(rank)
    handle.barrier()
    met = tail_ps(rank)
    local = torch.empty_like(tensor)
    begin = tail_ps(rank)
    local.copy_(tensor)
    at_home = tail_ps(rank) - begin
    begin = tail_ps(rank)
    local.copy_(handle.get_buffer((rank + 1) % size, tensor.shape, tensor.dtype))
    abroad = tail_ps(rank) - begin
    handle.barrier()
    return ready, met, at_home, abroad


def test_virtual_time_of_barriers_and_copies():
    results = ranks.run(4, on_virtual_time)
    assert results == ranks.run(4, on_virtual_time)
    met = {met for _, met, _, _ in results}
    latest = max(ready for ready, _, _, _ in results)
    assert len(met) == 1 and latest < met.pop() < latest + 100_000_000  # the last to come, and a signal's way
    assert all(abroad > at_home for _, _, at_home, abroad in results)


def on_missing_rank(rank, size, how):
    symm_mem, name = setup(rank)
    handle = symm_mem.rendezvous(symm_mem.empty(4, device=f"neuron:{rank}"), name)
    if rank == 1:
        if how == "dead":
            ranks.die()
        dist.barrier()
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        if how == "late":
            handle.barrier(timeout_ms=300)
        else:
            handle.wait_signal(1)
    if how == "late":
        with pytest.raises(ValueError, match="channel 100000 is not one of the"):
            handle.barrier(channel=100000)
        with pytest.raises(ValueError, match="rank 9 of a group of 2"):
            handle.put_signal(9)
        dist.barrier()
    return str(caught.value)


def test_a_barrier_names_the_rank_that_does_not_come():
    message = ranks.run(2, on_missing_rank, "late")[0]
    assert "barrier(channel=0) of symmetric memory" in message and "rank 0 waited 0.3 s for rank 1" in message


def test_a_wait_ends_when_its_peer_dies():
    message = ranks.outcomes(2, on_missing_rank, "dead")[0].value
    assert "wait_signal(channel=0) of symmetric memory" in message and "rank 1 has died" in message


def on_unequal_buffers(rank, size):
    symm_mem, name = setup(rank)
    assert symm_mem.rendezvous(torch.empty(4, device="neuron"), name) is None
    with pytest.raises(ValueError, match=r"rank 1 has a buffer of 32 bytes .* and rank 0 one of 16|all ranks must"):
        symm_mem.rendezvous(symm_mem.empty(4 + 4 * rank, device=f"neuron:{rank}"), name)
    return True


def test_unequal_buffers_are_refused():
    assert all(ranks.run(2, on_unequal_buffers))


def on_reductions(rank, size, dtype):
    symm_mem, name = setup(rank)
    ops = torch.ops.symm_mem
    torch.manual_seed(rank)
    tensor = symm_mem.empty(size, 96, dtype=dtype, device=f"neuron:{rank}")
    tensor.copy_(torch.randn(size, 96))
    expected = tensor.clone()
    dist.all_reduce(expected)
    assert torch.equal(ops.one_shot_all_reduce(tensor, "sum", name), expected)
    assert torch.equal(ops.two_shot_all_reduce_out(tensor, "sum", name, torch.empty_like(tensor)), expected)
    scattered = torch.empty(1, 96, dtype=dtype, device=tensor.device)
    assert torch.equal(ops.reduce_scatter_out(tensor, name, False, scattered)[0], expected[rank])
    local = tensor.clone()
    buffer = symm_mem.empty(size, 96, dtype=dtype, device=tensor.device)
    assert torch.equal(ops.one_shot_all_reduce_copy(buffer, local, "sum", name), expected)
    gathered = funcol.wait_tensor(ops._low_contention_all_gather(local[:1], name))
    assert torch.equal(gathered[rank], local[0])
    ops.two_shot_all_reduce_(tensor, "sum", name)
    assert torch.equal(tensor, expected)
    with pytest.raises(ValueError, match="must come from"):
        ops.one_shot_all_reduce(local, "sum", name)
    with pytest.raises(ValueError, match="reduce_op is sum or avg, got 'max'"):
        ops.one_shot_all_reduce(tensor, "max", name)
    words = torch.zeros(8, dtype=torch.uint32, device=tensor.device)
    symm_mem._SymmetricMemory.memset32(words, 2, 2**31 + 5, 3)
    symm_mem._SymmetricMemory.stream_write_value32(words, 7, 9)
    assert words.cpu().tolist() == [0, 0, 2**31 + 5, 2**31 + 5, 2**31 + 5, 0, 0, 9]
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_have_the_bits_of_the_group(dtype):
    assert all(ranks.run(3, on_reductions, dtype))


def on_fused(rank, size, dtype):
    _, name = setup(rank)
    torch.manual_seed(rank)
    device = f"neuron:{rank}"
    for dim in (0, 1, 2):
        shard = torch.randn(6, 12, 24, device=device, dtype=dtype)
        whole = funcol.wait_tensor(funcol.all_gather_tensor(shard, dim, name))
        factors = [torch.randn(whole.shape[2], n, device=device, dtype=dtype) for n in (40, 7)]
        A, products = torch.ops.symm_mem.fused_all_gather_matmul(shard, factors, dim, name)
        assert torch.equal(A, whole)
        assert all(torch.equal(product, whole @ B) for product, B in zip(products, factors, strict=True))
        A = torch.randn(6, 12, 24, device=device, dtype=dtype)
        B = torch.randn(24, 36, device=device, dtype=dtype)
        for reduction in ("sum", "avg"):
            fused = torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, reduction, dim, name)
            assert torch.equal(fused, funcol.wait_tensor(funcol.reduce_scatter_tensor(A @ B, reduction, dim, name)))
    with pytest.raises(ValueError, match=f"dimension 1 of 13 elements must be a multiple of the {size} ranks"):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(
            torch.randn(6, 13, 24, device=device, dtype=dtype), B, "sum", 1, name
        )
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_fused_products_have_the_bits_of_the_unfused(size, dtype):
    assert all(ranks.run(size, on_fused, dtype))


def on_overlap(rank, size):
    _, name = setup(rank)
    device = f"neuron:{rank}"
    shard = torch.zeros(256, 2048, device=device, dtype=torch.bfloat16)
    B = torch.zeros(2048, 1024, device=device, dtype=torch.bfloat16)
    whole = torch.zeros(256 * size, 2048, device=device, dtype=torch.bfloat16)

    def timed(call):
        dist.barrier()
        begin = tail_ps(rank)
        call()
        return tail_ps(rank) - begin

    gather = timed(lambda: dist.all_gather_into_tensor(whole, shard))
    product = timed(lambda: whole @ B)
    fused_gather = timed(lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [B], 0, name, return_A=False))
    result = whole @ B
    scatter = timed(lambda: dist.reduce_scatter_tensor(result[:256].contiguous(), result))
    fused_scatter = timed(lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(whole, B, "sum", 0, name))
    return gather, product, fused_gather, scatter, fused_scatter


def test_fused_products_overlap_in_virtual_time():
    results = ranks.run(4, on_overlap)
    assert results == ranks.run(4, on_overlap)
    for gather, product, fused_gather, scatter, fused_scatter in results:
        assert max(gather, product) < fused_gather < gather + product
        assert max(scatter, product) < fused_scatter < scatter + product
