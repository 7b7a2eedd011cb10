"""TorchTitan on CPU tensors, with Gloo between ranks: the reference that owes nothing to this package.

Stand-alone: imports torch and torchtitan only, and gives ``torch.cpu`` what TorchTitan asks of a device. Everything
else, the trainer first of all, is TorchTitan's own. Run as a script, one process a rank, under torchrun's environment
and with TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that no other device is loaded::

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun --nproc-per-node 2 cpu_reference.py --job.config_file recipe.toml

What TorchTitan 0.2 assumes and a CPU lacks, in the order in which it fails:

* ``models/moe/kernels.py`` imports triton, which CPU builds of torch do not have: an empty module takes its place,
  since only expert parallelism calls it;
* ``tools/utils.py`` takes CUDA when there is no accelerator: it is told "cpu";
* names, memory statistics and streams: constants and no-ops;
* ``reduce_scatter`` with AVG and PREMUL_SUM, which Gloo lacks: FSDP2 is made to sum and to divide by itself;
* ``barrier(device_ids=...)``, which Gloo refuses: the argument is dropped.
"""

import functools
import os
import sys
import types
from typing import Any

import torch


def _provide_triton_free_kernels() -> None:
    name = "torchtitan.models.moe.kernels"
    module: Any = types.ModuleType(name)

    def generate_permute_indices(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("expert parallelism is not part of the CPU reference")

    module.generate_permute_indices = generate_permute_indices
    sys.modules[name] = module


def _provide_device() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    cpu: Any = torch.cpu
    cpu.set_device = lambda device: None
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(name="cpu", total_memory=2**40)
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {
        "active_bytes.all.peak": 0,
        "reserved_bytes.all.peak": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _sum_in_gloo() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard

    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)  # type: ignore[assignment]

    import torch.distributed.fsdp as fsdp

    @functools.wraps(fully_shard)  # the pipeline's stages ask it for .state
    def fully_shard_with_sums(module: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = fully_shard(module, *args, **kwargs)
        for each in wrapped if isinstance(wrapped, (list, tuple)) else (wrapped,):
            if isinstance(each, FSDPModule):
                each.set_force_sum_reduction_for_comms(True)
        return wrapped

    # Before any model of TorchTitan is imported: they take the name from the package.
    fsdp.fully_shard = fully_shard_with_sums  # type: ignore[assignment]


def main() -> None:
    if hasattr(torch, "neuron"):
        sys.exit("cpu_reference: the device neuron is loaded; run this with TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    if torch.cuda.is_available():
        sys.exit('cpu_reference: CUDA is available and would be mixed in; run this with CUDA_VISIBLE_DEVICES=""')
    if torch.get_num_threads() != int(os.environ.get("OMP_NUM_THREADS", "1")):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _provide_triton_free_kernels()
    _provide_device()
    _sum_in_gloo()
    import torchtitan.train as train

    train.main(train.Trainer)


if __name__ == "__main__":
    main()
