"""torch.profiler on the device: operators and collectives on virtual time, linked to the host's side."""

import json

import pytest
import torch
from torch import nn
from torch.profiler import DeviceType, ProfilerActivity, profile, record_function, schedule

from tests.c10d import ranks

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


def on_device(events):
    return [event for event in events if event.device_type() == DeviceType.PrivateUse1]


def device_times(prof):
    """Name and duration in nanoseconds of what ran on the device, in order."""
    return [(e.name(), e.duration_ns()) for e in on_device(prof.profiler.kineto_results.events())]


def test_operators_on_virtual_time():
    def step():
        x = torch.ones(256, 256, device="neuron")
        return (x @ x).relu_().sum()

    step()
    with profile(activities=BOTH) as first:
        step()
    with profile(activities=BOTH) as second:
        step()
    assert [name for name, _ in device_times(first)] == ["fill_", "mm", "relu_", "sum"]
    assert all(duration > 0 for _, duration in device_times(first))
    # Rounded down to nanoseconds at both ends.
    for (_, one), (_, other) in zip(device_times(first), device_times(second), strict=True):
        assert abs(one - other) <= 1


def test_table_carries_device_time():
    x = torch.ones(256, 256, device="neuron")
    with profile(activities=BOTH, record_shapes=True) as prof:
        x @ x
    averages = {event.key: event for event in prof.key_averages()}
    mm = dict(device_times(prof))["mm"] / 1e3
    # The host's operators own what they launched; their callers include it.
    assert averages["aten::mm"].device_time_total == pytest.approx(mm)
    assert averages["aten::matmul"].device_time_total == pytest.approx(mm)
    assert averages["aten::matmul"].self_device_time_total == 0
    table = prof.key_averages().table(sort_by="self_device_time_total")
    assert "Self NEURON" in table and "aten::mm" in table


def test_backward_is_linked_to_its_operators():
    model = nn.Linear(64, 64).to("neuron")
    x = torch.ones(8, 64, device="neuron")
    with profile(activities=BOTH) as prof:
        model(x).sum().backward()
    linked = {e.correlation_id(): e.name() for e in prof.profiler.kineto_results.events()}
    launched = [linked.get(e.linked_correlation_id()) for e in on_device(prof.profiler.kineto_results.events())]
    assert all(name is not None and name.startswith("aten::") for name in launched)
    assert "aten::addmm" in launched and "aten::mm" in launched


def test_chrome_trace(tmp_path):
    stream = torch.neuron.Stream()
    x = torch.ones(64, 64, device="neuron")
    with profile(activities=BOTH) as prof, record_function("my step"):
        x + 1
        with torch.neuron.stream(stream):
            x * 2
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    kernels = {e["name"]: e for e in events if e.get("cat") == "kernel"}
    assert kernels["add"]["tid"] == 0 and kernels["mul"]["tid"] == stream.stream_id
    assert kernels["add"]["args"]["engine"] == "vector" and kernels["add"]["args"]["hbm_bytes"] > 0
    assert any(e["name"] == "my step" for e in events)
    labels = [e["args"].get("labels") for e in events if e["name"] == "process_labels"]
    assert "neuron:0, virtual time" in labels
    # An arrow from the host's launch to the device.
    arrows = {e["ph"] for e in events if e.get("cat") == "ac2g"}
    assert arrows == {"s", "f"}


def test_device_alone_and_host_alone():
    x = torch.ones(16, device="neuron")
    with profile(activities=[ProfilerActivity.PrivateUse1]) as prof:
        x + 1
    assert [name for name, _ in device_times(prof)] == ["add"]
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        x + 1
    assert device_times(prof) == []


def test_schedule_profiles_the_active_steps():
    x = torch.ones(16, device="neuron")
    seen = []
    with profile(
        activities=BOTH,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda prof: seen.append([name for name, _ in device_times(prof)]),
    ) as prof:
        for _ in range(5):
            x.exp()
            prof.step()
    assert seen == [["exp", "exp"]]


def test_memory_of_the_device():
    with profile(activities=BOTH, profile_memory=True) as prof:
        x = torch.empty(1 << 20, dtype=torch.uint8, device="neuron")
        del x
    empty = next(event for event in prof.key_averages() if event.key == "aten::empty")
    assert empty.self_device_memory_usage == 1 << 20
    memory = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert memory == [1 << 20, -(1 << 20)]


def test_copies_are_copies(tmp_path):
    with profile(activities=BOTH) as prof:
        torch.ones(1024).to("neuron").cpu()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "gpu_memcpy"] == ["copy from host", "copy to host"]


def test_profile_changes_no_virtual_time():
    def elapsed(profiled):
        x = torch.ones(128, 128, device="neuron")
        torch.neuron.synchronize()
        start, end = (torch.neuron.Event(enable_timing=True) for _ in range(2))
        start.record()
        if profiled:
            with profile(activities=BOTH):
                x @ x
        else:
            x @ x
            torch.neuron.synchronize()
        end.record()
        torch.neuron.synchronize()
        return start.elapsed_time(end)

    assert elapsed(True) == elapsed(False)


def test_autograd_profiler():
    x = torch.ones(256, 256, device="neuron")
    with torch.autograd.profiler.profile(use_device="neuron") as prof, record_function("outer"):
        x @ x
    times = {event.key: event.device_time_total for event in prof.key_averages()}
    assert times["aten::mm"] > 0 and times["outer"] >= times["aten::mm"]
    assert "NEURON" in prof.table()


def profiled_collective(rank: int, size: int) -> list[tuple[str, int]]:
    import torch.distributed as dist

    t = torch.ones(1 << 16, device="neuron")
    with profile(activities=BOTH) as prof:
        work = dist.all_reduce(t, async_op=True)
        t2 = torch.ones(64, device="neuron") * 2
        work.wait()
        t2.add_(t[:64])
    return [(name, duration_ns) for name, duration_ns in device_times(prof) if name not in ("fill_", "mul", "add_")]


def test_collectives() -> None:
    for collectives in ranks.run(2, profiled_collective):
        ((name, duration_ns),) = collectives
        assert name == "all_reduce" and duration_ns > 0
