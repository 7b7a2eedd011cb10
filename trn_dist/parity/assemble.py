"""The ranks' recorded parts put back together: one whole tensor for each thing recorded, whatever the layout.

Parameters and what belongs to them know their place (DTensor offsets). Activations do not: their samples follow from
the data-parallel order (microbatch by microbatch, rank by rank), and which dimension tensor and context parallel cut
follows from the shape of the same activation in the layout that it is compared with. Parts that several ranks hold must
be the same; where they are not, that is remembered. Called by :mod:`trn_dist.parity.divergence`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trn_dist.parity.recorder import step_folder

Key = tuple[str, str, str]
"""stage, name, what: see :class:`trn_dist.parity.recorder.Recorder`."""

OF_ACTIVATIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor as one rank would have it.

    Attributes:
        tensor: the whole, on the CPU.
        replicas: one tensor for each group of ranks that should hold the same and does not, by rank; else empty.
        dimension: the mesh dimension (``dp``, ``tp``, ...) in which those ranks differ.
        dims: which tensor dimension is cut by which mesh dimension, where known.
    """

    tensor: torch.Tensor
    replicas: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    dimension: str = ""
    dims: dict[str, int] = dataclasses.field(default_factory=dict)


class CannotAssemble(RuntimeError):
    """The parts do not make a whole; says why."""


class RecordedStep:
    """What all ranks of a run recorded in one step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.coordinates: list[dict[str, tuple[int, int]]] = []
        self._parts: dict[Key, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self.order: list[Key] = []
        files = sorted(step_folder(folder, step).glob("rank-*.pt"))
        if not files:
            raise FileNotFoundError(f"{step_folder(folder, step)}: no rank recorded step {step}")
        for rank, file in enumerate(files):
            content = torch.load(file, weights_only=True, mmap=True)
            self.coordinates.append(content["coordinates"])
            for record in content["records"]:
                name = record["name"]
                # The model's own input enters the first pipeline stage, its output leaves the last.
                if name == "model (first stage)" and record["what"].startswith("input"):
                    name = "model"
                if name == "model (last stage)" and record["what"].startswith("output"):
                    name = "model"
                key = (record["stage"], name, record["what"])
                if key not in self._parts:
                    self.order.append(key)
                self._parts[key][rank].append(record)

    def size(self, dimension: str) -> int:
        return self.coordinates[0][dimension][1]

    def __contains__(self, key: Key) -> bool:
        return key in self._parts

    def calls(self, key: Key) -> dict[int, int]:
        """How often each rank recorded this in the step."""
        return {rank: len(records) for rank, records in self._parts[key].items()}

    def whole(self, key: Key, like: torch.Tensor | None = None, samples: int | None = None) -> Whole:
        """The whole of something recorded.

        Args:
            like: the same of the layout that this is compared with; its shape tells how activations are cut.
            samples: of the global batch.

        Raises:
            CannotAssemble: parts are missing or do not fit.
        """
        if key[0] in OF_ACTIVATIONS and not key[2].endswith("as used"):
            return self._activation(key, like, samples)
        return self._parameter(key)

    # --- Parameters and what belongs to them

    def _parameter(self, key: Key) -> Whole:
        parts = self._parts[key]
        first = next(iter(parts.values()))[0]
        shape = first.get("shape", tuple(first["tensor"].shape))
        partial = first.get("partial", False)
        whole = torch.zeros(shape, dtype=first["tensor"].dtype)
        filled = torch.zeros(shape, dtype=torch.bool)
        holders: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank, records in parts.items():
            record = records[0]
            tensor = record["tensor"]
            if record.get("shape", tuple(tensor.shape)) != shape:
                raise CannotAssemble(f"rank {rank} has it of shape {tuple(tensor.shape)}, expected {tuple(shape)}")
            offset = record.get("offset", (0,) * tensor.dim())
            region = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            if tensor.numel() == 0:
                continue
            if partial:
                whole[region] += tensor
                filled[region] = True
                continue
            holders[(tuple(offset), tuple(tensor.shape))].append(rank)
            if len(holders[(tuple(offset), tuple(tensor.shape))]) == 1:
                whole[region] = tensor
                filled[region] = True
        if not filled.all():
            missing = int((~filled).sum())
            raise CannotAssemble(f"{missing} of {filled.numel()} elements are on no rank")
        for ranks in holders.values():
            tensors = {rank: parts[rank][0]["tensor"] for rank in ranks}
            if any(not _same(tensors[ranks[0]], tensor) for tensor in tensors.values()):
                return Whole(whole, tensors, self._dimension(ranks))
        return Whole(whole)

    def _dimension(self, ranks: list[int]) -> str:
        """The mesh dimension in which these ranks differ; several joined by a cross."""
        names = [
            name for name in ("pp", "dp", "cp", "tp") if len({self.coordinates[rank][name][0] for rank in ranks}) > 1
        ]
        return " x ".join(names)

    # --- Activations

    def _activation(self, key: Key, like: torch.Tensor | None, samples: int | None) -> Whole:
        by_place = {}
        replicas: dict[int, torch.Tensor] = {}
        for place, ranks in self._places(key).items():
            by_place[place], replicas = self._samples(key, ranks, samples)
        if replicas:
            return Whole(next(iter(by_place.values())), replicas, "dp")
        target = tuple(like.shape) if like is not None else None
        first = next(iter(by_place.values()))
        if len(by_place) == 1 or target is None:
            return Whole(first)
        candidates = list(self._joined(by_place, target))
        if not candidates:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in by_place.values())
            raise CannotAssemble(f"parts of shape {shapes} do not make {target}")
        assert like is not None
        # Of two ways to cut that both fit, that with fewer contradictions and nearer to the other layout.
        return min(candidates, key=lambda whole: (bool(whole.replicas), _distance(whole.tensor, like)))

    def _places(self, key: Key) -> dict[tuple[int, int], dict[int, int]]:
        """Ranks that recorded this, by (cp, tp) position: data-parallel position -> rank."""
        places: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for rank in self._parts[key]:
            at = self.coordinates[rank]
            places[(at["cp"][0], at["tp"][0])][at["dp"][0]] = rank
        return dict(sorted(places.items()))

    def _samples(
        self, key: Key, ranks: dict[int, int], samples: int | None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """All samples in global order, from the data-parallel ranks of one place."""
        calls = {dp: [record for record in self._parts[key][rank]] for dp, rank in sorted(ranks.items())}
        tensors = {dp: [_summed(record) for record in sorted(r, key=lambda r: r["call"])] for dp, r in calls.items()}
        counts = {len(found) for found in tensors.values()}
        if len(counts) > 1:
            raise CannotAssemble(f"ranks recorded it {sorted(counts)} times in one step")
        count = counts.pop()
        first = next(iter(tensors.values()))[0]
        total = first.shape[0] * count * len(tensors) if first.dim() else 0
        if first.dim() == 0 or (
            samples is not None and total != samples and first.shape[0] * self.size("dp") != samples
        ):
            # Not by sample (a table of positions, say): the same on all ranks and in all calls.
            flat = {ranks[dp]: found[0] for dp, found in tensors.items()}
            differ = any(not _same(first, tensor) for tensor in flat.values())
            return first, (flat if differ and first.dim() else {})
        per_accumulation = count if self.size("pp") > 1 else 1
        pieces = [
            tensors[dp][call]
            for start in range(0, count, per_accumulation)
            for dp in tensors
            for call in range(start, start + per_accumulation)
        ]
        return torch.cat(pieces, dim=0), {}

    def _joined(self, parts: dict[tuple[int, int], torch.Tensor], target: tuple[int, ...]) -> Iterator[Whole]:
        """Every way to join the (cp, tp) parts to the target's shape."""
        cp, tp = self.size("cp"), self.size("tp")
        first = next(iter(parts.values()))
        if first.dim() != len(target):
            return
        dims = [None, *range(first.dim())]
        for tp_dim, cp_dim, zigzag in itertools.product(dims, dims, (True, False)):
            if (tp == 1 and tp_dim is not None) or (cp == 1 and (cp_dim is not None or zigzag)):
                continue
            if cp_dim is None and zigzag and cp > 1:
                continue
            shape = list(first.shape)
            if tp_dim is not None:
                shape[tp_dim] *= tp
            if cp_dim is not None:
                shape[cp_dim] *= cp
            if tuple(shape) != target:
                continue
            columns: list[torch.Tensor] = []
            replicas: dict[int, torch.Tensor] = {}
            dimension = ""
            for c in range(cp):
                row = [parts[(c, t)] for t in range(tp)]
                if tp_dim is None and any(not _same(row[0], other) for other in row):
                    replicas, dimension = dict(enumerate(row)), "tp"
                columns.append(row[0] if tp_dim is None else torch.cat(row, dim=tp_dim))
            if cp_dim is None:
                if any(not _same(columns[0], other) for other in columns):
                    replicas, dimension = dict(enumerate(columns)), "cp"
                whole = columns[0]
            elif zigzag:
                if columns[0].shape[cp_dim] % 2:
                    continue
                # Load balancing: rank i has pieces i and 2 cp - 1 - i, so that causal attention costs all the same.
                halves = [column.chunk(2, dim=cp_dim) for column in columns]
                whole = torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim=cp_dim)
            else:
                whole = torch.cat(columns, dim=cp_dim)
            found = {name: dim for name, dim in (("tp", tp_dim), ("cp", cp_dim)) if dim is not None}
            yield Whole(whole, replicas, dimension, found)


def _summed(record: dict[str, Any]) -> torch.Tensor:
    return record["tensor"]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((as_real(a) - as_real(b)).norm())


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, complex numbers as pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64)
