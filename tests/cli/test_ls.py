"""``trn ls``, whose rows are those of neuron-ls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launcher.runs import DEADLINE_S, Run, write
from trn_dist.cli import trn
from trn_dist.hardware import list_configs


def call(*arguments: str) -> str:
    result = CliRunner().invoke(trn, ["ls", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_of_a_trn2_node() -> None:
    lines = call("--cluster", "trn2.48xlarge").splitlines()
    assert lines[:3] == [
        "instance-type: trn2.48xlarge",
        "instance-id: simulated, node 0",
        "logical-neuroncore-config: 2",
    ]
    # As neuron-ls prints these two, but for the columns of the host.
    assert "| 0      | 4      | 0-3      | 96 GB  | 12, 3, 4, 1   |" in lines[7]
    assert "| 4      | 4      | 16-19    | 96 GB  | 0, 7, 8, 5    |" in lines[11]
    assert len({len(line) for line in lines[3:]}) == 1
    assert "CONNECTED" not in call("--cluster", "trn2.3xlarge")


def test_json_has_neuron_ls_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(call("--json", "--cluster", "trn2.48xlarge"))
    assert len(rows) == 16
    assert isinstance(rows[0].pop("neuron_processes"), list)  # of whatever else runs on this machine
    assert rows[0] == {
        "neuron_device": 0,
        "bdf": None,
        "cpu_affinity": None,
        "numa_node": None,
        "connected_to": [12, 3, 4, 1],
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 103079215104,
        "neuroncore_ids": [0, 1, 2, 3],
    }
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    rows = json.loads(call("--json", "--cluster", "trn2.48xlarge"))
    assert rows[1]["neuroncore_ids"] == list(range(8, 16)) and rows[1]["logical_neuroncore_config"] == 1


@pytest.mark.parametrize("name", list_configs("clusters"))
def test_every_cluster_is_drawn(name: str) -> None:
    out = call("--cluster", name, "--topology", "--wide")
    assert f"instance-type: {name}\n" in out and "Device topology" in out


def test_the_drawing_has_the_links_of_the_table() -> None:
    out = call("--cluster", "trn2.48xlarge", "-t")
    rows = [line for line in out.splitlines() if line.startswith(" * <-->")]
    assert [
        [int(word.strip("[]")) for word in row.replace("[ ", "[").replace("[ ", "[").split() if "[" in word]
        for row in rows
    ] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


def test_mistakes() -> None:
    result = CliRunner().invoke(trn, ["ls", "--cluster", "trn2.3xlarge", "--node", "1"])
    assert result.exit_code == 2 and "1: a trn2.3xlarge has node 0 to 0" in result.stderr
    assert CliRunner().invoke(trn, ["ls", "--cluster", "trn2.3xlrge"]).exit_code == 2


def test_running_ranks_are_on_their_cores(tmp_path: Path) -> None:
    write(
        tmp_path / "sit.py",
        """
        import os, pathlib, time, torch
        torch.ones(1, device="neuron")
        pathlib.Path("up" + os.environ["RANK"]).touch()
        time.sleep(300)
        """,
    )

    def pids(node: int) -> dict[int, list[int]]:
        command = [sys.executable, "-m", "trn_dist.cli", "ls", "--json", "--node", str(node)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        rows = json.loads(done.stdout)
        return {
            row["neuron_device"]: [entry["pid"] for entry in row["neuron_processes"] if entry["command"] == "sit.py 7"]
            for row in rows
        }

    run = Run("run", "-n", 12, "--nodes", 2, "sit.py", 7, cwd=tmp_path)
    for rank in range(12):
        run.wait_for(tmp_path / f"up{rank}")
    try:
        assert run.pid_of("trn:rank5") in pids(0)[1]
        assert run.pid_of("trn:rank6") in pids(1)[0]
        assert [len(found) for found in pids(1).values()] == [4, 2] + [0] * 14
    finally:
        os.kill(run.process.pid, signal.SIGINT)
    assert run.result().code == 130
