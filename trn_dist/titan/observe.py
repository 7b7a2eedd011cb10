"""Lets other parts of the package look into TorchTitan's trainer: calls an observer with the built model.

Named as ``experimental.custom_import``, this module is imported by the trainer before it takes its train spec. It wraps
two things of TorchTitan: the building of the optimizers, which comes right after the model was parallelised, and the
clipping of gradients. The environment says which observer: ``TRN_OBSERVER`` is ``module:function``, and
``TRN_OBSERVED_IMPORT`` the module that the recipe itself names as its custom import; ``TRN_OBSERVER_FOLDER`` is where
an observer may write. The function is called in every rank as ``observer(model_parts, optimizers, parallel_dims)`` and
returns an object with the methods ``before_clipping(parameters)`` and ``after_clipping(parameters, norm)``, or None.
"""

import dataclasses
import importlib
import os
from typing import Any

import torchtitan.distributed.utils as dist_utils
import torchtitan.protocols.train_spec as train_spec


def _install(observer_name: str) -> None:
    module, _, function = observer_name.partition(":")
    observe = getattr(importlib.import_module(module), function)
    observers: list[Any] = []
    upstream_spec = train_spec.get_train_spec
    upstream_clip = dist_utils.clip_grad_norm_

    def get_train_spec(name: str) -> Any:
        spec = upstream_spec(name)

        def build_optimizers(model_parts: Any, config: Any, parallel_dims: Any, *args: Any, **kwargs: Any) -> Any:
            optimizers = spec.build_optimizers_fn(model_parts, config, parallel_dims, *args, **kwargs)
            observer = observe(model_parts, optimizers, parallel_dims)
            if observer is not None:
                observers.append(observer)
            return optimizers

        return dataclasses.replace(spec, build_optimizers_fn=build_optimizers)

    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = list(parameters)
        for observer in observers:
            observer.before_clipping(parameters)
        norm = upstream_clip(parameters, *args, **kwargs)
        for observer in observers:
            observer.after_clipping(parameters, norm)
        return norm

    train_spec.get_train_spec = get_train_spec
    dist_utils.clip_grad_norm_ = clip_grad_norm_


if os.environ.get("TRN_OBSERVED_IMPORT"):
    importlib.import_module(os.environ["TRN_OBSERVED_IMPORT"])
if os.environ.get("TRN_OBSERVER"):
    _install(os.environ["TRN_OBSERVER"])
