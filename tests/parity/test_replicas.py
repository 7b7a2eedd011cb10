"""Replicas that drift apart are found from the hashes that each rank wrote."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trn_dist.parity.replicas import ReplicaWriter, find_disagreement


def write(folder: Path, *ranks: list[dict[str, int]]) -> None:
    for rank, steps in enumerate(ranks):
        text = "".join(json.dumps(step) + "\n" for step in steps)
        (folder / f"replicas-{rank:05d}.jsonl").write_text(text)


def test_the_first_parameter_and_the_odd_rank_are_named(tmp_path: Path):
    good, bad = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 7, "c": 8}
    write(tmp_path, [good, good], [good, bad], [good, good])
    assert find_disagreement(tmp_path) == (
        2,
        "replicas differ: b (and 1 other parameters), as step 2 computed with it: rank 1 has other bits than rank 0",
    )
    found = find_disagreement(tmp_path, first_step=5)
    assert found is not None and found[0] == 6


def test_what_only_some_ranks_hold_is_compared_among_them(tmp_path: Path):
    first, second = {"stage 0": 1}, {"stage 1": 2}
    write(tmp_path, [first], [second], [first], [second])
    assert find_disagreement(tmp_path) is None
    write(tmp_path, [first], [second], [first], [{"stage 1": 3}])
    assert find_disagreement(tmp_path) is not None


def test_a_step_that_not_every_rank_wrote_is_left_out(tmp_path: Path):
    write(tmp_path, [{"a": 1}, {"a": 1}], [{"a": 1}])
    assert find_disagreement(tmp_path) is None
    assert find_disagreement(tmp_path / "nothing") is None


def test_every_bit_of_a_parameter_counts(tmp_path: Path):
    model = torch.nn.Linear(3, 3)
    writer = ReplicaWriter([model], tmp_path / "replicas-00000.jsonl")
    writer.before_clipping([])
    with torch.no_grad():
        model.bias[2] = torch.nextafter(model.bias[2], torch.tensor(9.0))
    writer.before_clipping([])
    before, after = map(json.loads, (tmp_path / "replicas-00000.jsonl").read_text().splitlines())
    assert before["weight"] == after["weight"]
    assert before["bias"] != after["bias"]


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_parts_of_sharded_parameters_are_told_apart(tmp_path: Path, rank_1_of_4: None):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Module()
    for name, placements in {
        "replicated": (Replicate(), Replicate()),
        "on_tp": (Replicate(), Shard(0)),
        "on_both": (Shard(0), Shard(0)),
    }.items():
        tensor = DTensor.from_local(torch.ones(4), mesh, placements, run_check=False)
        module.register_parameter(name, torch.nn.Parameter(tensor))
    writer = ReplicaWriter([module], tmp_path / "replicas-00001.jsonl")
    writer.before_clipping([])
    # What lies on one rank alone has no replica.
    assert list(json.loads(writer.file.read_text())) == ["replicated", "on_tp (part 1 of 2)"]
