"""The stand-alone reference on the CPU."""

import os
import subprocess
import sys

import trn_dist.parity.training as training

PROGRAM = f"""
import importlib.util
import torch
import torch.distributed as dist
spec = importlib.util.spec_from_file_location("cpu_reference", {str(training._CPU_REFERENCE)!r})
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from torch.distributed.fsdp import fully_shard as original
reference._sum_in_gloo()
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
module = torch.nn.Linear(2, 2)
assert fully_shard is not original and fully_shard(module) is module
# A pipeline asks fully_shard for the state of what it sharded.
assert fully_shard.state(module) is original.state(module) is not None
schedule = ScheduleGPipe(PipelineStage(module, 0, 1, torch.device("cpu")), 2, loss_fn=torch.nn.MSELoss())
schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))
assert module.weight.grad is not None
dist.destroy_process_group()
"""


def test_sharded_modules_run_in_a_pipeline():
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
