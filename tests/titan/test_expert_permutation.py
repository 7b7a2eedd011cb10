"""The order of tokens for grouped experts against its definition, row by row."""

import random

import pytest
import torch

from trn_dist.titan.expert_permutation import generate_permute_indices


def by_definition(tokens: list[int], experts: int, ranks: int, max_len: int, alignment: int):
    """Lists each expert's rows rank by rank and pads them, with plain loops."""
    starts = [sum(tokens[:group]) for group in range(len(tokens))]
    rows: list[int] = []
    padded = []
    for expert in range(experts):
        mine: list[int] = []
        for rank in range(ranks):
            group = rank * experts + expert
            mine += range(starts[group], starts[group] + tokens[group])
        length = max(-(-len(mine) // alignment), 1) * alignment
        rows += mine + [-1] * (length - len(mine))
        padded.append(length)
    ends = [sum(padded[: expert + 1]) for expert in range(experts)]
    return rows + [-1] * (max_len - len(rows)), padded, ends


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition(seed: int):
    draw = random.Random(seed)
    experts, ranks, alignment = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4]), draw.choice([1, 8, 16])
    tokens = [draw.choice([0, 0, 1, 3, 8, 17]) for _ in range(experts * ranks)]
    max_len = sum(tokens) + experts * alignment + draw.choice([0, alignment])
    expected = by_definition(tokens, experts, ranks, max_len, alignment)
    results = generate_permute_indices(torch.tensor(tokens), experts, ranks, max_len, alignment)
    for result, values in zip(results, expected, strict=True):
        assert result.dtype == torch.int32
        assert result.tolist() == values


def test_groups_rows_by_expert_and_then_by_rank():
    # Two ranks, four experts: rank 0 sent 4, 2, 1, 3 tokens, rank 1 sent 1, 2, 3, 4.
    tokens = torch.tensor([4, 2, 1, 3, 1, 2, 3, 4])
    rows, sizes, ends = generate_permute_indices(tokens, 4, 2, 32, 8)
    assert sizes.tolist() == [8, 8, 8, 8]
    assert ends.tolist() == [8, 16, 24, 32]
    assert rows[:8].tolist() == [0, 1, 2, 3, 10, -1, -1, -1]
    assert rows[8:16].tolist() == [4, 5, 11, 12, -1, -1, -1, -1]
