"""Order of tokens for grouped expert matmuls, on any device; stands in for ``torchtitan.models.moe.kernels``.

TorchTitan computes this order with a Triton kernel, which needs a GPU. The functions here have the same names,
arguments and results, in plain tensor operators. :mod:`trn_dist.titan.upstream_patches` puts this file in that
module's place; it is called by TorchTitan's ``models/moe/utils.py``.
"""

import torch

__all__ = ["fill_indices_wrapper", "generate_permute_indices"]


def fill_indices_wrapper(
    tokens_per_expert_group: torch.Tensor,
    start_index_values: torch.Tensor,
    write_offsets: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    block_size: int = 128,
    max_blocks: int = 1024,
) -> torch.Tensor:
    """Source row of every output row, grouped by expert and, within an expert, by the rank the tokens came from.

    Args:
        tokens_per_expert_group: integers, shape (num_ranks * experts_per_rank,), rank-major: number of tokens that a
            rank sent for an expert.
        start_index_values: same shape; row at which that group starts in the input.
        write_offsets: integers, shape (experts_per_rank,): output row at which an expert's group starts.
        max_len: number of output rows.
        block_size, max_blocks: launch parameters of the Triton kernel; of no effect here.

    Returns:
        int32, shape (max_len,); -1 marks a row that holds no token (padding).
    """
    # Expert-major, so that the groups follow each other in the order in which they are written.
    lengths = tokens_per_expert_group.view(num_ranks, experts_per_rank).t()
    sources = start_index_values.view(num_ranks, experts_per_rank).t().reshape(-1)
    first = (write_offsets.view(-1, 1) + lengths.cumsum(1) - lengths).reshape(-1)
    rows = torch.arange(max_len, device=first.device, dtype=first.dtype)
    # The last group that starts at or before a row; an empty group starts where its successor does and is passed over.
    group = (torch.searchsorted(first, rows, right=True) - 1).clamp_min(0)
    within = rows - first[group]
    holds_token = (within >= 0) & (within < lengths.reshape(-1)[group])
    return torch.where(holds_token, sources[group] + within, -1).to(torch.int32)


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order above, with each expert's group padded to a multiple of ``alignment`` rows (at least one multiple).

    Args:
        tokens_per_expert_group: integers, shape (num_ranks * experts_per_rank,), rank-major.
        max_len: number of output rows, an upper bound of the padded total.
        use_cpu: of no effect: there is one implementation.

    Returns:
        The source row of every output row (int32, shape (max_len,), -1 for padding), the padded number of rows of each
        expert (int32, shape (experts_per_rank,)) and where each expert's rows end (int32, same shape).
    """
    start_index_values = tokens_per_expert_group.cumsum(0) - tokens_per_expert_group
    per_expert = tokens_per_expert_group.view(num_ranks, experts_per_rank).sum(0).clamp_min(1)
    padded = (per_expert + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    indices = fill_indices_wrapper(
        tokens_per_expert_group, start_index_values, ends - padded, experts_per_rank, num_ranks, max_len
    )
    return indices, padded.to(torch.int32), ends.to(torch.int32)
