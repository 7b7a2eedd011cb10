"""The table of pieces: cheapest line, never falling, and the arithmetic that C++ repeats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.collectives.cost_table import Line, build_table

lines = st.builds(Line, st.just("x"), st.floats(0, 1e4), st.floats(0, 1e4))
segments = st.lists(st.lists(lines, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda groups: [(4**i * 1000 * bool(i), group) for i, group in enumerate(groups)]
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(segments, st.lists(st.integers(0, 2**40), min_size=2, max_size=20))
def test_time_never_falls_and_is_never_below_the_cheapest_line(table_segments, sizes) -> None:
    table = build_table("all_reduce", 4, table_segments)
    times = [table.time_ps(size) for size in sorted(sizes)]
    assert times == sorted(times)
    for size in sizes:
        lines_here = [group for start, group in table_segments if start <= size][-1]
        cheapest = min(line.alpha_us * 1e6 + line.ps_per_byte * size for line in lines_here)
        assert table.time_ps(size) >= cheapest * (1 - 1e-9) - 2
    starts = [piece.from_bytes for piece in table.pieces]
    assert starts[0] == 0
    assert starts == sorted(set(starts))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 2**43))
def test_the_formula_for_64_bits_is_exact(alpha_us: float, ps_per_byte: float, nbytes: int) -> None:
    table = build_table("send", 2, [(0, [Line("x", alpha_us, ps_per_byte)])])
    ((start, alpha, beta),) = table.rows()
    high, low = (nbytes >> 20) * beta, (nbytes & 0xFFFFF) * beta
    assert start == 0
    assert table.time_ps(nbytes) == alpha + high + (low >> 20)


def test_one_line_is_itself_and_two_cross_where_they_are_equal() -> None:
    table = build_table("send", 2, [(0, [Line("slow", 1.0, 8.0), Line("fast", 5.0, 4.0)])])
    assert [(p.from_bytes, p.algorithm) for p in table.pieces] == [(0, "slow"), (1_000_000, "fast")]
    assert table.time_ps(999_999) == 1_000_000 + 8 * 999_999
    assert table.time_ps(1_000_000) == 9_000_000


def test_a_switch_that_would_make_more_bytes_cheaper_is_levelled() -> None:
    table = build_table("send", 2, [(0, [Line("mesh", 0.0, 10.0)]), (1000, [Line("ring", 0.0, 5.0)])])
    assert [(p.from_bytes, p.algorithm, p.beta_ps_per_mib >> 20) for p in table.pieces] == [
        (0, "mesh", 10),
        (1000, "ring", 0),
        (1998, "ring", 5),
    ]
    assert table.time_ps(1000) == table.time_ps(999) == 9990
    assert table.time_ps(1998) == 9990


def test_a_negative_size_is_refused() -> None:
    table = build_table("send", 2, [(0, [Line("x", 1.0, 1.0)])])
    with pytest.raises(ValueError, match=r"send of -1 bytes: the size must be at least 0"):
        table.time_ps(-1)
