"""Timing mode: no numbers, and the same times and memory as with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trn_dist import timing

torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
torch.manual_seed(0)
mesh = dist.device_mesh.init_device_mesh("neuron", (2, 2), mesh_dim_names=("dp", "tp"))
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(256)
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        q = self.norm(x).view(2, 64, 4, 64).transpose(1, 2)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(torch.nn.functional.silu(self.up(x)))


embedding = torch.nn.Embedding(1000, 256).to("neuron")
blocks = torch.nn.Sequential(*(Block() for _ in range(2))).to("neuron")
for block in blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
model = torch.nn.Sequential(embedding, blocks)
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
timing.mark_step()
steps = []
for _ in range(2):
    tokens = torch.arange(128).view(2, 64).to("neuron")
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    count = torch.tensor(7, device="neuron")
    dist.all_reduce(count)
    assert count.item() == 28
    value = loss.item()
    step = timing.mark_step()
    memory = torch.neuron.memory_stats()
    steps.append({
        "parts": step.parts(),
        "operators": sorted((o.name, o.count, o.busy_ps, o.bytes) for o in step.operators),
        "groups": [vars(group) for group in step.groups],
        "memory": {name: memory[name] for name in ("allocated_bytes.all.peak", "reserved_bytes.all.peak")},
    })
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"steps": steps, "value": value, "reason": timing.irreproducible_reason()}, file)
"""


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict, dict, Path]:
    """What rank 0 of four says with numbers, and what one process for all four says without; and its record."""
    folder = tmp_path_factory.mktemp("timing_only")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    program = str(folder / "program.py")
    real = run(["-m", "trn_dist.cli", "run", "-n", "4", program, str(folder / "real.json")])
    assert real.returncode == 0, real.stdout + real.stderr
    lone = run(
        ["-m", "trn_dist.timing.lone_rank", "4", program, str(folder / "lone.json")],
        TRN_TIMING_ONLY="1",
        TRN_RECORD=str(folder / "recorded"),
    )
    assert lone.returncode == 0, lone.stdout + lone.stderr
    found = [json.loads((folder / name).read_text(encoding="utf-8")) for name in ("real.json", "lone.json")]
    return found[0], found[1], folder / "recorded"


def test_times_and_memory_are_those_with_numbers(both):
    real, lone, _ = both
    assert lone["reason"] == real["reason"] == ""
    for with_numbers, without in zip(real["steps"], lone["steps"], strict=True):
        assert without["operators"] == with_numbers["operators"]
        assert without["memory"] == with_numbers["memory"]
        assert without["parts"] == with_numbers["parts"]
        assert without["groups"] == with_numbers["groups"]
    assert real["value"] == real["value"]
    assert lone["value"] != lone["value"]  # NaN


def test_its_record_replays_to_its_own_times(both):
    from trn_dist.timing.replay import Replay

    _, lone, recorded = both
    replay = Replay.of(recorded)
    for sharing in ("static", "shared"):
        (steps,) = replay.on(replay.own_cluster(), sharing).steps
        if sharing == "static":
            assert [step.parts() for step in steps[1:3]] == [step["parts"] for step in lone["steps"]]
        assert all(sum(step.parts().values()) == step.time_ps for step in steps)


REFUSED = """
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

dist.init_process_group()
dist.monitored_barrier()
x = torch.randn(8, device="neuron")
calls = {
    "nonzero": lambda: torch.nonzero(x),
    "branch": lambda: bool(x.sum() > 0),
    "argmax": lambda: x.argmax().item(),
    "mask": lambda: x[x > 0],
    "list": lambda: x.argsort().tolist(),
    "send": lambda: dist.send(x, 1),
    "symmetric": lambda: symmetric_memory.rendezvous(symmetric_memory.empty(8, device="neuron"), "0"),
    "gloo": lambda: dist.new_group([0, 1], backend="gloo"),
}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0], sep="|")
counter = torch.zeros(3, dtype=torch.int64, device="neuron")
counter += 2
print("counter", counter.tolist(), sep="|")
counter += x[:3].to(torch.int64)
try:
    counter.tolist()
except NotImplementedError:
    print("counter", "unknown", sep="|")
"""


def test_what_depends_on_numbers_is_refused_by_name(tmp_path):
    (tmp_path / "program.py").write_text(REFUSED, encoding="utf-8")
    done = run(["-m", "trn_dist.timing.lone_rank", "2", str(tmp_path / "program.py")], TRN_TIMING_ONLY="1")
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    said = {name: words for name, *words in lines if name != "counter"}
    for name, operator in {
        "nonzero": "aten::nonzero",
        "branch": "aten::",
        "argmax": "aten::_local_scalar_dense",
        "mask": "aten::index by a mask",
        "list": "to the host",
    }.items():
        assert said[name][0] == "NotImplementedError"
        assert "computes no numbers" in said[name][1] and operator in said[name][1], said[name]
    assert "Pipeline parallelism" in said["send"][1]
    assert "no symmetric memory" in said["symmetric"][1]
    assert "use 'neuron'" in said["gloo"][1]
    assert [words for name, *words in lines if name == "counter"] == [["[2, 2, 2]"], ["unknown"]]


def test_a_virtual_world_needs_timing_mode():
    done = run(["-m", "trn_dist.timing.lone_rank", "2", "program.py"], TRN_TIMING_ONLY="")
    assert done.returncode == 2
    assert "set TRN_TIMING_ONLY=1" in done.stderr


def test_trn_run_starts_one_process_for_all_ranks(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_WORLD_SIZE'], sys.argv[1:])\n",
        encoding="utf-8",
    )
    program = str(tmp_path / "program.py")
    done = run(["-m", "trn_dist.cli", "run", "-n", "192", "--timing-only", program, "--steps", "3"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 192 64 ['--steps', '3']"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "65", "--nodes", "1"], "65 ranks on a node"),
        (["-n", "65", "--nodes", "2"], "do not divide evenly over 2 nodes"),
        (["-n", "0"], "0 ranks"),
        (["-n", "2", "--fault", "rank=1,step=1,kill"], "no other to go wrong"),
    ],
)
def test_wrong_worlds_are_refused(arguments, words):
    done = run(["-m", "trn_dist.cli", "run", *arguments, "--timing-only", __file__])
    assert done.returncode == 2
    assert words in done.stderr
