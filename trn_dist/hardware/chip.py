"""A chip: its cores, engines, memory and what launching work on it costs.

One frozen dataclass for each thing in the hardware; the figures are in ``configs/chips/*.toml``, with their sources.
Called by ``cluster.py``, by the operators' cost model and by the device's memory ledger. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trn_dist.hardware.config_file import (
    ConfigError,
    Fraction,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    build,
    read_config,
)

DTYPES = ("float32", "tfloat32", "bfloat16", "float16", "float8", "int8")


ByDtype = Annotated[dict[str, PositiveFloat], Names(DTYPES)]


@dataclass(frozen=True)
class Hbm:
    """High-bandwidth memory of a whole chip."""

    capacity_bytes: PositiveInt
    bandwidth_gbps: PositiveFloat


@dataclass(frozen=True)
class Sram:
    """On-chip memory of one physical core: SBUF feeds the engines, PSUM takes the matrix engine's sums."""

    sbuf_bytes: PositiveInt
    psum_bytes: PositiveInt


@dataclass(frozen=True)
class TensorEngine:
    """The matrix engine of one physical core: a systolic array of ``rows`` x ``columns`` multiply-accumulate cells."""

    clock_ghz: PositiveFloat
    rows: PositiveInt
    columns: PositiveInt
    tflops: ByDtype


@dataclass(frozen=True)
class ElementEngine:
    """An engine of one physical core that works element by element (VectorE, ScalarE, GpSimdE)."""

    clock_ghz: PositiveFloat
    # Results per cycle with one input; two inputs take twice as long.
    elements_per_cycle: ByDtype
    instruction_overhead_cycles: NonNegativeInt

    def gelements_per_s(self, dtype: str) -> float:
        """10^9 results per second of one physical core; a dtype that the file does not name runs as float32."""
        return self.clock_ghz * self.elements_per_cycle.get(dtype, self.elements_per_cycle["float32"])


@dataclass(frozen=True)
class Engines:
    """The engines of one physical core."""

    tensor: TensorEngine
    vector: ElementEngine
    scalar: ElementEngine
    gpsimd: ElementEngine


@dataclass(frozen=True)
class Dma:
    """The DMA engines of one physical core, which move data between memories, cores and links."""

    engines_per_core: PositiveInt
    engine_bandwidth_gbps: PositiveFloat
    start_latency_us: NonNegativeFloat
    # A descriptor that moves this many bytes or more runs at the full rate.
    saturating_bytes: PositiveInt


@dataclass(frozen=True)
class HostLink:
    """The way between the host's memory and the HBM of one logical core, each direction."""

    bandwidth_gbps: PositiveFloat


@dataclass(frozen=True)
class Launch:
    """What it costs to start an operator, before any work is done."""

    host_operator_us: NonNegativeFloat
    # Of the host, to ask whether something is done when it is not.
    host_poll_us: PositiveFloat
    device_operator_us: NonNegativeFloat


@dataclass(frozen=True)
class Efficiency:
    """The part of each peak rate that large, regular work reaches."""

    tensor: Fraction
    vector: Fraction
    scalar: Fraction
    gpsimd: Fraction
    hbm: Fraction
    dma: Fraction


@dataclass(frozen=True)
class AllocatorPolicy:
    """How the runtime carves a core's HBM into segments and blocks.

    ``policy`` is ``"segment"`` (Neuron: size classes) or ``"cuda"`` (PyTorch's CUDA caching allocator: multiples of
    ``min_block_bytes``).
    """

    policy: Annotated[str, Names(("segment", "cuda"))]
    min_block_bytes: PositiveInt
    # Size classes in a doubling; 0 rounds to multiples of min_block_bytes instead.
    classes_per_doubling: NonNegativeInt
    small_limit_bytes: PositiveInt
    small_segment_bytes: PositiveInt
    large_segment_bytes: PositiveInt
    # Requests from here on get a segment of their own size, rounded to segment_granule_bytes.
    unrounded_limit_bytes: PositiveInt
    segment_granule_bytes: PositiveInt


@dataclass(frozen=True)
class Chip:
    """A chip as its file describes it: figures of a physical core; ``*_per_logical_core`` gives a rank's."""

    name: str
    # What torch.neuron.get_device_properties().name says.
    device_name: str
    physical_cores: PositiveInt
    # Physical cores that make one logical core, which is one rank (LNC).
    physical_cores_per_logical: PositiveInt
    # Peak that TorchTitan divides by for its model FLOPs utilisation, per logical core.
    torchtitan_peak_tflops: PositiveFloat
    hbm: Hbm
    sram: Sram
    engines: Engines
    dma: Dma
    host_link: HostLink
    launch: Launch
    efficiency: Efficiency
    allocator: AllocatorPolicy

    def __post_init__(self) -> None:
        if self.physical_cores % self.physical_cores_per_logical:
            raise ConfigError(
                f"chip {self.name}: key 'physical_cores_per_logical' = {self.physical_cores_per_logical}: "
                f"must divide physical_cores = {self.physical_cores}"
            )
        for name in ("vector", "scalar", "gpsimd"):
            if "float32" not in getattr(self.engines, name).elements_per_cycle:
                raise ConfigError(f"chip {self.name}: key 'float32' in [engines.{name}.elements_per_cycle]: missing")

    @property
    def logical_cores(self) -> int:
        return self.physical_cores // self.physical_cores_per_logical

    @property
    def hbm_bytes_per_logical_core(self) -> int:
        return self.hbm.capacity_bytes // self.logical_cores

    @property
    def hbm_bandwidth_gbps_per_logical_core(self) -> float:
        return self.hbm.bandwidth_gbps / self.logical_cores

    @property
    def dma_bandwidth_gbps_per_logical_core(self) -> float:
        return self.dma.engines_per_core * self.dma.engine_bandwidth_gbps * self.physical_cores_per_logical

    def tensor_tflops_per_logical_core(self, dtype: str) -> float:
        """Peak of the matrix engines of one logical core; a dtype that the file does not name runs as float32."""
        tflops = self.engines.tensor.tflops
        return tflops.get(dtype, tflops["float32"]) * self.physical_cores_per_logical


def load_chip(name: str | Path, near: Path | None = None) -> Chip:
    """The chip of a shipped file (``"trainium2"``) or of a file of your own (a path ending in ``.toml``).

    Raises :class:`ConfigError` with file, key, value and legal range.
    """
    table, path = read_config("chips", name, near)
    table.setdefault("name", path.stem)
    chip: Chip = build(Chip, table, path)
    return chip
