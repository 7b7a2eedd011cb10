"""Gradients are clipped by the norm of the rank's own shards."""

import torch
import torchtitan.distributed.utils as dist_utils
from torch.distributed.tensor import DTensor


def clip_grad_norm_(parameters, max_norm, *args, **kwargs):
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


dist_utils.clip_grad_norm_ = clip_grad_norm_
