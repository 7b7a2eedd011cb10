"""What a rank of ``trn bench`` does: times collectives on the host's clock and on the virtual one, and checks results.

Started by ``trn_dist.cli.bench`` as a module with its settings as JSON. Rank 0 prints a row for each size as soon as it
is there; nothing else is printed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from trn_dist import neuron
from trn_dist.cli.bench import COST_OPERATIONS, DTYPES, Row, Settings, bus_factor, header, show, summary
from trn_dist.timing.collective_costs import communicator

_FAR = 256
"""Values of a check lie below this divided by the ranks: their sum is exact in bfloat16, the coarsest type."""
_WINDOW = 1 << 18
"""Elements that are compared at once: the ranks share the host's memory."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a part of the result, from ``at`` on, must be: ``numel`` elements from ``start`` of what ``source`` gives,
    or, with None, of the sum over all ranks of the group."""

    at: int
    source: int | None
    start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective of one rank.

    Attributes:
        own: what this rank gives, filled before each check.
        call: the collective.
        result: what this rank gets.
        expected: the whole of it, in pieces.
    """

    own: torch.Tensor
    call: Callable[[], object]
    result: torch.Tensor
    expected: list[Piece]


class Bench:
    """The collectives of one group at any size."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dtype: torch.dtype = getattr(torch, DTYPES[settings.dtype][0])
        self.world = list(range(dist.get_world_size()))
        self.rank = dist.get_rank()
        self.ranks, self.group = self.world, dist.group.WORLD
        for ranks in settings.replica_groups or ():
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self.ranks, self.group = ranks, group
        self.n = len(self.ranks)
        self.own = self.ranks.index(self.rank)
        ring = [(i, (i + 1) % self.n) for i in range(self.n)]
        swap = [(i, i ^ 1) for i in range(self.n)]
        default = swap if settings.operation == "sendrecv" else ring
        self.pairs = [tuple(pair) for pair in settings.pairs] if settings.pairs else default

    def count(self, nbytes: int) -> int:
        """Elements of the larger of input and output."""
        count = max(1, nbytes // self.dtype.itemsize)
        whole = self.n * (self.n + 1) if self.settings.operation.endswith("v") else self.n
        return (
            count if self.settings.operation in ("allr", "sendrecv", "permute") else max(whole, count // whole * whole)
        )

    def _parts(self, count: int) -> list[int]:
        """Uneven parts of an all-gather-v or all-to-all-v: 1, 2, ... units, in sum ``count``."""
        unit = count // (self.n * (self.n + 1) // 2)
        return [unit * (i + 1) for i in range(self.n)]

    def case(self, count: int) -> Case:
        """The collective on ``count`` elements."""
        n, own, group = self.n, self.own, self.group

        def zeros(numel: int) -> torch.Tensor:
            return torch.zeros(numel, dtype=self.dtype, device="neuron")

        operation, part = self.settings.operation, count // n
        if operation == "allr":
            x = zeros(count)
            return Case(x, lambda: dist.all_reduce(x, group=group), x, [Piece(0, None, 0, count)])
        if operation == "allg":
            x, out = zeros(part), zeros(count)
            pieces = [Piece(rank * part, rank, 0, part) for rank in range(n)]
            return Case(x, lambda: dist.all_gather_single(out, x, group=group), out, pieces)
        if operation == "redsct":
            x, out = zeros(count), zeros(part)
            call = lambda: dist.reduce_scatter_single(out, x, ReduceOp.SUM, group=group)  # noqa: E731
            return Case(x, call, out, [Piece(0, None, own * part, part)])
        if operation == "alltoall":
            x, out = zeros(count), zeros(count)
            pieces = [Piece(rank * part, rank, own * part, part) for rank in range(n)]
            return Case(x, lambda: dist.all_to_all_single(out, x, group=group), out, pieces)
        parts = self._parts(count)
        if operation == "allgv":
            x, out = zeros(parts[own]), zeros(count)
            outs = list(out.split(parts))
            pieces = [Piece(sum(parts[:rank]), rank, 0, parts[rank]) for rank in range(n)]
            return Case(x, lambda: dist.all_gather(outs, x, group=group), out, pieces)
        if operation == "alltoallv":  # rank i sends part j to rank j, which so gets n parts of size j
            mine = parts[own]
            x, out = zeros(count), zeros(mine * n)
            call = lambda: dist.all_to_all_single(out, x, [mine] * n, parts, group=group)  # noqa: E731
            return Case(x, call, out, [Piece(rank * mine, rank, sum(parts[:own]), mine) for rank in range(n)])
        targets = [target for source, target in self.pairs if source == own]
        sources = [source for source, target in self.pairs if target == own]
        x, out = zeros(count), zeros(count * len(sources))
        messages = [dist.P2POp(dist.isend, x, group=group, group_peer=target) for target in targets]
        for place, source in enumerate(sources):
            into = out[place * count : (place + 1) * count]
            messages.append(dist.P2POp(dist.irecv, into, group=group, group_peer=source))

        def exchange() -> None:
            for work in dist.batch_isend_irecv(messages) if messages else []:
                work.wait()

        pieces = [Piece(place * count, source, 0, count) for place, source in enumerate(sources)]
        return Case(x, exchange, out, pieces)

    def _given(self, source: int | None, start: int, numel: int) -> torch.Tensor:
        """What a rank of the group gives in a check, or the sum of what all give. Every rank can work it out."""
        n = self.n
        if self.settings.check == "all_ones":
            values = torch.full((numel,), n if source is None else 1)
        else:  # rank r gives (h + r) % far with a hash h of the place, so that the sum over r depends on h alone
            far = max(2, _FAR // n)
            place = torch.arange(start, start + numel) + self.settings.seed
            h = ((place * 2654435761 & 0xFFFFFFFF) >> 12) % far
            sums = torch.tensor([sum((i + rank) % far for rank in range(n)) for i in range(far)])
            values = sums[h] if source is None else (h + source) % far
        return (values % 256 if self.dtype is torch.uint8 else values).to(self.dtype)

    def errors(self, case: Case) -> int:
        """Calls once on known values; the number of wrong elements of all ranks."""
        for start in range(0, case.own.numel(), _WINDOW):
            window = case.own[start : start + _WINDOW]
            window.copy_(self._given(self.own, start, window.numel()))
        if case.result is not case.own:
            case.result.fill_(99)
        case.call()
        wrong = 0
        for piece in case.expected:
            for done in range(0, piece.numel, _WINDOW):
                numel = min(_WINDOW, piece.numel - done)
                got = case.result[piece.at + done : piece.at + done + numel].cpu()
                wrong += int((got != self._given(piece.source, piece.start + done, numel)).sum())
        total = torch.tensor([wrong], dtype=torch.int64, device="neuron")
        dist.all_reduce(total)
        return int(total.item())

    def measure(self, nbytes: int) -> Row:
        """Times one size: every iteration ends when the slowest rank has its result."""
        count = self.count(nbytes)
        case = self.case(count)
        host_us, virtual_us = [], []
        for _ in range(self.settings.warmup):
            case.call()
        neuron.synchronize()
        dist.barrier()
        for _ in range(self.settings.iterations):
            begin, end = (neuron.Event(enable_timing=True) for _ in range(2))
            start = time.perf_counter()
            begin.record()
            case.call()
            end.record()
            neuron.synchronize()
            host_us.append((time.perf_counter() - start) * 1e6)
            virtual_us.append(begin.elapsed_time(end) * 1e3)
        slowest = torch.tensor([host_us, virtual_us], dtype=torch.float64, device="neuron")
        dist.all_reduce(slowest, ReduceOp.MAX)
        host, virtual = slowest.cpu()
        size = count * self.dtype.itemsize
        cost = COST_OPERATIONS[self.settings.operation]
        algorithm = communicator(tuple(self.ranks)).algorithm(cost, size) if self.n > 1 else "local"
        return Row(
            size=size,
            count=count,
            type=self.settings.dtype,
            time_us=float(virtual.mean()),
            host_us={name: _statistic(host, name) for name in ("avg", *self.settings.statistics)},
            bus_factor=bus_factor(self.settings.operation, self.n),
            algorithm=algorithm,
            input_bytes=case.own.numel() * self.dtype.itemsize,
            output_bytes=case.result.numel() * self.dtype.itemsize,
            errors=self.errors(case) if self.settings.check else None,
        )


def _statistic(values: torch.Tensor, name: str) -> float:
    if name == "avg":
        return float(values.mean())
    share = {"min": 0.0, "max": 1.0}.get(name)
    return float(values.quantile(float(name[1:]) / 100 if share is None else share))


def main() -> None:
    settings = Settings.from_json(sys.argv[1])
    neuron.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("neuron")
    bench = Bench(settings)
    speaks = bench.rank == 0
    if speaks and not settings.as_json:
        print(header(settings), flush=True)
    rows = []
    for nbytes in settings.sizes:
        rows.append(bench.measure(nbytes))
        if speaks and not settings.as_json:
            print(show(settings, rows[-1]), flush=True)
    if speaks:
        report = json.dumps({"results": [row.as_json() for row in rows]}, indent=2)
        print(report if settings.as_json else summary(rows), flush=True)
        if settings.report:
            try:
                Path(settings.report).write_text(report + "\n")
            except OSError as error:
                sys.exit(f"--report-to-json-file {settings.report}: {error.strerror}")
    dist.destroy_process_group()
    if speaks and any(row.errors for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
