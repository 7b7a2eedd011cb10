"""Bugs planted in TorchTitan's trainer, one a file: what users have got wrong, or could, for the parity tool to find.

A layout names one by ``--experimental.custom_import tests.parity.plants.NAME``; importing it in a rank plants it.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torchtitan.protocols.train_spec as train_spec


def wrap_spec(**wrappers: Callable[[Any], Any]) -> None:
    """Replaces fields of the train spec: each wrapper gets the field's function and returns another."""
    upstream = train_spec.get_train_spec

    def get_train_spec(name: str) -> Any:
        spec = upstream(name)
        return dataclasses.replace(spec, **{f: wrap(getattr(spec, f)) for f, wrap in wrappers.items()})

    train_spec.get_train_spec = get_train_spec


def with_model(plant: Callable[[list[Any], Any, Any], None]) -> None:
    """Calls ``plant(model_parts, optimizers, parallel_dims)`` when the model has been parallelised."""

    def wrap(build_optimizers: Any) -> Any:
        def build(model_parts: Any, config: Any, parallel_dims: Any, *args: Any, **kwargs: Any) -> Any:
            optimizers = build_optimizers(model_parts, config, parallel_dims, *args, **kwargs)
            plant(model_parts, optimizers, parallel_dims)
            return optimizers

        return build

    wrap_spec(build_optimizers_fn=wrap)


def trainer() -> Any:
    """The class of the running trainer: ``python -m torchtitan.train`` holds it in the main module."""
    main = sys.modules["__main__"]
    return main.Trainer if hasattr(main, "Trainer") else importlib.import_module("torchtitan.train").Trainer
