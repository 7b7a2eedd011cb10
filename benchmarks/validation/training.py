"""Training throughput against published figures: published, predicted, error, also left out of the fit.

    python benchmarks/validation/training.py

A rank's step is put together from the operators and collectives of its share of the model, each priced as at run
time: operators by the extension's cost model on meta tensors of the rank's shapes, collectives by the tables of the
groups that the layout makes on the cluster. One parameter is fitted to these rows, the part of the tensor engine's peak
that large products reach (`[efficiency] tensor`); no row has a constant of its own.

What is assumed, beside training.toml: the graph is compiled, so operators have no launch overhead; Megatron's tensor
parallelism with sequence parallelism, whose collectives (two all-gathers and two reduce-scatters a layer forward, the
same backward and two all-gathers more for the weights' gradients) are exposed; key and value heads are repeated where
there are fewer than tensor-parallel ranks; one-forward-one-backward pipelines, exposed transfers; ZeRO-1: the gradients
are reduce-scattered in float32 and the parameters gathered in bfloat16 once a step, exposed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trn_dist import _C
from trn_dist.collectives import Communicator, mesh_groups
from trn_dist.hardware import Chip, Topology, load_cluster
from trn_dist.timing.chip_rates import chip_rates

ROWS_FILE = Path(__file__).with_name("training.toml")
CLUSTER = "trn1.32xlarge"
BF16_BYTES, FP32_BYTES = 2, 4
EFFICIENCIES = [round(0.50 + 0.01 * i, 2) for i in range(51)]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def operator_s(name: str, inputs: list[torch.Tensor], made: list[torch.Tensor], causal: bool = False) -> float:
    """Seconds of one operator on a logical core."""
    return _C._price(f"aten::{name}", [[tensor] for tensor in inputs], [], made, causal)["time_ps"] / 1e12


def product_s(m: int, k: int, n: int) -> float:
    return operator_s("mm", [meta(m, k), meta(k, n)], [meta(m, n)])


def linear_s(rows: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Forward; backward, which is the input's gradient and the weight's."""
    return product_s(rows, inputs, outputs), product_s(rows, outputs, inputs) + product_s(inputs, rows, outputs)


def pointwise_s(*shape: int, inputs: int = 1) -> float:
    return operator_s("add", [meta(*shape) for _ in range(inputs)], [meta(*shape)])


@dataclass(frozen=True)
class Cost:
    """Seconds, by what they go to."""

    compute: float = 0.0
    tensor_parallel: float = 0.0
    pipeline: float = 0.0
    data_parallel: float = 0.0
    optimizer: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self.parts().values(), other.parts().values(), strict=True)))

    def times(self, count: float) -> Cost:
        return Cost(*(part * count for part in self.parts().values()))

    def parts(self) -> dict[str, float]:
        return dict(vars(self))

    @property
    def total(self) -> float:
        return sum(self.parts().values())


class Job:
    """One row: a model on a layout, tensor parallel ranks next to each other, then data parallel, then stages."""

    def __init__(self, row: dict[str, Any], model: dict[str, Any]) -> None:
        self.row, self.model = row, model
        self.topology = Topology(load_cluster(CLUSTER, nodes=row["nodes"]))
        self.shape = (row["pipeline"], row["data"], row["tensor"])
        world = row["pipeline"] * row["data"] * row["tensor"]
        if world != self.topology.cluster.world_size:
            raise ValueError(
                f"{row['model']}: the layout has {world} ranks, the nodes {self.topology.cluster.world_size}"
            )

    @functools.cache  # noqa: B019  (four jobs live as long as the program)
    def communicator(self, dimension: int) -> Communicator:
        groups = mesh_groups(self.shape, dimension)
        return Communicator(self.topology, groups[0], groups, launch_profile="in_graph")

    def collective_s(self, dimension: int, operation: str, nbytes: int) -> float:
        if self.shape[dimension] == 1:
            return 0.0
        return self.communicator(dimension).time_ps(operation, nbytes) / 1e12

    def layer(self) -> Cost:
        """Forward and backward of one layer for one micro-batch, on one rank."""
        model, tensor, rows = self.model, self.row["tensor"], self.row["sequence"]
        width, head = model["width"], model["width"] // model["heads"]
        heads, kv_heads = model["heads"] // tensor, max(1, model["kv_heads"] // tensor)
        hidden = model["hidden"] // tensor
        projections = 3 if model["gated"] else 2
        # Weights of this rank: queries, keys and values; the output; the MLP.
        linears = [
            linear_s(rows, width, (heads + 2 * kv_heads) * head),
            linear_s(rows, heads * head, width),
            *[linear_s(rows, width, hidden)] * (projections - 1),
            linear_s(rows, hidden, width),
        ]
        qkv = [meta(1, heads, rows, head) for _ in range(3)]
        statistics_ = meta(1, heads, rows, dtype=torch.float32)
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        attention = operator_s(flash, qkv, [qkv[0], statistics_], causal=True)
        attention_backward = operator_s(
            f"{flash}_backward", [qkv[0], *qkv, qkv[0], statistics_], list(qkv), causal=True
        )
        # Norms and residuals on this rank's part of the sequence; rotation of queries and keys; the MLP's activation.
        part = rows // tensor
        others = (
            2 * operator_s("_fused_rms_norm", [meta(part, width)], [meta(part, width)])
            + 2 * pointwise_s(part, width, inputs=2)
            + 2 * pointwise_s(rows, (heads + kv_heads) * head, inputs=2)
            + operator_s("silu", [meta(rows, hidden)], [meta(rows, hidden)])
            + (pointwise_s(rows, hidden, inputs=2) if model["gated"] else 0.0)
        )
        forward = sum(f for f, _ in linears) + attention + others
        backward = sum(b for _, b in linears) + attention_backward + 2 * others
        gathered = rows * width * BF16_BYTES
        gather, scatter = (self.collective_s(2, name, gathered) for name in ("all_gather", "reduce_scatter"))
        communication = 2 * gather + 2 * scatter
        compute, exposed = forward + backward, 2 * communication + 2 * gather
        if self.row["recomputation"] == "layer":
            compute, exposed = compute + forward, exposed + communication
        elif self.row["recomputation"] == "attention":
            compute += attention
        return Cost(compute=compute, tensor_parallel=exposed)

    def head(self) -> Cost:
        """Vocabulary projection and loss, on the last stage."""
        rows, vocabulary = self.row["sequence"], self.model["vocabulary"] // self.row["tensor"]
        logits = meta(rows, vocabulary, dtype=torch.float32)
        loss = operator_s("_log_softmax", [logits], [logits])
        gathered = rows * self.model["width"] * BF16_BYTES
        exposed = self.collective_s(2, "all_gather", gathered) + self.collective_s(2, "reduce_scatter", gathered)
        return Cost(compute=sum(linear_s(rows, self.model["width"], vocabulary)) + 2 * loss, tensor_parallel=exposed)

    def parameters_per_rank(self) -> int:
        model = self.model
        head = model["width"] // model["heads"]
        attention = model["width"] * head * 2 * (model["heads"] + model["kv_heads"])
        layer = attention + (3 if model["gated"] else 2) * model["width"] * model["hidden"]
        layers = layer * model["layers"] // self.row["pipeline"]
        return (layers + model["vocabulary"] * model["width"]) // self.row["tensor"]

    def step(self) -> Cost:
        """A whole step on a rank of the slowest stage."""
        row = self.row
        stage = self.layer().times(self.model["layers"] / row["pipeline"]) + self.head()
        handed = row["sequence"] * self.model["width"] * BF16_BYTES // row["tensor"]
        stage += Cost(pipeline=2 * self.collective_s(0, "send", handed))
        micro_batches = row["global_batch"] // row["data"]
        step = stage.times(micro_batches)
        step += Cost(pipeline=(row["pipeline"] - 1) * stage.total)  # the bubble
        count = self.parameters_per_rank()
        share = count // row["data"]
        state = [meta(share, dtype=torch.float32) for _ in range(4)]
        return step + Cost(
            data_parallel=self.collective_s(1, "reduce_scatter", count * FP32_BYTES)
            + self.collective_s(1, "all_gather", count * BF16_BYTES),
            optimizer=operator_s("_fused_adamw", state, state[1:]),
        )


class Row:
    """A published figure, and what the model says of it with any efficiency of the tensor engine."""

    def __init__(self, row: dict[str, Any], model: dict[str, Any], chip: Chip) -> None:
        self.row = row
        self._chip = chip
        self.published = statistics.mean(row["sequences_per_s"].values())
        self._job = Job(row, model)

    @functools.cache  # noqa: B019  (four rows live as long as the program)
    def step(self, efficiency: float) -> Cost:
        efficiencies = dataclasses.replace(self._chip.efficiency, tensor=efficiency)
        _C._set_chip_rates(chip_rates(dataclasses.replace(self._chip, efficiency=efficiencies)))
        return self._job.step()

    def predicted(self, efficiency: float) -> float:
        return self.row["global_batch"] / self.step(efficiency).total

    def error(self, efficiency: float) -> float:
        return self.predicted(efficiency) / self.published - 1


def fit(rows: list[Row]) -> float:
    """The efficiency with the smallest mean squared logarithm of predicted over published."""
    return min(EFFICIENCIES, key=lambda e: statistics.fmean(math.log1p(row.error(e)) ** 2 for row in rows))


def main() -> None:
    file = tomllib.loads(ROWS_FILE.read_text(encoding="utf-8"))
    chip = load_cluster(CLUSTER).chip
    rows = [Row(row, file["models"][row["model"]], chip) for row in file["rows"]]
    shipped = chip.efficiency.tensor
    errors, left_out_errors = [], []
    print(f"{CLUSTER}, sequences per second")
    for row in rows:
        step, error = row.step(shipped), row.error(shipped)
        left_out = fit([other for other in rows if other is not row])
        errors.append(abs(error))
        left_out_errors.append(abs(row.error(left_out)))
        layout = f"TP {row.row['tensor']} x DP {row.row['data']} x PP {row.row['pipeline']}"
        parts = ", ".join(f"{name} {100 * time / step.total:.0f} %" for name, time in step.parts().items() if time)
        versions = ", ".join(f"{figure:g} ({version})" for version, figure in row.row["sequences_per_s"].items())
        print(f"{row.row['model']:<12} {layout:<22} published {versions}")
        print(
            f"{'':<12} predicted {row.predicted(shipped):.2f}, error {100 * error:+.0f} % against their mean, "
            f"{100 * row.error(left_out):+.0f} % left out of the fit; {parts}"
        )
    for what, values in (("mean error", errors), ("left out of the fit: mean error", left_out_errors)):
        print(f"{what} {100 * statistics.mean(values):.0f} %, worst {100 * max(values):.0f} %")
    print(f"tensor efficiency: fitted {fit(rows):.2f}, shipped {shipped:.2f}")


if __name__ == "__main__":
    main()
