"""TorchTitan's own models, trained on our data and with our metrics: train specs registered under the models' own
names.

Importing this module registers, for every language model of TorchTitan, its own train spec with three fields replaced:
the data loader and the validator (only for the texts in ``corpus.CORPORA``; any other ``dataset`` still goes to
TorchTitan's) and the metrics processor. It is imported by :mod:`trn_dist.titan.config`, so a recipe's
``job.custom_config_module`` brings it into an unmodified ``torchtitan.train``. A package with a model of its own
wraps its spec with :func:`with_own_data`.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models import _supported_models
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from trn_dist.titan.corpus import CORPORA, Corpus, CorpusError, open_corpus
from trn_dist.titan.dataloader import GlobalOrderDataLoader
from trn_dist.titan.exact_sums import ExactSums
from trn_dist.titan.metrics import build_rank_metrics_processor

# flux makes images with a trainer of its own, llama3_ft needs torchft; both keep TorchTitan's spec.
LANGUAGE_MODELS = tuple(sorted(_supported_models - {"flux", "llama3_ft"}))


def check_vocabulary(tokenizer: BaseTokenizer, model_args: Any, job_config: Any) -> None:
    """Refuses a tokenizer with more tokens than the model has rows in its embedding."""
    tokens = tokenizer.get_vocab_size()
    if tokens > model_args.vocab_size:
        raise CorpusError(
            f"the tokenizer in model.hf_assets_path = {job_config.model.hf_assets_path!r} has {tokens} tokens, the "
            "model "
            f"{job_config.model.name} {job_config.model.flavor} only {model_args.vocab_size}; take a larger flavor or "
            "a "
            "smaller tokenizer"
        )


def _corpus(job_config: Any, section: str) -> Corpus:
    """The text of ``[training]`` or ``[validation]``; a relative path starts at the working directory or the recipe."""
    settings = getattr(job_config, section)
    recipe = job_config.job.config_file
    base = Path(recipe).resolve().parent if recipe else None
    return open_corpus(settings.dataset, settings.dataset_path, job_config.neuron.text_field, base, section)


class OwnTextValidator(Validator):
    """TorchTitan's validation loop on a text of ours: the same samples, in order from its start, at every validation
    and in every layout.

    ``validation.steps`` x ``validation.local_batch_size`` x data-parallel ranks samples are taken; for the same loss in
    layouts of different size, keep this product.
    """

    def __init__(self, job_config: Any, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, **parts: Any):
        # Not Validator's own: it opens one of TorchTitan's data sets. What it keeps beside has its arguments' names.
        BaseValidator.__init__(self, job_config)
        for name, part in {"tokenizer": tokenizer, **parts}.items():
            setattr(self, name, part)
        validation = job_config.validation
        if validation.steps < 1:
            raise ValueError(f"validation.steps = {validation.steps}: this text has no end; expected a number of steps")
        self.validation_dataloader = GlobalOrderDataLoader(
            _corpus(job_config, "validation"),
            tokenizer,
            validation.seq_len,
            validation.local_batch_size,
            dp_rank,
            dp_world_size,
        )

    def validate(self, *args: Any, **kwargs: Any) -> None:
        self.validation_dataloader.samples_dealt = 0
        super().validate(*args, **kwargs)


def with_own_data(spec: TrainSpec) -> TrainSpec:
    """``spec`` with the data loader, the validation text and the metrics of this package, and exact sums on demand."""
    exact = ExactSums()

    def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: Any) -> BaseDataLoader:
        training = job_config.training
        exact.configure(job_config, dp_world_size)
        if hasattr(torch, "neuron"):
            torch.neuron.set_float64_norm(job_config.neuron.norm_accumulation == "float64")
        elif job_config.neuron.norm_accumulation == "float64":  # TorchTitan on another device, by the same recipe
            raise ValueError('neuron.norm_accumulation = "float64": only the device neuron sums so; write "float32"')
        check_vocabulary(tokenizer, spec.model_args[job_config.model.flavor], job_config)
        if training.dataset not in CORPORA:
            return spec.build_dataloader_fn(
                dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config
            )
        return GlobalOrderDataLoader(
            _corpus(job_config, "training"),
            tokenizer,
            training.seq_len,
            training.local_batch_size,
            dp_rank,
            dp_world_size,
            shuffle_block=job_config.neuron.shuffle_block,
        )

    def build_validator(job_config: Any, **parts: Any) -> BaseValidator:
        if job_config.validation.dataset not in CORPORA:
            assert spec.build_validator_fn is not None
            return spec.build_validator_fn(job_config=job_config, **parts)
        return OwnTextValidator(job_config, **parts)

    return dataclasses.replace(
        spec,
        build_dataloader_fn=build_dataloader,
        build_loss_fn=exact.wrap_loss(spec.build_loss_fn),
        build_optimizers_fn=exact.wrap_optimizers(spec.build_optimizers_fn),
        build_validator_fn=spec.build_validator_fn and build_validator,
        build_metrics_processor_fn=spec.build_metrics_processor_fn or build_rank_metrics_processor,
    )


def register() -> None:
    for name in LANGUAGE_MODELS:
        spec = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
        if spec.build_dataloader_fn is build_text_dataloader:
            register_train_spec(name, with_own_data(spec))


register()
