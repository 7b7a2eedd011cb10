"""Record and replay: a recorded program has the run's own times on its cluster, and another run's times on another."""

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.c10d import ranks
from trn_dist import timing
from trn_dist.cli.replay import replay as replay_command
from trn_dist.timing.fair_share import LinkUse, SharedPhase, shared_ends
from trn_dist.timing.program import ProgramError, RankProgram, read_programs, write_program
from trn_dist.timing.replay import Replay, compare

RANKS = 4


def program(rank, size, folder, cluster):
    """FSDP2 and tensor parallelism over 2 x 2 ranks, messages, events, a late rank, three steps."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    os.environ |= {"TRN_RECORD": str(folder), "TRN_CLUSTER": cluster}
    torch.neuron.set_device(rank)
    mesh = dist.device_mesh.init_device_mesh("neuron", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = [
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).to("neuron")
        for _ in range(2)
    ]
    for layer in layers:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=1e-3, fused=True)
    side = torch.neuron.Stream()
    steps = [timing.mark_step()]
    for number in range(3):
        x = torch.randn(64, 256, device="neuron")
        loss = layers[1](layers[0](x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.neuron.stream(side):
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            event = side.record_event()
        if rank == 1 and number == 1:
            for _ in range(50):
                x.add_(1)
        torch.neuron.current_stream().wait_event(event)
        loss.item()
        if rank % 2 == 0:
            dist.send(x, rank + 1)
        else:
            dist.recv(x, rank - 1)
        torch.neuron.synchronize()
        dist.barrier()
        steps.append(timing.mark_step())
    write_program(folder)
    return steps, timing.irreproducible_reason()


def record(folder, cluster):
    results = ranks.run(RANKS, program, folder, cluster)
    assert all(reason == "" for _, reason in results)
    return [steps for steps, _ in results]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run on trn2.48xlarge: its folder and its live steps."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder, record(folder, "trn2.48xlarge")


def test_on_its_own_cluster_a_run_has_its_own_times(recorded):
    folder, live = recorded
    run = Replay.of(folder)
    assert [list(steps) for steps in run.on(run.own_cluster(), "static").steps] == live


def test_on_another_cluster_it_has_the_times_of_a_run_there(recorded, tmp_path):
    folder, live = recorded
    there = record(tmp_path, "trn1.32xlarge")
    assert there != live
    run = Replay.of(folder)
    assert [list(steps) for steps in run.on(run.cluster("trn1.32xlarge"), "static").steps] == there


def test_sharing_links_settles_and_steps_add_up(recorded):
    run = Replay.of(recorded[0])
    shared = run.on(run.own_cluster(), "shared")
    assert shared.unsettled_ps == 0
    for steps in shared.steps:
        for step in steps:
            assert sum(step.parts().values()) == step.time_ps


def test_a_slower_link_makes_no_step_faster(recorded, tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text('extends = "trn1.32xlarge"\n[levels.node]\nbandwidth_gbps = 4.0\n', encoding="utf-8")
    run = Replay.of(recorded[0])
    for sharing in ("static", "shared"):
        fast = run.on(run.cluster("trn1.32xlarge"), sharing)  # two cores a chip: groups span chips
        slower = run.on(run.cluster(slow), sharing)
        difference = compare(fast, slower)
        assert difference.second_ps > difference.first_ps
        assert sum(part.change_ps for part in difference.parts) == difference.second_ps - difference.first_ps
        assert all(line.change_ps == 0 for line in difference.operators)
        assert any(line.change_ps > 0 for line in difference.collectives)


def test_the_command_prints_a_table_and_plain_data(recorded):
    shown = CliRunner().invoke(replay_command, [str(recorded[0]), "--cluster", "trn1.32xlarge"])
    assert shown.exit_code == 0, shown.output
    assert "aten::mm" in shown.output and "all_gather mesh_dp" in shown.output
    plain = CliRunner().invoke(replay_command, [str(recorded[0]), "--cluster", "trn1.32xlarge", "--json"])
    data = json.loads(plain.output)
    assert data["second"]["cluster"] == "trn1.32xlarge"
    assert sum(part["second_ps"] for part in data["parts"]) == data["second"]["step_ps"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "trn9"], "trn9"),
        (["--step", "9"], "step 9: the run has steps 1 to 4"),
        (["--cluster", "trn2.3xlarge", "--against", "none.toml"], "none.toml"),
    ],
)
def test_wrong_arguments_are_named(recorded, arguments, words):
    shown = CliRunner().invoke(replay_command, [str(recorded[0]), *arguments])
    assert shown.exit_code == 1
    assert words in shown.output


def copy_of(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_incomplete_and_damaged_records_are_refused(recorded, tmp_path):
    with pytest.raises(ProgramError, match="no recorded program"):
        read_programs(tmp_path)
    folder = copy_of(recorded[0], tmp_path)
    (folder / "rank-00002.json").rename(folder / "elsewhere")
    with pytest.raises(ProgramError, match="of 4 ranks these left no record: 2"):
        read_programs(folder)
    (folder / "elsewhere").rename(folder / "rank-00002.json")
    actions = folder / "rank-00001.actions"
    whole = actions.read_bytes()
    actions.write_bytes(whole[:-5])
    with pytest.raises(ProgramError, match="rank 1 end in the middle"):
        Replay.of(folder)
    actions.write_bytes(whole[: 16 * 300])
    run = Replay.of(folder)
    with pytest.raises(ProgramError, match="did not record"):
        run.on(run.own_cluster())
    about = folder / "rank-00003.json"
    about.write_text('{"format": "of tomorrow"}', encoding="utf-8")
    with pytest.raises(ProgramError, match="of tomorrow"):
        read_programs(folder)


def begun_by_another_thread(rank, size, folder):
    os.environ["TRN_RECORD"] = str(folder)
    torch.neuron.set_device(rank)
    x = torch.ones(8, device="neuron")
    works = []
    thread = threading.Thread(target=lambda: works.append(dist.all_reduce(x, async_op=True)))
    thread.start()
    thread.join()
    works[0].wait()
    write_program(folder)


def test_a_wait_for_what_is_not_recorded_cannot_be_replayed(tmp_path):
    ranks.run(2, begun_by_another_thread, tmp_path)
    with pytest.raises(ProgramError, match=r"rank-00000\.json: this program cannot be replayed: .* another thread"):
        read_programs(tmp_path)


# Chakra


def chakra_messages():
    """The messages of MLCommons' et_def.proto that are written, as protobuf's own library reads them."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    number = {"string": 9, "uint64": 4, "int64": 3, "int32": 5, "bool": 8}
    schema = {
        "GlobalMetadata": [("version", 1, "string", False)],
        "AttributeProto": [
            ("name", 1, "string", False),
            ("int32_val", 7, "int32", False),
            ("int64_val", 9, "int64", False),
            ("uint64_val", 13, "uint64", False),
            ("bool_val", 27, "bool", False),
            ("string_val", 29, "string", False),
        ],
        "Node": [
            ("id", 1, "uint64", False),
            ("name", 2, "string", False),
            ("type", 3, "uint64", False),
            ("ctrl_deps", 4, "uint64", True),
            ("data_deps", 5, "uint64", True),
            ("duration_micros", 7, "uint64", False),
            ("attr", 10, ".AttributeProto", True),
        ],
    }
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, place, kind, repeated in fields:
            given = {"type": 11, "type_name": kind} if kind.startswith(".") else {"type": number[kind]}
            message.field.add(name=field, number=place, label=3 if repeated else 1, **given)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in schema}


def read_chakra(file):
    classes = chakra_messages()
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        length = shift = 0
        more = True
        while more:
            length |= (data[at] & 0x7F) << shift
            more = data[at] > 0x7F
            shift += 7
            at += 1
        found.append(classes["Node" if found else "GlobalMetadata"].FromString(data[at : at + length]))
        at += length
    return found[0], found[1:]


def test_chakra_traces_hold_all_that_the_ranks_launched(recorded, tmp_path):
    shown = CliRunner().invoke(replay_command, [str(recorded[0]), "--chakra", str(tmp_path / "et")])
    assert shown.exit_code == 0, shown.output
    messages = {5: set(), 6: set()}
    groups = json.loads((tmp_path / "et" / "comm_groups.json").read_text(encoding="utf-8"))
    assert sorted(map(tuple, groups.values())) == [(0, 1), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3)]
    for rank, program in enumerate(read_programs(recorded[0])):
        metadata, nodes = read_chakra(tmp_path / "et" / f"rank.{rank}.et")
        assert metadata.version
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert all(before < node.id for node in nodes for before in (*node.ctrl_deps, *node.data_deps))
        operators = [node for node in nodes if node.type == 4]
        assert len(operators) == program.actions[::16].count(LAUNCH)
        assert any(node.name == "aten::mm" for node in operators)
        products = {node.name for node in operators for a in node.attr if a.name == "num_ops" and a.int64_val}
        assert "aten::mm" in products and "aten::mul" not in products
        others = [node for node in nodes if node.type != 4]
        assert len(others) == len(program.transfers)
        for node in others:
            attributes = {attribute.name: attribute for attribute in node.attr}
            if node.type == 7:
                assert rank in groups[attributes["pg_name"].string_val] and attributes["comm_size"].int64_val >= 0
            else:
                pair = tuple(attributes[f"comm_{end}"].int32_val for end in ("src", "dst", "tag"))
                messages[node.type].add(pair)
                assert rank == pair[0 if node.type == 5 else 1]
        # A rank's last barrier comes after all that its stream holds.
        assert others[-1].name == "barrier" and others[-1].data_deps
    assert messages[5] == messages[6] and len(messages[5]) == 6


# A late rank


LAUNCH, ENQUEUE, STREAM_WAIT, ENTER, MARK_STEP = 0, 1, 2, 10, 11  # Action::Kind
TRANSFER = 1  # Origin::Kind


def synthetic(rank, operators):
    """A rank's program: operators on one stream, with a collective of both ranks after each stretch of them."""
    work = ["aten::add", 0, False, 6, 6, 1.0, 0.0, 0.0, 1.0, [0, 0, 0, 0, 0], 4096, 49152, 0]
    actions, transfers = [], []
    for sequence, count in enumerate(operators):
        actions += [(LAUNCH, 0, 0, 0, 0)] * count
        actions += [(ENQUEUE, 0, 0, 0, 0), (STREAM_WAIT, TRANSFER, 0, 0, sequence), (ENTER, 0, 0, 0, sequence)]
        transfers.append([1, False, "all_reduce", "0", "both", [0, 1], sequence, 1 << 20, 1, 0])
    actions.append((MARK_STEP, 0, 0, 0, 0))
    packed = b"".join(struct.pack("<BBhiq", *action) for action in actions)
    return RankProgram(rank, 2, 2, "trn2.48xlarge", 2, False, packed, [work], transfers)


counts = st.lists(st.integers(0, 30), min_size=4, max_size=4)


@given(counts, counts, st.integers(0, 3), st.integers(1, 60))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_later_rank_makes_nobody_earlier(first, second, where, more):
    later = [*second[:where], second[where] + more, *second[where + 1 :]]
    ends = []
    for of_second in (second, later):
        run = Replay([synthetic(0, first), synthetic(1, of_second)])
        ends.append([steps[0].end_ps for steps in run.on(run.own_cluster(), "shared").steps])
    assert all(after >= before for before, after in zip(*ends, strict=True))


# Sharing links


def use(latency_ps, *phases):
    return LinkUse(latency_ps, tuple(SharedPhase(time, loads) for time, loads in phases))


def test_two_on_one_link_take_twice_as_long_and_others_their_time():
    uses = [use(5, (100, {"a": 1.0})), use(5, (100, {"a": 1.0})), use(0, (70, {"b": 1.0})), use(9)]
    assert shared_ends([0, 0, 0, 3], uses) == [205, 205, 70, 12]


def test_a_late_one_halves_the_speed_from_then_on():
    uses = [use(0, (100, {"a": 1.0})), use(0, (100, {"a": 1.0}))]
    assert shared_ends([0, 60], uses) == [140, 200]


def test_speeds_are_max_min_fair():
    # The first link is full with the first two, which leaves the third two thirds of the second.
    uses = [use(0, (30, {"a": 1.0, "b": 0.5})), use(0, (30, {"a": 2 / 3})), use(0, (30, {"b": 1.0}))]
    ends = shared_ends([0, 0, 0], uses)
    assert ends[0] == ends[1] == 50  # 0.6 of full speed
    assert ends[2] == 43  # 1 - 0.6 * 0.5 = 0.7


transfers = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.integers(0, 50),
        st.lists(
            st.tuples(st.integers(1, 500), st.dictionaries(st.sampled_from("abc"), st.floats(0.05, 1.0), min_size=1)),
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=6,
)


@given(transfers)
@settings(max_examples=60, deadline=None)
def test_nobody_is_faster_than_alone_nor_than_a_link_allows(drawn):
    starts = [start for start, _, _ in drawn]
    uses = [use(latency, *phases) for _, latency, phases in drawn]
    ends = shared_ends(starts, uses)
    for start, need, end in zip(starts, uses, ends, strict=True):
        assert end >= start + need.time_ps
        assert shared_ends([start], [need]) == [start + need.time_ps]
    for link in "abc":
        work = sum(phase.time_ps * phase.loads.get(link, 0.0) for need in uses for phase in need.phases)
        assert max(ends) - min(starts) >= int(work)
