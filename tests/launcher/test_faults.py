"""Faults on demand: what may be written, and what each does to a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launcher.runs import Result, trn, write
from trn_dist.cli import trn as command
from trn_dist.cli.train import find_recipe
from trn_dist.faults import Fault, FaultError, parse_fault
from trn_dist.hardware import Topology, load_cluster

TRAIN = """
    import os, torch, torch.distributed as dist
    from trn_dist import timing
    torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="neuron"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1, 5):
        timing.mark_step()
        optimizer.zero_grad()
        model(torch.ones(4, 64, device="neuron")).square().mean().backward()
        optimizer.step()
        nans = [int(parameter.isnan().sum()) for parameter in model.parameters()]
        print(step, *nans, timing.mark_step().time_ps, flush=True)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank=3,step=5,kill", {"kind": "kill", "rank": 3, "step": 5}),
        (" step=5, stop=1.5s ,rank=0", {"kind": "stop", "rank": 0, "step": 5, "duration_s": 1.5}),
        ("rank=3,step=5,nan,seed=7", {"kind": "nan", "rank": 3, "step": 5, "seed": 7}),
        ("rank=3,slow_chip=1.5x", {"kind": "slow_chip", "rank": 3, "factor": 1.5}),
        ("slow_link=chip 0-chip1:4x", {"kind": "slow_link", "factor": 4.0, "ends": ("chip 0", "chip 1")}),
        ("drop_link=nic 0-rail 0", {"kind": "drop_link", "ends": ("nic 0", "rail 0")}),
    ],
)
def test_forms(text: str, expected: dict) -> None:
    assert parse_fault(text) == Fault(text, **expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=3,step=5,kil", "'kil' is no kind of fault, did you mean kill?"),
        ("rank=3,step=5", "must name one kind, of kill, stop"),
        ("rank=3,step=5,kill,nan", "must name one kind"),
        ("step=5,kill", "whose? Give rank=R"),
        ("rank=3,kill", "when? Give step=S"),
        ("rank=3,step=0,kill", "counted from 1"),
        ("rank=x,step=1,kill", "rank=x: must be a whole number"),
        ("rank=3,rank=4,step=1,kill", "rank is there twice"),
        ("rank=3,step=1,kill=9", "kill takes no value"),
        ("rank=3,step=1,stop=5", "must be a time such as stop=5s"),
        ("rank=3,slow_chip=0.5x", "a factor of at least 1"),
        ("rank=3,step=1,kill,seed=1", "seed belongs to nan"),
        ("slow_link=chip 0-chip 1", "needs a factor"),
        ("drop_link=chip 0", "needs the two ends of a link"),
        ("step=3,drop_link=chip 0-chip 1", "leave out step"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(FaultError, match=re.escape(words)):
        parse_fault(text)


def test_the_launcher_refuses_what_cannot_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(tmp_path / "a.py", "")
    for fault, words in [
        ("rank=2,step=1,kill", "ranks go from 0 to 1"),
        ("drop_link=chip 0-chip 9", "has no link from chip 0 to chip 9"),
        ("rank=0,step=1,explode", "drop_link=chip 0-chip 1       the link is broken"),
    ]:
        result = CliRunner().invoke(command, ["run", "-n", "2", "--fault", fault, str(script)])
        assert result.exit_code == 2 and words in result.stderr
    monkeypatch.setenv("TRN_FAULTS", "rank=0,step=1,explode")
    result = CliRunner().invoke(command, ["run", "-n", "2", str(script)])
    assert result.exit_code == 2 and "TRN_FAULTS: fault 'rank=0,step=1,explode'" in result.stderr


def run(folder: Path, *faults: str) -> Result:
    write(folder / "train.py", TRAIN)
    return trn("run", "-n", 2, *(word for fault in faults for word in ("--fault", fault)), "train.py", cwd=folder)


def rows(result: Result, rank: int) -> list[list[int]]:
    """Of each step its number, NaNs in the weight and in the bias, and picoseconds."""
    prefix = f"[rank{rank}] "
    lines = [line.removeprefix(prefix) for line in result.stdout.splitlines() if line.startswith(prefix)]
    return [[int(word) for word in line.split()] for line in lines]


def test_kill_and_memory_error(tmp_path: Path) -> None:
    result = run(tmp_path, "rank=1,step=3,kill")
    assert result.code == 1
    assert "[rank1] trn: fault in step 3: rank=1,step=3,kill\n" in result.stderr
    assert "was killed by SIGKILL, as the fault 'rank=1,step=3,kill' asks" in result.stderr
    assert len(rows(result, 1)) == 2
    result = run(tmp_path, "rank=0,step=2,hbm_ecc")
    assert result.code == 1
    assert "rank 0 failed first" in result.stderr
    assert "RuntimeError: neuron: nc0: uncorrectable error in HBM" in result.stderr


def test_nan_and_slow_chip_and_stop(tmp_path: Path) -> None:
    begin = time.monotonic()
    faults = ["rank=1,step=2,nan", "rank=0,step=3,slow_chip=4x", "rank=0,step=4,stop=1s"]
    first, plain = run(tmp_path, *faults), run(tmp_path)
    assert first.code == plain.code == 0, first.stderr
    assert time.monotonic() - begin > 1
    assert [sum(row[1:3]) for row in rows(first, 0)][:2] == [0, 0]
    poisoned = [sum(row[1:3]) for row in rows(first, 1)]
    assert poisoned[:2] == [0, 1] and poisoned[2] > 1, "one element, which spreads through the next all-reduce"
    assert sum(rows(first, 0)[2][1:3]) > 1
    slow, usual = ([row[3] for row in rows(result, 0)] for result in (first, plain))
    assert slow[0] == usual[0] and slow[3] > usual[3] * 1.1
    again = run(tmp_path, *faults)
    assert rows(again, 0) == rows(first, 0) and rows(again, 1) == rows(first, 1), "the same every time"


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    from trn_dist.timing.cluster import cluster, cluster_topology

    monkeypatch.setenv("TRN_FAULTS", "slow_link=chip 0-chip 1:4x; drop_link=chip 4-chip 5")
    for cached in (cluster, cluster_topology):
        cached.cache_clear()
    try:
        faulty, sound = cluster_topology(), Topology(load_cluster("trn2.48xlarge"))
        usual = sound.link(("chip", 0), ("chip", 1)).bandwidth_gbps
        assert faulty.link(("chip", 1), ("chip", 0)).bandwidth_gbps == usual / 4
        assert faulty.link(("chip", 5), ("chip", 4)).bandwidth_gbps == 0
        assert faulty.link(("chip", 8), ("chip", 9)).bandwidth_gbps == usual
    finally:
        for cached in (cluster, cluster_topology):
            cached.cache_clear()


@pytest.mark.slow
def test_a_recipe_with_a_fault(tmp_path: Path) -> None:
    options = ["--neuron.ranks", 2, "--training.steps", 4, "--training.global_batch_size", 2, "--run-dir", "out"]
    recipe = write(
        tmp_path / "faulty.toml",
        f"""
        extends = "{find_recipe("llama3_debug").resolve()}"
        [neuron]
        faults = ["rank=1,step=3,kill"]
        """,
    )
    result = trn("train", recipe, *options, cwd=tmp_path)
    assert result.code == 1, result.stderr
    assert "fault: rank=1,step=3,kill\n" in result.stdout
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["faults"] == ["rank=1,step=3,kill"] and facts["last"]["step"] == 2
    bad = trn("train", "llama3_debug", "--neuron.faults", "rank=1,kil", cwd=tmp_path)
    assert bad.code == 2 and "did you mean kill?" in bad.stderr
