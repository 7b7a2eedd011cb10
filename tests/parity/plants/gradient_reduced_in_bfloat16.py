"""FSDP2 reduces gradients in bfloat16 though the recipe says float32."""

import torch
import torchtitan.models.llama3.infra.parallelize as parallelize
from torch.distributed.fsdp import MixedPrecisionPolicy


def policy(param_dtype, reduce_dtype):
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.bfloat16)


parallelize.MixedPrecisionPolicy = policy
