"""Failed runs leave flight records, which PyTorch's reader and ``trn flight`` both read."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import click.testing
import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace

from tests.c10d import ranks
from trn_dist.cli import trn
from trn_dist.neuron.flight_record import flight_record


def tensor_on(rank: int, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=f"neuron:{rank}")


def one_is_behind(rank: int, size: int, prefix: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    dist.all_reduce(tensor_on(rank, 3))
    dist.broadcast(tensor_on(rank, 2, 5), 1)
    if rank == 2:
        if os.fork() == 0:  # stays behind for a while
            os._exit(0)
        time.sleep(3)
        return
    dist.all_gather_single(tensor_on(rank, 12), tensor_on(rank, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "run"
    for rank, outcome in enumerate(ranks.outcomes(3, one_is_behind, str(path / "rank"), timeout_s=1)):
        assert rank == 2 or outcome.error_type == "DistBackendError", outcome
    return path


def test_every_rank_has_a_record_in_the_form_of_pytorch(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["rank0", "rank1", "rank2"]
    record = pickle.loads((folder / "rank0").read_bytes())
    assert record["pg_config"]["0"] == {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}
    first, second, third = record["entries"]
    assert first["profiling_name"] == "nccl:all_reduce" and first["state"] == "completed"
    assert second["profiling_name"] == "nccl:broadcast" and second["input_sizes"] == [[2, 5]]
    assert third["profiling_name"] == "nccl:_all_gather_base" and third["state"] == "scheduled"
    assert third["input_sizes"] == [[4]] and third["output_sizes"] == [[12]] and third["input_dtypes"] == ["Float"]
    assert third["collective_seq_id"] == 2 and third["timeout_ms"] == 1000 and third["retired"]
    assert third["frames"][0]["filename"] == __file__ and third["frames"][0]["name"] == "one_is_behind"
    assert first["time_created_ns"] <= first["time_discovered_completed_ns"] <= time.time_ns()
    assert record["pg_status"]["0"] == {
        "last_enqueued_collective": 2,
        "last_started_collective": 1,
        "last_completed_collective": 1,
    }
    # Rank 2 was not in a call: another rank has written what it had called.
    behind = pickle.loads((folder / "rank2").read_bytes())
    assert [entry["profiling_name"] for entry in behind["entries"]] == ["nccl:all_reduce", "nccl:broadcast"]


def test_pytorch_reads_it(folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fr_trace.main([str(folder), "-p", "rank", "-o", str(tmp_path / "database")])
    assert (tmp_path / "database").exists()
    assert "missing ranks: {2}" in caplog.text


def test_the_command_says_who_is_behind_and_where(folder: Path) -> None:
    result = click.testing.CliRunner().invoke(trn, ["flight", str(folder)])
    assert result.exit_code == 1, result.output
    assert "group 0, ranks 0, 1, 2" in result.output
    assert "rank 2 is behind: its last call is #1, broadcast of Float [2, 5] at " in result.output
    assert "ranks 0, 1: #2, _all_gather_base of Float [4] at " in result.output
    report = json.loads(click.testing.CliRunner().invoke(trn, ["flight", str(folder), "--json"]).output)
    assert list(report[0]["behind"]) == ["2"] and report[0]["waiting"]["0"]["sequence"] == 2
    assert report[0]["fine"] is False


def test_a_record_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple:
            return os.system, ("true",)

    (tmp_path / "rank0").write_bytes(pickle.dumps({"entries": [Harmful()]}))
    result = click.testing.CliRunner().invoke(trn, ["flight", str(tmp_path)])
    assert result.exit_code == 2 and "a flight record holds plain data only" in result.output
    (tmp_path / "other1").write_text("{}")
    result = click.testing.CliRunner().invoke(trn, ["flight", str(tmp_path)])
    assert result.exit_code == 2 and "choose one by --prefix" in result.output


def dies(rank: int, size: int, prefix: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor_on(rank, 3), group=group)
    work = dist.isend(tensor_on(rank, 7), 1) if rank == 0 else None
    if rank == 1:
        ranks.die()
    dist.recv(tensor_on(rank, 9), 1)
    assert work is not None


def test_the_record_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    ranks.outcomes(2, dies, str(tmp_path / "rank"), timeout_s=300)
    of_the_dead = pickle.loads((tmp_path / "rank1").read_bytes())["entries"]
    assert [entry["profiling_name"] for entry in of_the_dead] == ["nccl:all_reduce"]
    names = [entry["profiling_name"] for entry in pickle.loads((tmp_path / "rank0").read_bytes())["entries"]]
    assert names == ["nccl:all_reduce", "nccl:send 0->1", "nccl:recv 0<-1"]
    result = click.testing.CliRunner().invoke(trn, ["flight", str(tmp_path)])
    assert result.exit_code == 1 and "rank 0 has not completed #2, recv 0<-1 of Float [9] at " in result.output


def wraps_around(rank: int, size: int) -> tuple[list[int], list[str]]:
    for _ in range(12):
        dist.all_reduce(tensor_on(rank, 3))
    dist.barrier()
    entries = flight_record()["entries"]
    assert len(flight_record(1 - rank)["entries"]) >= len(entries) - 1
    return [entry["record_id"] for entry in entries], [entry["state"] for entry in entries]


def with_buffer(rank: int, size: int, port: int, capacity: str) -> tuple[list[int], list[str]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = capacity
    store = dist.PrefixStore("small", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size)
    return wraps_around(rank, size)


def test_the_buffer_keeps_the_last_calls() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for numbers, states in ranks.run(2, with_buffer, server.port, "5", backend=""):
        assert numbers == [9, 10, 11, 12, 13] and states == ["completed"] * 5
