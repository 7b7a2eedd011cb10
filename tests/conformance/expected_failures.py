"""What is known to differ from the CPU, by name and with the reason. The list only shrinks: an entry that passes fails.

A key is ``operator:dtype:check``, for modules ``module:dtype:module``.
"""

from __future__ import annotations

import itertools


def key_of(operator: str, dtype: str, check: str) -> str:
    return f"{operator}:{dtype}:{check}"


# torch.nn.modules.linear_cross_entropy_options keeps a closed list of devices on which it accumulates in float32.
_CHUNKED = "PyTorch picks the precision of chunked cross entropy from a closed list of devices"
# The CPU adds biases inside its matrix products, and hands float32 layers whole to oneDNN. On a device PyTorch ends
# each step in a fused cell that adds them afterwards. tests/neuron/test_training.py holds both equal within rounding.
_RECURRENT = "PyTorch composes recurrent layers differently on a device: equal but for rounding"

# The values are equal. The operator's shape function promises (batch, sequence, heads, size) in memory, as on CUDA.
_ATTENTION_LAYOUT = "fused attention's results are laid out as on CUDA, the CPU's as its query"

EXPECTED_FAILURES: dict[str, str] = {
    **{
        key_of("nn.functional.scaled_dot_product_attention", dtype, check): _ATTENTION_LAYOUT
        for dtype, check in itertools.product(("bfloat16", "float16", "float32", "float64"), ("forward", "backward"))
    },
    **{
        key_of(f"nn.functional.linear_cross_entropy.{variant}", dtype, check): _CHUNKED
        for variant, dtype, check in itertools.product(
            ("chunked", "chunked_none"), ("bfloat16", "float16"), ("forward", "backward")
        )
    },
    **{
        key_of(f"nn.{layer}", dtype, "module"): _RECURRENT
        for layer, dtype in itertools.product(("RNN", "GRU", "LSTM", "GRUCell", "LSTMCell"), ("float32", "float64"))
    },
    **{key_of("nn.LinearCrossEntropyLoss", dtype, "module"): _CHUNKED for dtype in ("bfloat16", "float16")},
}

# PyTorch's suite of torch.distributed: names of tests, with ":ranks" where it is so on that number of ranks alone.
_DDP_LOG = "ProcessGroup::getBackendName knows PyTorch's own backends alone and says custom for all others"
_WORDS = "the suite looks for Gloo's words for a barrier's time-out, with 0.1 s of tolerance"
_NCCL_WORDS = "the suite looks for the words of NCCL's watchdog, which kills the process, for a time-out"
_NCCL_CLASS = "makes a ProcessGroupNCCL by its class"
_MONITORED = "monitored_barrier is Gloo's alone in c10d"
_SPARSE = "sparse tensors are reduced by Gloo alone; here they are refused"
_HEAVY = "hundreds of convolutions of 400 GFLOP: hours on a CPU, so that its own deadlines end it"

DISTRIBUTED_FAILURES: dict[str, str] = {
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_group:3": _WORDS,
    "test_barrier_timeout_group:4": _WORDS,
    "test_ddp_logging_data_cpu": _DDP_LOG,
    "test_monitored_barrier_allreduce_hang": _NCCL_WORDS,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _NCCL_WORDS,
    "test_monitored_barrier_failure_order:3": _MONITORED,
    "test_monitored_barrier_failure_order:4": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks:3": _MONITORED,
    "test_monitored_barrier_wait_all_ranks:4": _MONITORED,
    "test_nccl_high_priority_stream": _NCCL_CLASS,
    "test_sparse_all_reduce_sum": _SPARSE,
    "test_sparse_all_reduce_sum_cuda": _SPARSE,
}

# Not run, for they would only cost time.
DISTRIBUTED_NOT_RUN: dict[str, str] = {"test_ddp_uneven_inputs": _HEAVY}

# How the reasons begin for which the suite skips a test of its own accord.
DISTRIBUTED_SKIPS = (
    "https://github.com/pytorch/pytorch/",  # on every backend
    "Test is failing, see https://github.com/pytorch/pytorch/",
    "Skipped due to flakiness",
    "Skipped due to small world size",
    "Skipped due to odd world size",
    "Test requires an exact world size",
    "Test requires world size",
    "Requires file:// initialization method",
    "no torchvision",
)
