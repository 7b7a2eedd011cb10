"""``trn bench``: nccom-test's flags, columns and factors, and a check that can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launcher.runs import trn
from trn_dist.cli import trn as command
from trn_dist.cli.bench import COST_OPERATIONS, bus_factor


def refuse(*arguments: object) -> str:
    result = CliRunner().invoke(command, ["bench", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def test_rows_and_the_summary(tmp_path: Path) -> None:
    options = ["-b", 8, "-e", "8K", "-f", 32, "-d", "bf16", "-n", 3, "-w", 1, "--check", "--stats", "avg p50 p99"]
    options += ["--show-algorithm", "--show-input-output-size", "--report-to-json-file", "report.json"]
    result = trn("bench", "allr", "-r", 4, *options, cwd=tmp_path)
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "# allr of 4 ranks on 1 node(s) of trn2.48xlarge, 3 iterations after 1"
    columns = "size(B) count(elems) type time:avg(us) algbw(GB/s) busbw(GB/s) host:avg(us) host:p50(us) host:p99(us)"
    assert lines[2].split() == [*columns.split(), "input(B)", "output(B)", "errors", "algorithm"]
    assert [line.split()[:3] for line in lines[3:6]] == [
        ["8", "4", "bf16"],
        ["256", "128", "bf16"],
        ["8192", "4096", "bf16"],
    ]
    assert lines[6].startswith("Avg bus bandwidth:\t") and lines[6].endswith("GB/s")
    rows = json.loads((tmp_path / "report.json").read_text())["results"]
    for row in rows:
        assert row["algbw(GB/s)"] == pytest.approx(row["size(B)"] / row["time:avg(us)"] / 1e3, rel=0.05, abs=1e-4)
        assert row["busbw(GB/s)"] == pytest.approx(row["algbw(GB/s)"] * 1.5, rel=0.05, abs=2e-4)
        assert row["errors"] == 0 and row["algorithm"]
    again = trn("bench", "allr", "-r", 4, *options[:-2], "--json", cwd=tmp_path)
    repeated = json.loads(again.stdout)["results"]
    assert [row["time:avg(us)"] for row in repeated] == [row["time:avg(us)"] for row in rows], (
        "virtual time is the same"
    )


@pytest.mark.slow
@pytest.mark.parametrize("operation", COST_OPERATIONS)
def test_every_operation_is_checked_in_groups(operation: str, tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_text('{"replica_groups": [[0, 1, 2, 3], [4, 5, 6, 7]]}')
    options = ["-r", 8, "-b", "1K", "-e", "64K", "-f", 64, "-n", 2, "-c", "--custom-replica-groups", "groups.json"]
    for dtype in ("uint8", "fp32"):
        result = trn("bench", operation, *options, "-d", dtype, "--json", cwd=tmp_path)
        assert result.code == 0, result.stderr
        assert [row["errors"] for row in json.loads(result.stdout)["results"]] == [0, 0]


def test_a_wrong_result_fails_the_test(tmp_path: Path) -> None:
    """The fault is put into the ranks by a program that wraps them."""
    (tmp_path / "wrong.py").write_text(
        "import runpy, sys, torch.distributed as dist\n"
        "right = dist.all_reduce\n"
        "def wrong(x, *arguments, **options):\n"
        "    right(x, *arguments, **options)\n"
        "    if x.dtype.itemsize == 1:\n"
        "        x[0] += 1\n"
        "dist.all_reduce = wrong\n"
        "sys.argv = ['bench', open('settings.json').read()]\n"
        "runpy.run_module('trn_dist.cli.bench_rank', run_name='__main__')\n"
    )
    from trn_dist.cli.bench import Settings

    settings = Settings(
        operation="allr",
        sizes=[64],
        dtype="int8",
        iterations=1,
        warmup=0,
        check="all_ones",
        seed=0,
        cluster="trn2.48xlarge",
        ranks=2,
        nodes=1,
        statistics=[],
        show_algorithm=False,
        show_sizes=False,
        replica_groups=[],
        pairs=[],
        report="",
        as_json=False,
    )
    (tmp_path / "settings.json").write_text(json.dumps(vars(settings)))
    result = trn("run", "-n", 2, "--local-ranks-filter", 0, "wrong.py", cwd=tmp_path)
    assert result.code == 1
    assert result.stdout.splitlines()[-1] == "2 errors found - test failed"


def test_factors_are_those_of_nccom_test() -> None:
    assert bus_factor("allr", 64) == 2 * 63 / 64
    for operation in ("allg", "allgv", "redsct", "alltoall", "alltoallv"):
        assert bus_factor(operation, 64) == 63 / 64
    assert bus_factor("sendrecv", 64) == bus_factor("permute", 64) == 1


def test_mistakes(tmp_path: Path) -> None:
    assert "'allreduce' is not one of 'allr'" in refuse("allreduce", "-r", 2)
    assert "'1x' is not a size such as 8, 64K or 32M" in refuse("allr", "-b", "1x")
    assert "'0' is not a size" in refuse("allr", "-b", "0")
    assert "8 bytes are less than --minbytes, 1024" in refuse("allr", "-r", 2, "-b", "1K", "-e", 8)
    assert "3 ranks are odd" in refuse("sendrecv", "-r", 3)
    assert "'p101' is none of avg" in refuse("allr", "--stats", "p101")
    assert "'zeros' is neither random nor all_ones" in refuse("allr", "--check", "zeros")
    assert "64 ranks with two buffers of 1099511627776 bytes" in refuse("allr", "-r", 64, "-b", "1024G")
    assert "no file of clusters is named 'trn9'" in refuse("allr", "--cluster", "trn9")
    groups = tmp_path / "groups.json"
    for text, words in [
        ("[[0, 1], [1, 2]]", "each of the ranks 0 to 3 once"),
        ("[[0], [1, 2, 3]]", "of one size"),
        ("7", "a list of lists of ranks"),
        ("{", "groups.json: Expecting"),
    ]:
        groups.write_text(text)
        assert words in refuse("allr", "-r", 4, "--custom-replica-groups", groups)
    assert "No such file" in refuse("allr", "-r", 4, "--custom-replica-groups", tmp_path / "none.json")
    groups.write_text("[[0, 4]]")
    assert "[0, 4] is no pair of two ranks below 4" in refuse("permute", "-r", 4, "--custom-src-target-pairs", groups)
    assert "not to allr" in refuse("allr", "-r", 4, "--custom-src-target-pairs", groups)
