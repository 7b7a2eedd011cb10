"""TorchTitan's TensorBoard files, profiler and memory snapshots, as it writes them on any accelerator."""

import json
import pickle
from pathlib import Path

import pytest

from tests.launcher.runs import DEADLINE_S, Run
from tests.titan.test_checkpoint import RECIPE, SETTINGS

STEPS = 4
OPTIONS = ["--training.steps", STEPS, "--metrics.enable_tensorboard", "--profiling.enable_memory_snapshot"]
OPTIONS += ["--profiling.enable_profiling", "--profiling.profile_freq", STEPS]
OPTIONS += ["--profiling.profiler_warmup", 1, "--profiling.profiler_active", 1]


@pytest.mark.slow
def test_one_run_with_all_of_them(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    run = Run("train", RECIPE, "--run-dir", folder, *SETTINGS, "--checkpoint.no-enable", *OPTIONS, cwd=tmp_path)
    stdout, stderr = run.process.communicate(timeout=DEADLINE_S)
    assert run.process.returncode == 0, stdout + stderr

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss_metrics/global_avg_loss")]
    assert losses == [(step["step"], pytest.approx(step["loss"], rel=1e-7)) for step in steps]
    own = [line for line in map(json.loads, (folder / "metrics" / "rank-00000.jsonl").read_text().splitlines())]
    predicted = [event.value for event in events.Scalars("predicted/step_time_s")]
    assert predicted == [pytest.approx(step["predicted"]["step_time_s"], rel=1e-6) for step in own]

    for rank in range(2):
        trace = json.loads((folder / f"profile_traces/iteration_{STEPS}/rank{rank}_trace.json").read_text())
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        names = {event["name"] for event in trace["traceEvents"]}
        assert len(kernels) > 100 and all(event["dur"] > 0 for event in kernels)
        assert {"neuron:_all_gather_base", "neuron:_reduce_scatter_base"} <= names

        snapshot = folder / f"memory_snapshot/iteration_{STEPS}/rank{rank}_memory_snapshot.pickle"
        memory = pickle.loads(snapshot.read_bytes())
        assert {"segments", "device_traces"} <= memory.keys()
        assert {event["action"] for event in memory["device_traces"][rank]} >= {"alloc", "free_completed"}
