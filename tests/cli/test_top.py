"""``trn top`` and ``trn monitor``: what the ranks of a running job do, asked from another process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launcher.runs import DEADLINE_S, Run, trn, write
from trn_dist import telemetry
from trn_dist.cli import trn as command_line

# Two steps of a small model, again and again; the parameters take 2 x 256 KiB and 2 KiB of bias.
BUSY = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank = os.environ["RANK"]
    torch.neuron.set_device(int(os.environ["LOCAL_RANK"]))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256, bias=False)).to("neuron")
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(64, 256, device="neuron")).sum().backward()
        optimizer.step()
        pathlib.Path("up" + rank).touch()
        time.sleep(0.01)
        # All stop in the same round.
        ended = torch.tensor([float(os.path.exists("stop"))], device="neuron")
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)
        if ended.item():
            break
    dist.destroy_process_group()
"""
PARAMETER_BYTES = (2 * 256 * 256 + 256) * 4


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trn_dist.cli", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def watched_on_a_terminal(pid: int) -> int:
    """Waits until the picture was renewed, then presses Ctrl-C; returns the exit code."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "trn_dist.cli", "top", str(pid), "--period-s", "0.3"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as top:
        os.close(end)
        seen = b""
        deadline = time.monotonic() + DEADLINE_S
        while seen.count(b"core util") < 2:
            assert time.monotonic() < deadline, seen
            seen += os.read(terminal, 1 << 16)
        top.send_signal(signal.SIGINT)
        while True:  # it may have more to say than the terminal holds
            try:
                if not os.read(terminal, 1 << 16):
                    break
            except OSError:  # its end is closed
                break
        os.close(terminal)
        return top.wait(DEADLINE_S)


def start(folder: Path, ranks: int) -> Run:
    write(folder / "busy.py", BUSY)
    run = Run("run", "-n", ranks, "busy.py", cwd=folder, environment={"NEURON_PROCESS_TAG": "a job"})
    for rank in range(ranks):
        run.wait_for(folder / f"up{rank}")
    return run


def test_a_running_job(tmp_path: Path) -> None:
    run = start(tmp_path, 2)
    pid = run.process.pid
    try:
        shown = call("top", pid, "--json", "--period-s", 1)
        assert shown.returncode == 0 and shown.stderr == ""
        seen = json.loads(shown.stdout)
        assert (seen["launcher"], seen["command"], seen["world_size"]) == (pid, "busy.py", 2)
        assert [row["rank"] for row in seen["ranks"]] == [0, 1]
        assert [row["cores"] for row in seen["ranks"]] == [[0], [1]]
        for row in seen["ranks"]:
            assert row["pid"] == run.pid_of(f"trn:rank{row['rank']}")
            assert 0 < row["neuroncore_utilization"] < 100 and row["virtual_s"] > 0 and row["flops"] > 0
            assert sum(row["parts"].values()) == pytest.approx(100)
            assert row["operators"] > row["collectives"] > 0
            memory = row["hbm_bytes"]
            assert memory["total"] == 24 << 30
            assert memory["parameters"] == memory["gradients"] == PARAMETER_BYTES
            assert memory["optimizer_state"] >= 2 * PARAMETER_BYTES
            kinds = ("parameters", "gradients", "optimizer_state", "other")
            assert sum(memory[kind] for kind in kinds) == memory["tensors"] <= memory["reserved"]
            assert row["irreproducible"] is None and row["problem"] is None

        table = call("top", pid, "--once", "--period-s", 0.2, COLUMNS="120").stdout
        assert "2 ranks on trn2.48xlarge, LNC=2" in table and "core util" in table and "\x1b" not in table
        narrow = call("top", pid, "--period-s", 0.1, COLUMNS="40")
        assert narrow.returncode == 0 and max(map(len, narrow.stdout.splitlines())) <= 40

        assert watched_on_a_terminal(pid) == 0

        lines = call("monitor", pid, "--count", 2, "--period-s", 0.3).stdout.splitlines()
        assert len(lines) == 2
        report = json.loads(lines[1])
        assert report["neuron_hardware_info"]["neuron_device_count"] == 16
        assert report["instance_info"]["instance_type"] == "trn2.48xlarge"
        assert report["system_data"]["memory_info"]["memory_total_bytes"] > 0
        assert [entry["neuron_runtime_tag"] for entry in report["neuron_runtime_data"]] == ["a job", "a job"]
        of_rank1 = report["neuron_runtime_data"][1]["report"]
        assert of_rank1["neuroncore_counters"]["neuroncores_in_use"]["1"]["neuroncore_utilization"] > 0
        usage = of_rank1["memory_used"]["neuron_runtime_used_bytes"]
        assert usage["usage_breakdown"]["neuroncore_memory_usage"]["1"]["tensors"] >= 4 * PARAMETER_BYTES

        os.kill(run.pid_of("trn:rank1"), signal.SIGSTOP)
        stopped = json.loads(call("top", pid, "--json", "--period-s", 0.1).stdout)
        assert stopped["ranks"][0]["problem"] is None, "a rank that waits for another one answers"
        assert stopped["ranks"][1]["problem"] == "no answer within 2 s; T (stopped)"
        assert call("top", pid, "--ranks", "7").returncode == 2
    finally:
        for rank in range(2):
            os.kill(run.pid_of(f"trn:rank{rank}"), signal.SIGCONT)
        (tmp_path / "stop").touch()
    assert run.result().code == 0
    gone = call("top", pid)
    assert gone.returncode == 2 and f"{pid} is no process of" in gone.stderr and "Traceback" not in gone.stderr


@contextlib.contextmanager
def running(folder: Path, *command: str) -> Iterator[int]:
    """Pid of a program whose two ranks are up; they are told to stop at the end, and must end well."""
    with subprocess.Popen([sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL) as launcher:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not all((folder / f"up{rank}").exists() for rank in range(2)):
                assert launcher.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield launcher.pid
        finally:
            (folder / "stop").touch()
        assert launcher.wait(DEADLINE_S) == 0


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    write(tmp_path / "busy.py", BUSY)
    with running(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "busy.py") as launcher:
        seen = json.loads(call("top", launcher, "--json", "--period-s", 0.5).stdout)
        assert [row["hbm_bytes"]["parameters"] for row in seen["ranks"]] == [PARAMETER_BYTES] * 2


def test_ranks_of_a_program_that_spawns_them(tmp_path: Path) -> None:
    program = """
    import os, pathlib, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, size, address):
        dist.init_process_group("neuron", init_method=address, rank=rank, world_size=size)
        torch.accelerator.set_device_index(rank)
        weight = torch.ones(1024, device="neuron", requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        while not os.path.exists("stop"):
            torch.mm(weight.view(32, 32), weight.view(32, 32)).sum().backward()
            pathlib.Path(f"up{rank}").touch()
            time.sleep(0.01)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(train, args=(2, f"file://{os.getcwd()}/meeting"), nprocs=2)
    """
    write(tmp_path / "spawns.py", program)
    with running(tmp_path, "spawns.py") as launcher:
        seen = json.loads(call("top", launcher, "--json", "--period-s", 0.5).stdout)
        assert seen["command"].endswith("spawns.py") and seen["world_size"] == 2
        shown = [(row["rank"], row["cores"], row["problem"]) for row in seen["ranks"]]
        assert shown == [(0, [0], None), (1, [1], None)]
        assert [row["hbm_bytes"]["parameters"] for row in seen["ranks"]] == [4096] * 2


def test_strangers_are_not_believed() -> None:
    # A process that listens at the name of another one, which is gone.
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(telemetry.socket_name(ended.pid, 0))
            listener.listen()
            answer = telemetry.ask({ended.pid: 0}, timeout_s=5)[ended.pid]
    assert isinstance(answer, telemetry.NoFigures)


def test_a_recorded_run(tmp_path: Path) -> None:
    done = trn(
        "train", "llama3_debug", "--training.steps", 2, "--timing-only", "--json", "--run-dir", "run", cwd=tmp_path
    )
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["exit_code"] == 0 and result["last_step"]["step"] == 2 and result["last_step"]["loss"] is None
    assert result["run_folder"] == str(tmp_path / "run") and "step 2/2" in done.stderr
    lines = CliRunner().invoke(command_line, ["monitor", str(tmp_path / "run")]).stdout.splitlines()
    assert len(lines) == 2
    report = json.loads(lines[1])
    assert [entry["virtual_time"]["rank"] for entry in report["neuron_runtime_data"]] == [0]
    counters = report["neuron_runtime_data"][0]["report"]["neuroncore_counters"]
    core = counters["neuroncores_in_use"]["0"]
    assert 0 < core["neuroncore_utilization"] < 100 and core["flops"] > 0
    assert counters["period"] == pytest.approx(result["last_step"]["predicted"]["step_time_s"], rel=0.5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["top", "1"], 2, "1 is no process of `trn run`"),
        (["top", "--period-s", "0"], 2, "0 is not in the range"),
        (["top", "--ranks", "3-1"], 2, "'3-1' is not a list of ranks such as 0-3,8"),
        (["monitor", "1"], 2, "1 is no process of `trn run`"),
        (["monitor", "no_such_folder"], 2, "'no_such_folder' is neither a process nor a folder"),
        (["monitor", "/"], 1, "holds no figures of a step"),
    ],
)
def test_mistakes(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(command_line, arguments)
    assert result.exit_code == code and words in result.stderr and result.stdout == ""
