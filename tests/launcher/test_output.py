"""What the terminal and the log files get of a rank's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from trn_dist.launcher import output
from trn_dist.launcher.output import STDERR, STDOUT, RankOutput, name_ranks


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(output, "write_terminal", lambda fd, data: written.append((fd, data)))
    return written


def test_prefixes_whole_lines_only(terminal: list[tuple[int, bytes]]) -> None:
    rank = RankOutput(3, shown=True, prefixed=True, log_path=None)
    rank.feed(STDOUT, b"one\ntwo\nthr")
    rank.feed(STDERR, b"warning\n")
    rank.feed(STDOUT, b"ee\nlast")
    rank.finish()
    assert terminal == [
        (STDOUT, b"[rank3] one\n[rank3] two\n"),
        (STDERR, b"[rank3] warning\n"),
        (STDOUT, b"[rank3] three\n"),
        (STDOUT, b"[rank3] last\n"),
    ]


def test_progress_bars_are_shown_as_they_move(terminal: list[tuple[int, bytes]]) -> None:
    rank = RankOutput(0, shown=True, prefixed=True, log_path=None)
    rank.feed(STDERR, b"10%\r20%\r3")
    assert terminal == [(STDERR, b"[rank0] 10%\r[rank0] 20%\r")]


def test_a_line_without_end_is_not_kept_for_ever(terminal: list[tuple[int, bytes]]) -> None:
    rank = RankOutput(0, shown=True, prefixed=True, log_path=None)
    for _ in range(3):
        rank.feed(STDOUT, b"x" * 30_000)
    assert terminal == [(STDOUT, b"[rank0] " + b"x" * 90_000)]


def test_a_single_shown_rank_passes_through_at_once(terminal: list[tuple[int, bytes]]) -> None:
    rank = RankOutput(0, shown=True, prefixed=False, log_path=None)
    rank.feed(STDOUT, b"(Pdb) ")
    assert terminal == [(STDOUT, b"(Pdb) ")]


def test_a_hidden_rank_keeps_its_last_error_lines_and_the_whole_log(
    terminal: list[tuple[int, bytes]], tmp_path: Path
) -> None:
    rank = RankOutput(1, shown=False, prefixed=True, log_path=tmp_path / "rank1.log")
    rank.feed(STDOUT, b"quiet\n")
    rank.feed(STDERR, b"".join(b"line %d\n" % i for i in range(100)))
    rank.finish()
    assert terminal == []
    assert list(rank.tail) == [b"line %d\n" % i for i in range(60, 100)]
    assert (tmp_path / "rank1.log").read_bytes() == b"quiet\n" + b"".join(b"line %d\n" % i for i in range(100))


def test_a_full_disk_ends_the_log_and_not_the_run(terminal: list[tuple[int, bytes]]) -> None:
    if not Path("/dev/full").exists():
        pytest.fail("/dev/full is missing on this Linux")
    rank = RankOutput(0, shown=True, prefixed=True, log_path=Path("/dev/full"))
    rank.feed(STDOUT, b"one\n")
    rank.feed(STDOUT, b"two\n")
    assert terminal == [
        (STDERR, b"trn: /dev/full: No space left on device; this log ends here, the run goes on\n"),
        (STDOUT, b"[rank0] one\n"),
        (STDOUT, b"[rank0] two\n"),
    ]
    assert rank.log_is_cut


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 4, 6, 7], "ranks 0-2, 4, 6-7"), ([5, 4], "ranks 4-5")]
)
def test_names_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
