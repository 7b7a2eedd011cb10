"""Under context parallel the rotary table is not cut: each rank takes the positions from 0 on."""

import torchtitan.distributed.utils as dist_utils

upstream = dist_utils.create_context_parallel_ctx


def create_context_parallel_ctx(cp_mesh, cp_buffers, cp_seq_dims, **kwargs):
    return upstream(cp_mesh=cp_mesh, cp_buffers=cp_buffers[:2], cp_seq_dims=cp_seq_dims[:2], **kwargs)


dist_utils.create_context_parallel_ctx = create_context_parallel_ctx
