"""Timing mode with a process a pipeline stage: they meet in virtual time, and errors name the ranks they stand for."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trn_dist.timing.virtual_world import enter_world

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trn_dist import timing

torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)
mesh = dist.device_mesh.init_device_mesh("neuron", (2, 2), mesh_dim_names=("pp", "tp"))
stage_rank = mesh["pp"].get_local_rank()


class Block(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, inner), torch.nn.Linear(inner, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


stages, parameters = [], []
for number in (stage_rank, stage_rank + 2):
    block = Block(512 * (1 + number)).to("neuron")  # each stage takes another time
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parameters += block.parameters()
    stages.append(PipelineStage(block, number, 4, torch.device("neuron"), group=mesh["pp"].get_group()))
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda y, x: (y - x).square().mean())
steps = []
for _ in range(2):
    x = torch.ones(8, 64, 256).to("neuron")
    schedule.step(*([x] if stage_rank == 0 else []), **({"target": x} if stage_rank == 1 else {}))
    norm = torch.stack([p.grad.to_local().norm() if hasattr(p.grad, "to_local") else p.grad.norm() for p in parameters])
    total = norm.sum()
    dist.all_reduce(total, group=mesh["pp"].get_group())
    total.item()
    seed = torch.tensor([dist.get_rank()], device="neuron")
    dist.broadcast(seed, src=2)
    seed = seed.item()
    objects = [dist.get_rank()]
    dist.broadcast_object_list(objects, src=2)
    dist.barrier()
    step = timing.mark_step()
    steps.append({
        "parts": step.parts(),
        "groups": [vars(group) for group in step.groups],
        "seed": seed,
        "object": objects[0],
        "peak": torch.neuron.memory_stats()["allocated_bytes.all.peak"],
    })
with open(f"{sys.argv[1]}-{dist.get_rank()}.json", "w") as file:
    json.dump({"steps": steps, "reason": timing.irreproducible_reason()}, file)
dist.destroy_process_group()
"""


def run_stages(program: Path, *arguments: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """The program in timing mode on four ranks, two pipeline stages of two: one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for stage in (0, 1):
        world = {"RANK": str(stage), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRN_TIMING_ONLY": "1"}
        command = ["-m", "trn_dist.timing.lone_rank", "4", "--stages", "2", str(program), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **world, **variables}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, *command], env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    done = []
    for process in started:
        try:
            out, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, errors))
    return done


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[list[dict], list[dict], Path]:
    """What the first rank of each stage says with numbers, and without; and the record of the latter."""
    folder = tmp_path_factory.mktemp("stages")
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = ["-m", "trn_dist.cli", "run", "-n", "4", str(program), str(folder / "real")]
    real = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert real.returncode == 0, real.stdout + real.stderr
    for done in run_stages(program, str(folder / "alone"), TRN_RECORD=str(folder / "recorded")):
        assert done.returncode == 0, done.stdout + done.stderr
    found = [
        [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 2)] for name in ("real", "alone")
    ]
    return found[0], found[1], folder / "recorded"


def test_stages_take_what_they_take_with_numbers(both):
    real, alone, _ = both
    for with_numbers, without in zip(real, alone, strict=True):
        assert without["reason"] == with_numbers["reason"] == ""
        for step, expected in zip(without["steps"], with_numbers["steps"], strict=True):
            assert step == expected
            assert step["seed"] == step["object"] == 2
    assert any(name.startswith("waiting") for name in alone[0]["steps"][1]["parts"])


def test_their_record_replays_to_their_own_times(both):
    from trn_dist.timing.replay import Replay

    _, alone, recorded = both
    replay = Replay.of(recorded)
    run = replay.on(replay.own_cluster(), "static")
    assert run.ranks == (0, 2)
    for steps, recorded_steps in zip(run.steps, alone, strict=True):
        assert [step.parts() for step in steps[:2]] == [step["parts"] for step in recorded_steps["steps"]]


FAILING = """
import os, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta

dist.init_process_group(timeout=timedelta(seconds=float(sys.argv[2])))
pair = dist.new_group([0, 2])
dist.new_group([1, 3])
second = dist.get_rank() == 2
x = torch.randn(1 << 20, device="neuron")
if sys.argv[1] == "dies":
    if second:
        os._exit(7)
    dist.recv(x, 2)
elif sys.argv[1] == "differs":
    dist.barrier() if second else dist.all_reduce(x)
elif sys.argv[1] == "deadlock":
    dist.recv(x, 0 if second else 2, group=pair)
elif sys.argv[1] == "late":
    if second:
        time.sleep(4)
    dist.all_reduce(x)
elif sys.argv[1] == "refused":
    for call in (lambda: dist.send(x, 1), lambda: dist.all_reduce(torch.ones(2))):
        try:
            call()
        except NotImplementedError as error:
            print(error, file=sys.stderr)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("what", "timeout_s", "words"),
    [
        ("dies", 60, ["rank 2 has died"]),
        ("differs", 60, ["rank 0: all_reduce", "rank 2: barrier"]),
        ("deadlock", 60, ["rank 2 waits for rank 0"]),
        ("late", 2, ["rank 0 waited 2 s for rank 2"]),
        ("refused", 60, ["to rank 1: messages are between the first ranks", "all_reduce of CPU tensors"]),
    ],
)
def test_errors_name_the_ranks_of_the_job(tmp_path, what: str, timeout_s: int, words: list[str]):
    (tmp_path / "program.py").write_text(FAILING, encoding="utf-8")
    first, _ = run_stages(tmp_path / "program.py", what, str(timeout_s))
    assert first.returncode != 0
    for text in words:
        assert text in first.stderr


@pytest.mark.parametrize(
    ("stages", "rank", "words"), [(3, "0", "3 pipeline stages"), (2, "2", "RANK=2"), (2, "", "RANK=")]
)
def test_wrong_stages_are_refused(monkeypatch: pytest.MonkeyPatch, stages: int, rank: str, words: str):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ValueError, match=words):
        enter_world(4, 1, stages)
