"""The device module: what there is of devices, what they are, and how the backend is loaded."""

import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


def run(program: str, **environment: str) -> str:
    # A folder of its own for claims on cores: another run of the tests may stand beside this one.
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": folder, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_properties():
    properties = torch.neuron.get_device_properties()
    assert properties.name in {"trn1", "trn1n", "trn2", "trn2n", "trn2u", "trn3", "trn3u"}
    assert properties.total_memory == 24 << 30
    assert "neuron" in torch.neuron.get_device_name()
    assert torch.neuron.get_device_properties("neuron:1") == torch.neuron.get_device_properties(1)
    assert torch.neuron.get_device_capability() == (3, 0)


def test_a_first_tensor_without_file_descriptors_names_the_limit():
    said = run(
        """
import os, resource, torch
torch.neuron.get_device_properties()  # reads the cluster's files
last = os.dup(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    torch.ones(1, device="neuron")
except RuntimeError as error:
    print(error)
"""
    )
    assert "cannot create the HBM arena" in said and "(ulimit -n)" in said, said


def test_device_contexts():
    with torch.neuron.device("neuron:2"):
        assert torch.neuron.current_device() == 2
        with torch.neuron.device_of(torch.ones(1, device="neuron:1")):
            assert torch.neuron.current_device() == 1
        with torch.neuron.device(None), torch.neuron.device(-1), torch.neuron.device_of(torch.ones(1)):
            assert torch.neuron.current_device() == 2
    assert torch.neuron.current_device() == 0
    with torch.device("neuron"):
        assert torch.ones(2).is_neuron


def test_accelerator_contexts_end_also_by_an_error():
    with pytest.raises(KeyError), torch.accelerator.device_index(1):
        assert torch.ones(1, device="neuron").device == torch.device("neuron:1")
        with torch.accelerator.device_index(0), torch.accelerator.device_index(None):
            assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_device_index() == 1
        raise KeyError
    assert torch.accelerator.current_device_index() == 0


def test_each_thread_has_its_current_device():
    def work(index):
        for _ in range(20):
            torch.accelerator.set_device_index(index)
            result = torch.ones(8, 8, device="neuron") @ torch.ones(8, 8, device="neuron")
            if result.sum().device.index != index or torch.accelerator.current_device_index() != index:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, [0, 1, 2, 3]))
    assert torch.accelerator.current_device_index() == 0


def test_the_name_is_neuron():
    from torch._C._autograd import DeviceType
    from torch._C._profiler import ProfilerActivity

    assert torch._C._get_privateuse1_backend_name() == "neuron"
    for kind in (DeviceType, ProfilerActivity):
        assert kind.PrivateUse1 == kind.NEURON and str(kind.NEURON) == f"{kind.__name__}.NEURON"
    torch.utils.rename_privateuse1_backend("neuron")
    with pytest.raises(RuntimeError, match="already been set"):
        torch.utils.rename_privateuse1_backend("other")
    with pytest.raises(RuntimeError, match="runtime module of"):
        torch._register_device_module("neuron", types.ModuleType("other"))
    with pytest.raises(RuntimeError, match=r"torch\.neuron\.nonesuch"):
        torch.utils.backend_registration._get_custom_mod_func("nonesuch")


def test_capability_queries():
    assert torch.neuron.is_available() and torch.neuron.is_bf16_supported()
    assert torch.get_device_module("neuron") is torch.neuron
    assert torch.get_device_module() is torch.neuron
    dtypes = torch.accelerator.get_device_capability("neuron:1")["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64} <= dtypes
    assert torch.qint8 not in dtypes


def test_autoload_can_be_switched_off():
    program = "import torch; print(hasattr(torch, 'neuron'), torch.accelerator.is_available())"
    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False False"
    assert run(program) == "True True"


def test_importing_trn_dist_first_works():
    assert run("import trn_dist, torch; print(torch.ones(2, device='neuron').sum().item())") == "2.0"
    assert run("import trn_dist.neuron.autoload, torch; print(hasattr(torch, 'neuron'))") == "True"


def test_autoload_starts_nothing():
    program = """
import torch, threading, os
maps = open("/proc/self/maps").read()
print(torch.neuron.is_initialized(), "trn_dist-hbm" in maps, "torch._dynamo" in __import__("sys").modules)
torch.neuron.init()
print(torch.neuron.is_initialized())
"""
    assert run(program) == "False False False\nTrue"


COUNT = "import torch; print(torch.neuron.device_count(), torch.ones(1, device='neuron').device)"


@pytest.mark.parametrize(
    "environment,count",
    [
        ({}, 64),
        ({"NEURON_RT_VISIBLE_CORES": "0-7"}, 8),
        ({"NEURON_RT_VISIBLE_CORES": "3"}, 1),
        ({"NEURON_RT_VISIBLE_CORES": "0,2,8-9"}, 4),
        ({"NEURON_RT_NUM_CORES": "4"}, 4),
        ({"NEURON_RT_NUM_CORES": "4", "NEURON_RT_VISIBLE_CORES": "0-1"}, 2),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_NUM_CORES": "100"}, 100),
        ({"TRN_CLUSTER": "trn2.3xlarge"}, 4),
    ],
)
def test_device_count_follows_the_environment(environment, count):
    assert run(COUNT, **environment) == f"{count} neuron:0"


@pytest.mark.parametrize(
    "environment,message",
    [
        ({"NEURON_RT_VISIBLE_CORES": "63-64"}, "NEURON_RT_VISIBLE_CORES.*63-64.*0 to 63"),
        ({"NEURON_RT_VISIBLE_CORES": "x"}, "NEURON_RT_VISIBLE_CORES.*'x'"),
        ({"NEURON_RT_NUM_CORES": "99"}, "NEURON_RT_NUM_CORES.*99.*64"),
        ({"NEURON_LOGICAL_NC_CONFIG": "3"}, "NEURON_LOGICAL_NC_CONFIG.*3"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "1 to 127 devices.*128.*NEURON_RT_VISIBLE_CORES"),
        ({"TRN_CLUSTER": "nonesuch"}, "nonesuch"),
    ],
)
def test_a_wrong_environment_is_refused(environment, message):
    program = f"""
import re, torch
try:
    torch.ones(1, device="neuron")
except Exception as error:
    print(bool(re.search({message!r}, str(error))), error)
"""
    assert run(program, **environment).startswith("True")


def test_lnc_one_halves_the_memory():
    program = "import torch; print(torch.neuron.get_device_properties().total_memory)"
    assert run(program, NEURON_LOGICAL_NC_CONFIG="1", NEURON_RT_NUM_CORES="64") == str(12 << 30)
    assert run(program, TRN_CLUSTER="trn2.48xlarge") == str(24 << 30)


def test_physical_cores_of_a_logical_one():
    program = "import torch; print(torch.neuron.get_device_properties().multi_processor_count)"
    assert run(program) == "2"
    assert run(program, NEURON_LOGICAL_NC_CONFIG="1", NEURON_RT_NUM_CORES="64") == "1"
