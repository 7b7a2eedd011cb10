"""Do ranks that should hold the same weights hold them? A bug that makes replicas drift apart may be too small for the
loss and the gradient norm of a few steps to show, but not one bit of it escapes a hash.

Runs inside the ranks of a compared run, called by :mod:`trn_dist.titan.observe`: each rank writes a hash of every
parameter that another rank should hold as well, as each step begins, to a file of its own. No collective is used, for
the collectives may be what is wrong. Read by :mod:`trn_dist.parity.training` when the run has ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trn_dist.neuron.replicas import content_hash, most_and_others
from trn_dist.parity.recorder import plain_name

OBSERVER = "trn_dist.parity.replicas:observe"


class ReplicaWriter:
    """Writes one line a step: ``{"name, place": hash}`` for this rank's parameters."""

    def __init__(self, model_parts: list[torch.nn.Module], file: Path) -> None:
        self.model_parts = model_parts
        self.file = file
        self.file.touch()

    def before_clipping(self, parameters: list[torch.Tensor]) -> None:
        """Parameters are those that the step's loss was computed with."""
        hashes = {}
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                place = _place(parameter)
                if place is not None:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    hashes[f"{plain_name(name)}{place}"] = content_hash(local)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(hashes) + "\n")

    def after_clipping(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        pass


def _place(parameter: torch.Tensor) -> str | None:
    """Which part of the parameter this rank holds, as text; None if no other rank holds the same."""
    if not isinstance(parameter, DTensor):
        return ""
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    dims = list(enumerate(parameter.placements))
    if all(not placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in dims):
        return None
    parts = [
        f"part {coordinates[dim]} of {mesh.size(dim)}"
        for dim, placement in dims
        if not placement.is_replicate() and mesh.size(dim) > 1
    ]
    return f" ({', '.join(parts)})" if parts else ""


def observe(model_parts: list[torch.nn.Module], optimizers: Any, parallel_dims: Any) -> ReplicaWriter:
    folder = Path(os.environ["TRN_OBSERVER_FOLDER"])
    return ReplicaWriter(model_parts, folder / f"replicas-{int(os.environ['RANK']):05d}.jsonl")


def find_disagreement(folder: Path, first_step: int = 1) -> tuple[int, str] | None:
    """The first step in whose forward pass replicas differ, and a sentence on the first parameter that does.

    The files begin with ``first_step``. A step that not every rank has written is left out: the run ended in it.
    """
    files = sorted(folder.glob("replicas-*.jsonl"))
    ranks = [file.read_text(encoding="utf-8").splitlines() for file in files]
    for step, lines in enumerate(zip(*ranks, strict=False), start=first_step):
        holders: dict[str, dict[int, int]] = {}
        for rank, line in enumerate(lines):
            for name, value in json.loads(line).items():
                holders.setdefault(name, {})[rank] = value
        different = {name: found for name, found in holders.items() if len(set(found.values())) > 1}
        if different:
            name, found = next(iter(different.items()))
            most, odd = most_and_others(found)
            said = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
            others = "" if len(different) == 1 else f" (and {len(different) - 1} other parameters)"
            return step, (
                f"replicas differ: {name}{others}, as step {step} computed with it: {said} other bits than rank "
                f"{most[0]}"
            )
    return None
