"""PyTorch's own suite of ``torch.distributed`` on the process group ``neuron``: what NCCL runs of it, and more.

What fails is listed in ``expected_failures.py`` by name with the reason, and so are the reasons for which the suite
skips. A listed test that passes fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.distributed_suite import FAILED, PASSED, Server
from tests.conformance.expected_failures import DISTRIBUTED_FAILURES, DISTRIBUTED_NOT_RUN, DISTRIBUTED_SKIPS

# A few of each kind.
SAMPLE = (
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_all_gather_into_cat_tensor_cuda",
    "test_all_gather_object_subgroup",
    "test_all_gather_v_cuda",
    "test_all_reduce_sum_cuda_complex",
    "test_all_to_all_single_unequal_split_group_cuda",
    "test_barrier_group_cuda",
    "test_batch_isend_irecv_nccl",
    "test_coalescing_manager_async",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_sync_module_states",
    "test_gather_object",
    "test_nccl_backend_bool_reduce",
    "test_reduce_scatter_v_cuda",
    "test_scatter_cuda_complex",
    "test_send_recv_any_source",
)


def unexpected(server: Server, name: str) -> str | None:
    outcome, why = server.run(name)
    reason = DISTRIBUTED_FAILURES.get(name) or DISTRIBUTED_FAILURES.get(f"{name}:{server.world_size}")
    if outcome == FAILED:
        return None if reason else f"{name} fails:\n{why}"
    if reason:
        return f"{name} is {outcome} now: take it out of expected_failures.py"
    if outcome != PASSED and not any(why.startswith(known) for known in DISTRIBUTED_SKIPS):
        return f"{name} is skipped: {why}"
    return None


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Server]:
    server = Server(4)
    yield server
    server.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(four_ranks: Server, name: str) -> None:
    found = unexpected(four_ranks, name)
    assert not found, found


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all(world_size: int) -> None:
    server = Server(world_size)
    names = [name for name in server.names if name not in DISTRIBUTED_NOT_RUN]
    found = [what for name in names if (what := unexpected(server, name))]
    server.close()
    assert not found, f"{len(found)} of {len(names)} on {world_size} ranks:\n" + "\n".join(found)


def test_lists_name_tests_of_the_suite(four_ranks: Server) -> None:
    listed = {key.split(":")[0] for key in (*DISTRIBUTED_FAILURES, *DISTRIBUTED_NOT_RUN)} | set(SAMPLE)
    assert not listed - set(four_ranks.names)
