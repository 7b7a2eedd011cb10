"""Collectives against published figures: published, predicted, error, and the error with the row left out of the fit.

    python benchmarks/validation/collectives.py [--no-fit]

Every parameter of the model comes from a document (configs/ names it) but three, which are fitted to the host-launched
examples of nccom_test.toml: `link_efficiency`, the part of a link's rate that a collective reaches, and
`step_overhead_us`, what an algorithm's step costs when the host launched it, both from 1 MiB on, so that smaller rows
test them; and `mesh_below_bytes_across_nodes`, from where a group across nodes no longer uses mesh inside them. The
published examples' launch overheads differ by a factor of 50 for reasons that the page does not give; so each
host-launched example's is taken from its smallest row, which is marked "launch" and not counted. Nothing is taken from
the example in a graph.

Three readings of the documents were made with these rows in view, and leaving a row out does not undo them: on which
instance an example ran, that the switch sizes scale with the ranks of a group (`thresholds_at_ranks`), and that a ring
counts physical cores (`ring_steps_per_rank`; the last line prints the error without it).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import tomllib
from pathlib import Path
from typing import NamedTuple

from trn_dist.collectives import Communicator
from trn_dist.hardware import Cluster, Topology, load_cluster
from trn_dist.hardware.cluster import LaunchProfile

ROWS_FILE = Path(__file__).with_name("nccom_test.toml")
LARGE_BYTES = 32 * 2**20
# The rows that decide the step overhead; smaller ones test it, and decide where mesh ends across nodes.
STEPS_FROM_BYTES = 2**20
# From here on latency is a small part of the time, and the links' efficiency nearly all of it.
RATE_FROM_BYTES = 256 * 2**20
EFFICIENCIES = [round(0.52 + 0.01 * i, 2) for i in range(9)]
STEP_OVERHEADS_US = [float(45 + 5 * i) for i in range(7)]
# From the size that is documented for a group on one node down; of equals the first is taken.
MESH_ENDS_BYTES = [2**20 >> i for i in range(11)]


class Parameters(NamedTuple):
    """The fitted ones."""

    link_efficiency: float
    step_overhead_us: float
    mesh_below_bytes_across_nodes: int


class Row(NamedTuple):
    """A published figure. ``sets_launch``: the example's launch overhead is taken from this row."""

    example: str
    nbytes: int
    time_us: float
    algorithm: str
    by_host: bool
    sets_launch: bool


class Prediction(NamedTuple):
    time_us: float
    algorithm: str


class Example:
    """A published run: its rows and the cluster that it is taken to have run on."""

    def __init__(self, table: dict, ring_steps_per_rank: int | None = None) -> None:
        self.name: str = table["name"]
        self.operation: str = table["operation"]
        self.ranks: int = table["ranks"]
        self.launch: str = table["launch"]
        self.cluster: Cluster = load_cluster(table["cluster"], count=table.get("count", 1))
        if ring_steps_per_rank is not None:
            library = dataclasses.replace(self.cluster.collectives, ring_steps_per_rank=ring_steps_per_rank)
            self.cluster = dataclasses.replace(self.cluster, collectives=library)
        host = self.launch == "host"
        self.rows = [
            Row(
                self.name,
                row["bytes"],
                row["time_us"],
                row.get("algorithm", ""),
                host,
                host and number == 0,
            )
            for number, row in enumerate(table["rows"])
        ]

    def shipped(self) -> Parameters:
        library = self.cluster.collectives
        return Parameters(
            library.link_efficiency,
            library.launch["host"].step_overhead_us,
            library.mesh_below_bytes_across_nodes,
        )

    @functools.cache  # noqa: B019 - an example lives as long as the program
    def predict(self, parameters: Parameters) -> list[Prediction]:
        """A prediction for each row."""
        library = self.cluster.collectives
        values = parameters._asdict()
        launch = dict(library.launch, host=LaunchProfile(0.0, values.pop("step_overhead_us")))
        library = dataclasses.replace(library, launch=launch, **values)
        topology = Topology(dataclasses.replace(self.cluster, collectives=library))
        table = Communicator(topology, range(self.ranks), launch_profile=self.launch).table(self.operation)
        times = [table.time_ps(row.nbytes) / 1e6 for row in self.rows]
        launch_us = next((row.time_us - times[i] for i, row in enumerate(self.rows) if row.sets_launch), 0.0)
        return [
            Prediction(time + launch_us, table.algorithm(row.nbytes))
            for time, row in zip(times, self.rows, strict=True)
        ]


def read_examples(ring_steps_per_rank: int | None = None) -> list[Example]:
    return [Example(t, ring_steps_per_rank) for t in tomllib.loads(ROWS_FILE.read_text(encoding="utf-8"))["example"]]


def misfit(
    examples: list[Example],
    parameters: Parameters,
    left_out: Row | None,
    from_bytes: int,
    below_bytes: float = math.inf,
) -> float:
    """Mean squared logarithm of predicted over published, over the host-launched rows of some sizes."""
    squares = [
        math.log(prediction.time_us / row.time_us) ** 2
        for example in examples
        for row, prediction in zip(example.rows, example.predict(parameters), strict=True)
        if row.by_host and from_bytes <= row.nbytes < below_bytes and row != left_out
    ]
    return statistics.fmean(squares)


def fit(examples: list[Example], left_out: Row | None = None) -> Parameters:
    """The links' efficiency from the largest rows, where it decides; the step overhead from all from 1 MiB on; where
    mesh ends across nodes from the others."""
    grid = [Parameters(e, s, MESH_ENDS_BYTES[0]) for e in EFFICIENCIES for s in STEP_OVERHEADS_US]
    by_rate = min(grid, key=lambda p: misfit(examples, p, left_out, RATE_FROM_BYTES))
    by_step = [parameters for parameters in grid if parameters.link_efficiency == by_rate.link_efficiency]
    best = min(by_step, key=lambda p: misfit(examples, p, left_out, STEPS_FROM_BYTES))
    ends = [best._replace(mesh_below_bytes_across_nodes=end) for end in MESH_ENDS_BYTES]
    return min(ends, key=lambda p: misfit(examples, p, left_out, 0, STEPS_FROM_BYTES))


def percent(predicted: float, published: float) -> float:
    return 100 * (predicted / published - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--no-fit", action="store_true", help="print predictions only, without the leave-one-out fits")
    refit = not parser.parse_args().no_fit

    examples = read_examples()
    print("source of the published figures: AWS Neuron SDK 2.32, nccom-test.rst; parameters: configs/, as shipped")
    errors: list[float] = []
    left_out_errors: list[float] = []
    for example in examples:
        print(f"\n{example.name}, on {example.cluster.name} x {example.cluster.count}, launched by {example.launch}")
        head = f"{'bytes':>11} {'published us':>13} {'predicted us':>13} {'error':>7}"
        print(head + (f" {'left out':>9}" if refit else "") + "  algorithm (published)")
        for number, (row, now) in enumerate(zip(example.rows, example.predict(example.shipped()), strict=True)):
            line = f"{row.nbytes:>11} {row.time_us:>13.1f} {now.time_us:>13.1f} "
            if row.sets_launch:
                line += f"{'launch':>7}" + (f" {'':>9}" if refit else "")
            else:
                errors.append(percent(now.time_us, row.time_us))
                line += f"{errors[-1]:>+6.0f}%"
                if refit:
                    alone = example.predict(fit(examples, row) if row.by_host else example.shipped())[number]
                    left_out_errors.append(percent(alone.time_us, row.time_us))
                    line += f" {left_out_errors[-1]:>+8.0f}%"
            print(f"{line}  {now.algorithm}" + (f" ({row.algorithm})" if row.algorithm else ""))

    rows = [row for example in examples for row in example.rows if not row.sets_launch]
    large = [abs(error) for row, error in zip(rows, errors, strict=True) if row.nbytes >= LARGE_BYTES]
    print(f"\nmean of |error|, {len(errors)} rows: {statistics.fmean(map(abs, errors)):.0f} %")
    if refit:
        print(f"mean of |error| with the row left out: {statistics.fmean(map(abs, left_out_errors)):.0f} %")
    print(f"from 32 MB on, {len(large)} rows: mean {statistics.fmean(large):.0f} %, worst {max(large):.0f} %")
    if refit:
        across = max(examples, key=lambda example: example.cluster.count)
        print(f"fitted:  {fit(examples)}")
        print(f"shipped: {across.shipped()}")
        spread, spread_logical = (
            math.sqrt(misfit(read, fit(read), None, STEPS_FROM_BYTES))
            for read in (examples, read_examples(ring_steps_per_rank=1))
        )
        print(
            f"root mean square of log(predicted/published) from 1 MiB on: {spread:.3f}; "
            f"with rings that count logical cores, fitted anew: {spread_logical:.3f}"
        )


if __name__ == "__main__":
    main()
