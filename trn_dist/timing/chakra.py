"""A recorded program as Chakra execution traces, one a rank, for simulators such as ASTRA-sim.

The format is MLCommons Chakra's ``et_def.proto``: a ``GlobalMetadata`` message, then a ``Node`` message for each
operator, collective and message, each with its length before it. Dependencies are those of the record: the order of a
stream, what a stream was made to wait for, and, as control dependencies, what the host waited for. Durations are those
of the given cluster's chip, in whole microseconds, as the format has them; the simulator times the communication.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from trn_dist.hardware import Cluster
from trn_dist.timing.chip_rates import PS_PER_US, chip_rates
from trn_dist.timing.program import ACTION, Action, Origin, ProgramError, RankProgram, Role

# Of et_def.proto.
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
_BOOL, _INT32, _INT64, _UINT64, _STRING = 27, 7, 9, 13, 29  # fields of AttributeProto

Stream = tuple[int, int]
"""Device and stream."""


def write_chakra(programs: Iterable[RankProgram], cluster: Cluster, folder: str | Path) -> list[Path]:
    """Writes ``FOLDER/rank.N.et`` for every rank that was recorded; returns these files.

    ``FOLDER/comm_groups.json`` says which ranks are in the groups that ``pg_name`` has numbers for.

    Raises:
        ProgramError: a record holds a call that ended without a result.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    programs = list(programs)
    collectives = (row for program in programs for row in program.transfers if row[0] == Role.COLLECTIVE)
    groups = sorted({(row[3], tuple(row[5])) for row in collectives})
    numbers = {group: number for number, group in enumerate(groups)}
    members = {str(number): ranks for number, (_, ranks) in enumerate(groups)}
    (folder / "comm_groups.json").write_text(json.dumps(members) + "\n", encoding="utf-8")
    files = []
    for program in programs:
        file = folder / f"rank.{program.rank}.et"
        with file.open("wb") as out:
            out.write(_delimited(_text(1, "0.0.4")))  # of the schema
            for node in _Nodes(program, cluster, numbers).encoded():
                out.write(_delimited(node))
        files.append(file)
    return files


class _Nodes:
    """Goes through a program, keeping what each stream's next node depends on."""

    def __init__(self, program: RankProgram, cluster: Cluster, groups: dict[tuple[str, tuple[int, ...]], int]) -> None:
        from trn_dist import _C

        self.program = program
        self.groups = groups
        self.costs = _C._price_works(chip_rates(cluster.chip), program.works)
        self.tails: dict[Stream, set[int]] = {}  # nodes that whatever comes next on a stream follows
        self.host: set[int] = set()  # nodes that whatever is launched next follows
        self.transfers: list[int] = []  # their nodes
        self.launches: list[int] = []
        self.moments: list[set[int]] = []
        self.count = 0

    def encoded(self) -> Iterator[bytes]:
        for kind, flag, device, number, value in ACTION.iter_unpack(self.program.actions):
            stream = (device, number)
            if kind == Action.LAUNCH:
                self.launches.append(self.count)
                yield self._operator(value, self.tails.get(stream, set()))
                self.tails[stream] = {self.count}
                self.count += 1
            elif kind == Action.ENQUEUE:
                yield self._transfer(len(self.transfers), self.tails.get(stream, set()))
                self.transfers.append(self.count)
                self.count += 1
            elif kind == Action.STREAM_WAIT:
                self.tails[stream] = self.tails.get(stream, set()) | self._origin(flag, value)
            elif kind == Action.HOST_WAIT:
                self.host = self.host | self._origin(flag, value)
            elif kind == Action.HOST_WAIT_STREAM:
                self.host = self.host | self.tails.get(stream, set())
            elif kind == Action.HOST_WAIT_DEVICE:
                self.host = set().union(self.host, *(tail for (on, _), tail in self.tails.items() if on == device))
            elif kind == Action.STREAM_WAIT_STREAM:
                other = self.tails.get((value >> 32, value & 0xFFFFFFFF), set())
                self.tails[stream] = self.tails.get(stream, set()) | other
            elif kind == Action.RECORD:
                self.moments.append(set(self.tails.get(stream, set())))
            elif kind == Action.RECORD_AFTER:
                self.moments[number].add(self.transfers[value])

    def _origin(self, kind: int, index: int) -> set[int]:
        if kind == Origin.TRANSFER:
            return {self.transfers[index]}
        if kind == Origin.MOMENT:
            return self.moments[index]
        assert kind == Origin.LAUNCH
        return {self.launches[index]}

    def _node(self, name: str, kind: int, after: set[int], attributes: list[bytes], duration_us: int = 0) -> bytes:
        # The host's waits hold for all that follows: only the newest of them is needed, they were in order.
        if self.host:
            self.host = {max(self.host)}
        return b"".join(
            [
                _number(1, self.count),
                _text(2, name),
                _number(3, kind),
                *(_number(4, node) for node in sorted(self.host - after)),
                *(_number(5, node) for node in sorted(after)),
                _number(7, duration_us),
                *(_message(10, attribute) for attribute in attributes),
            ]
        )

    def _operator(self, work: int, after: set[int]) -> bytes:
        time_ps, flops, nbytes = self.costs[work]
        attributes = [
            _attribute("is_cpu_op", _BOOL, False),
            _attribute("num_ops", _INT64, int(flops)),
            _attribute("tensor_size", _UINT64, nbytes),
        ]
        duration_us = max(1, round(time_ps / PS_PER_US))
        return self._node(self.program.works[work][0], _COMPUTE, after, attributes, duration_us)

    def _transfer(self, index: int, after: set[int]) -> bytes:
        role, _, operation, group, _, ranks, sequence, nbytes, _, _ = self.program.transfers[index]
        if role == Role.UNDESCRIBED:
            raise ProgramError(f"rank {self.program.rank}: its call {index} of a collective ended without a result")
        attributes = [_attribute("is_cpu_op", _BOOL, False), _attribute("comm_size", _INT64, nbytes)]
        if role in (Role.SEND, Role.RECEIVE):
            source, target = divmod(sequence >> 32, len(ranks))
            attributes += [
                _attribute("comm_src", _INT32, ranks[source]),
                _attribute("comm_dst", _INT32, ranks[target]),
                _attribute("comm_tag", _INT32, sequence & 0x7FFFFFFF),
            ]
            return self._node(operation, _SEND if role == Role.SEND else _RECEIVE, after, attributes)
        attributes += [
            _attribute("comm_type", _INT64, _COLLECTIVES[operation]),
            _attribute("pg_name", _STRING, str(self.groups[group, tuple(ranks)])),
        ]
        return self._node(operation, _COLLECTIVE, after, attributes)


# Protocol buffers' wire format, as much of it as is needed.


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, message: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(message)


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _attribute(name: str, field: int, value: int | str) -> bytes:
    return _text(1, name) + (_text(field, value) if isinstance(value, str) else _number(field, int(value)))
