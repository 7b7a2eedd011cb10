"""A full disk, a folder that cannot be written, no terminal: a sentence, an exit code, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from tests.launcher.runs import DEADLINE_S, Run, trn, write
from tests.report.test_runs import make_run
from trn_dist.cli import trn as command_line


def mount(folder: Path, *options: str) -> None:
    """Mounts a small tmpfs at ``folder``; skips the test where that is not permitted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(("size=1m", *options)), "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")


def fill(folder: Path) -> None:
    """Takes all room that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            for size in (1 << 16, 1):
                while True:
                    if file.write(b"x" * size) < size:
                        break
        except OSError:
            return


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "full"
    mount(folder)
    fill(folder)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read_only"
    mount(folder)
    write(folder / "hello.py", "print('hello')\n")
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def plain(*arguments: object, cwd: Path, stdout: IO[str] | int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The command line without the temporary folder that :class:`Run` makes."""
    return subprocess.run(
        [sys.executable, "-m", "trn_dist.cli", *map(str, arguments)],
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def hello(folder: Path) -> Path:
    return write(folder / "hello.py", "print('hello')\n")


def test_run_with_its_logs_on_a_full_disk(tmp_path: Path, full_disk: Path) -> None:
    result = trn("run", "-n", 2, "--log-dir", full_disk / "logs", hello(tmp_path), cwd=tmp_path)
    assert result.code == 1 and result.stdout.count("hello") == 2, (
        "the run goes on, and what is missing shows at its end"
    )
    assert "rank0.log: No space left on device; this log ends here, the run goes on" in result.stderr


def test_run_with_its_output_on_a_full_disk(tmp_path: Path, full_disk: Path) -> None:
    with (full_disk / "out").open("w") as out:
        done = plain("run", "-n", 2, hello(tmp_path), cwd=tmp_path, stdout=out)
    assert done.returncode == 1
    assert done.stderr == (
        "trn: stdout: No space left on device; what is printed from now on is lost, the run goes on\n"
    )


def test_run_with_its_temporary_folder_on_a_full_disk(tmp_path: Path, full_disk: Path) -> None:
    # TMPDIR lies there; as everything that uses Python's tempfile, the run then takes the system's folder.
    result = Run("run", "-n", 2, hello(tmp_path), cwd=full_disk).result()
    assert result.code == 0 and result.stdout.count("hello") == 2 and result.stderr == ""


def test_run_in_a_read_only_folder(tmp_path: Path, read_only: Path) -> None:
    done = plain("run", "-n", 2, "hello.py", cwd=read_only)
    assert done.returncode == 0, done.stderr
    done = plain("run", "-n", 2, "--log-dir", "logs", "hello.py", cwd=read_only)
    assert done.returncode == 1 and done.stderr == "Error: --log-dir logs: Read-only file system\n"


def test_train_on_a_full_disk(tmp_path: Path, full_disk: Path) -> None:
    result = trn("train", "llama3_debug", "--run-dir", full_disk / "run", cwd=tmp_path)
    assert result.code == 1 and result.stdout == ""
    assert result.stderr == f"trn train: run folder {full_disk / 'run'}: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--trace", "--record"])
def test_train_on_a_disk_that_becomes_full(tmp_path: Path, full_disk: Path, option: str) -> None:
    filler = full_disk / "filler"
    os.truncate(filler, filler.stat().st_size - (20 << 10))  # room for the recipe and for run.json
    result = trn(
        "train", "llama3_debug", "--training.steps", 3, "--neuron.ranks", 2, "--run-dir", full_disk / "run", option,
        cwd=tmp_path,
    )  # fmt: skip
    assert result.code == 1
    assert result.stderr.endswith(f"trn train: run folder {full_disk / 'run'}: No space left on device\n")
    assert "Traceback" not in result.stderr


def test_train_in_a_read_only_folder(read_only: Path) -> None:
    done = plain("train", "llama3_debug", cwd=read_only)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("trn train: --run-dir runs/llama3_debug-")
    assert done.stderr.endswith(": Read-only file system\n")


def test_report_of_a_run_that_cannot_be_written_to(tmp_path: Path, read_only: Path, full_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(read_only)], check=True)
    run = make_run(read_only / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(read_only)], check=True)
    done = plain("report", run, "--html", tmp_path / "page.html", cwd=read_only)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "page.html").exists()
    for folder, reason in ((read_only, "Read-only file system"), (full_disk, "No space left on device")):
        done = plain("report", run, "--html", folder / "page.html", cwd=read_only)
        assert done.returncode == 1 and done.stderr.endswith(f"{reason}\n") and done.stderr.count("\n") == 1
        with (full_disk / "out").open("w") as out:
            done = plain("report", run, cwd=tmp_path, stdout=out)
        assert done.returncode == 1 and "Traceback" not in done.stderr


def test_reports_are_refused_before_the_runs_that_they_would_be_of(tmp_path: Path, read_only: Path) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(command_line, arguments)
        assert result.exit_code in (1, 2) and result.stdout == "" and "Traceback" not in result.stderr
        return result.stderr

    assert "Read-only file system" in refused("parity", "llama3_debug", "--out", str(read_only / "out"))
    assert "cannot be written" in refused("parity", "llama3_debug", "--out", str(read_only))
    assert "cannot be written" in refused("bench", "allr", "-r", "2", "--report-to-json-file", f"{read_only}/a.json")
    assert "cannot be written" in refused("bench", "allr", "-r", "2", "--report-to-json-file", f"{tmp_path}/no/a.json")
    assert "Read-only file system" in refused("recipe", "new", str(read_only / "a.toml"))
    assert "No such file or directory" in refused("recipe", "new", str(tmp_path / "no" / "a.toml"))


@pytest.mark.parametrize(("redirections", "shown"), [("<&- 2>&-", 2), (">&-", 0)])
def test_run_without_standard_streams(tmp_path: Path, redirections: str, shown: int) -> None:
    hello(tmp_path)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "trn_dist.cli", "run", "-n2", "hello.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stdout.count("hello") == shown and done.stderr == ""


def test_forty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = CliRunner().invoke(command_line, ["doctor"])
    assert result.exit_code in (0, 1) and max(map(len, result.stdout.splitlines())) <= 40
    for command in ("run", "train", "report", "top", "monitor"):
        shown = CliRunner().invoke(command_line, [command, "--help"]).stdout
        assert shown.startswith(f"Usage: trn {command}")
