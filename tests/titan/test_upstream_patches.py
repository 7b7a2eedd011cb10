"""TorchTitan as it comes out of an import once the device is loaded. Fresh interpreters, because imports happen "
"once."""

import subprocess
import sys

import pytest

from trn_dist.titan.upstream_patches import PEAK_FLOPS


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_loading_the_device_imports_nothing_of_torchtitan():
    code = (
        "import sys, torch; print([name for name in sys.modules if name.split('.')[0] in ('torchtitan', 'datasets')])"
    )
    assert python(code).strip() == "[]"


def test_a_plain_import_of_torchtitan_comes_out_corrected():
    output = python(
        """
import sys, torch
import torchtitan.models.moe.kernels as kernels
from torchtitan.tools import profiling, utils
from torchtitan.config import ConfigManager
print(kernels.__file__)
print(utils.device_type, utils.get_peak_flops("any name"))
print(profiling.torch.cuda.memory._snapshot is torch.neuron.memory._snapshot, profiling.torch.Tensor is torch.Tensor)
sys.argv = ["train", "--training.steps", "3"]
print(ConfigManager().parse_args().training.steps)
"""
    ).splitlines()
    assert output[0].endswith("trn_dist/titan/expert_permutation.py")
    assert output[1] == f"neuron {PEAK_FLOPS['trn2']}"
    assert output[2] == "True True"
    assert output[3] == "3"


def test_profiler_gets_the_devices_activity_in_place_of_none():
    python(
        """
import torch, torchtitan.tools.profiling as profiling
Activity = torch.profiler.ProfilerActivity
with profiling.torch.profiler.profile(activities=[Activity.CPU, None]) as profiler:
    torch.ones(3, device="neuron") + 1
assert {event.key for event in profiler.key_averages()} >= {"aten::add", "aten::ones"}
assert set(profiler.activities) == {Activity.CPU, Activity.PrivateUse1}
"""
    )


def test_selective_checkpointing_takes_more_spans_when_it_recomputes():
    python(
        """
import functools, torch
import torchtitan.distributed.activation_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
runs = 0

def region(x):
    global runs
    runs += 1
    for _ in range(runs):
        with torch.profiler.record_function("FSDP::all_gather"):
            x = x * 1
    return x.sin().sin() if runs == 1 else (x / 1).sin().sin()

def spans_only(x):
    global runs
    runs += 1
    for _ in range(runs):
        with torch.profiler.record_function("FSDP::all_gather"):
            pass
    return x.sin().sin()

policy = lambda context, operator, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE
contexts = functools.partial(create_selective_checkpoint_contexts, policy)
x = torch.ones(3, device="neuron", requires_grad=True)
checkpoint(spans_only, x, use_reentrant=False, context_fn=contexts).sum().backward()
assert runs == 2 and torch.allclose(x.grad.cpu(), torch.cos(torch.sin(torch.ones(3))) * torch.cos(torch.ones(3)))
runs = 0
try:  # an operator that was not there before is still refused
    checkpoint(region, x, use_reentrant=False, context_fn=contexts).sum().backward()
except RuntimeError as error:
    assert "not found in storage" in str(error)
else:
    raise AssertionError("more operators in recomputation were taken")
"""
    )


def test_torchtitan_imported_too_early_is_said():
    code = (
        "import sys, types; from trn_dist.titan import upstream_patches as patches\\n"
        "sys.modules['torchtitan.tools.utils'] = types.ModuleType('torchtitan.tools.utils')\\n"
        "sys.meta_path = [f for f in sys.meta_path if not isinstance(f, patches.TorchTitanFinder)]\\n"
        "patches.install_import_hook()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code.replace("\\n", "\n")], capture_output=True, text=True, timeout=120
    )
    assert (
        "torchtitan.tools.utils was imported before the device neuron was loaded; import torch first" in result.stderr
    )


@pytest.mark.parametrize("name", ["trn2", "trn3u"])
def test_peak_flops_are_those_of_a_logical_core(name: str):
    # Two physical cores of 79 dense bfloat16 TFLOP/s.
    assert PEAK_FLOPS[name] == 2 * 79e12
