"""A model of one's own for TorchTitan, registered under the name ``plain_gpt`` when this package is imported."""

from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import build_validator
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from plain_gpt.model import PlainGPT, PlainGPTArgs
from plain_gpt.parallelize import parallelize, pipeline
from trn_dist.titan.train_spec import with_own_data

SPEC = TrainSpec(
    model_cls=PlainGPT,
    model_args={"tiny": PlainGPTArgs(), "small": PlainGPTArgs(dim=512, n_layers=8)},
    parallelize_fn=parallelize,
    pipelining_fn=pipeline,
    build_optimizers_fn=build_optimizers,
    build_lr_schedulers_fn=build_lr_schedulers,
    build_dataloader_fn=build_text_dataloader,
    build_tokenizer_fn=build_hf_tokenizer,
    build_loss_fn=build_cross_entropy_loss,
    build_validator_fn=build_validator,
)

register_train_spec("plain_gpt", with_own_data(SPEC))
