"""The configuration that a recipe is read into: TorchTitan's ``JobConfig`` and one table of ours, ``[neuron]``.

A recipe names this module in ``job.custom_config_module``; TorchTitan's ``ConfigManager`` then merges the dataclasses
below into its own, field by field, and importing this module registers the train specs. Annotations must stay real
types (no ``from __future__ import annotations``), because TorchTitan looks at them while merging.
"""

from dataclasses import dataclass, field
from typing import Literal

import trn_dist.titan.train_spec  # noqa: F401  (registers the train specs)
from trn_dist.titan.build_tokenizer import TOKENIZER_FOLDER


@dataclass
class Model:
    hf_assets_path: str = str(TOKENIZER_FOLDER)
    """
    Folder with tokenizer.json and tokenizer_config.json (and, for loading weights, Hugging Face's other files).
    Default: the package's own tokenizer of 2,048 tokens, see trn_dist/titan/build_tokenizer.py.
    """


@dataclass
class Training:
    dataset: str = "python_stdlib"
    """
    The text: 'python_stdlib' (source files of Python's standard library), 'text', 'jsonl' or 'parquet' (files named
    by training.dataset_path); these are read in one global order whatever the layout. Any other name is one of
    TorchTitan's.
    """


@dataclass
class Metrics:
    log_freq: int = 1
    """How often to log metrics, in steps"""


@dataclass
class Neuron:
    """The part of a recipe that is ours; TorchTitan itself ignores it."""

    ranks: int = 8
    """
    Number of ranks that `trn train` starts, one logical NeuronCore each. Under torchrun, --nproc-per-node counts. The
    product of the degrees in [parallelism] must give this number.
    """

    text_field: str = "text"
    """Key (jsonl) or column (parquet) that holds the text"""

    shuffle_block: int = 1024
    """Number of successive samples that are shuffled among themselves; 0 reads the text in order. Same on every
    layout
    """

    norm_accumulation: Literal["float32", "float64"] = "float32"
    """
    What the squares of a float32 gradient norm are summed in. 'float32' gives the bits of PyTorch's CPU kernel, which
    is off by up to 1e-4 for large tensors and so depends on the sharding; 'float64' agrees between layouts to six
    digits
    """

    exact_sums: bool = False
    """
    Sums without error over ranks, microbatches and shards, each rounded once: losses and gradient norms of
    data-parallel layouts of any size (DDP, FSDP2; float32; no other parallelism) are then equal to the bit. Slower;
    also switched on by TRN_EXACT_SUMS=1
    """

    faults: list[str] = field(default_factory=list)
    """
    What goes wrong on purpose under `trn train`, such as "rank=3,step=5,kill"; see docs/faults.md. Under torchrun set
    TRN_FAULTS
    """

    progress: Literal["auto", "bar", "lines"] = "auto"
    """What `trn train` shows: a bar below the lines, lines only, or a bar if the output is a terminal"""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    metrics: Metrics = field(default_factory=Metrics)
    neuron: Neuron = field(default_factory=Neuron)
