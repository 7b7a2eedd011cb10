"""Reports of made-up run folders: tables, picture, page, JSON, and what is said of damaged folders."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from trn_dist.cli import trn
from trn_dist.report.runs import RunFolderError, as_html, differences, draw, newest_run, print_runs, read_run
from trn_dist.titan.metrics import LAST_STEP_TABLE, METRICS_FILE, Prediction, Step
from trn_dist.titan.train import FACTS_FILE

FACTS: dict[str, Any] = {
    "recipe": "a <b> recipe.toml",
    "model": "llama3 debugmodel",
    "layout": "FSDP2 4 x TP 2",
    "ranks": 8,
    "global_batch_size": 8,
    "tokens_per_step": 2048,
    "text": {"dataset": "python_stdlib", "files": 3, "fingerprint": "abc"},
    "tokenizer_sha256": None,
    "versions": {"torch": "2.13.0"},
    "started": "2026-11-30T07:13:48+00:00",
    "exit_code": 0,
    "duration_s": 101.0,
}


def step(number: int, **changes: Any) -> Step:
    parts_s = {"compute.tensor": 0.003, "launch": 0.001, "idle": 0.0}
    predicted = Prediction("trn2.48xlarge", 0.004, 125238.0, 0.76, 0.8, parts_s, 0, "")
    values = Step(number, 9.0 - number / 100, 0.5, 1e-3, 0.5, 4096.0, number << 20, 1 << 20, 1, predicted)
    return dataclasses.replace(values, **changes)


def make_run(folder: Path, steps: list[Step] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    facts = {**FACTS, **changes}
    (folder / FACTS_FILE).write_text(json.dumps({name: value for name, value in facts.items() if value != "absent"}))
    if steps is None:
        steps = [step(number) for number in range(1, 61)]
    if steps:
        (folder / METRICS_FILE).write_text("".join(s.as_json() + "\n" for s in steps))
    return folder


def shown(*folders: Path, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    print_runs([read_run(folder) for folder in folders], console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_one_run_is_shown_by_its_steps_and_its_last_one(tmp_path: Path):
    text = shown(make_run(tmp_path / "run", faults=["rank=3,step=5,kill"]))
    assert "done in 1 min 41 s" in text and "FSDP2 4 x TP 2, 8 ranks" in text and "trn2.48xlarge (simulated)" in text
    assert re.search(r"fault +rank=3,step=5,kill", text)
    steps = [int(row) for row in re.findall(r"^ +(\d+) +[89]\.\d{5} ", text, re.MULTILINE)]
    assert len(steps) == 12 and steps[0] == 1 and steps[-1] == 60
    assert re.search(r"60 +8\.40000 +0\.5000 +4,096 +60\.0 MiB +4 ms +125,238 +0\.76", text)
    assert re.search(r"compute\.tensor +3 ms +75\.0 %\s+launch +1 ms +25\.0 %", text) and "idle" not in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_tables_fit_the_terminal_and_lose_no_figure(tmp_path: Path, width: int):
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    for text in (shown(folders[0], width=width), shown(*folders, width=width)):
        assert max(map(len, text.splitlines())) <= width
        for figure in ("8.40000", "0.5000", "60.0 MiB", "125,238", "0.76"):
            assert figure in text


def test_several_runs_stand_side_by_side_with_what_sets_them_apart(tmp_path: Path):
    text = {"dataset": "own", "files": 1, "fingerprint": "x"}
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", ranks=4, exit_code=137, text=text, steps=[])]
    said = shown(*runs, width=200)
    assert re.search(r"a +FSDP2 4 x TP 2 +8 +60 +8\.40000 .* done in 1 min 41 s", said)
    assert re.search(r"b +FSDP2 4 x TP 2 +4 +0 +- .* ended early after 1 min 41 s, exit code 137", said)
    assert "different texts" in said
    assert differences([read_run(runs[0])] * 2) == []


def test_a_run_without_an_end_and_half_a_line(tmp_path: Path):
    folder = make_run(tmp_path / "run", [step(1), step(2)], exit_code="absent", duration_s="absent")
    with (folder / METRICS_FILE).open("a") as file:
        file.write(step(3).as_json()[:50])
    assert [s.step for s in read_run(folder).steps] == [1, 2]
    assert "still going on, or its launcher was killed" in shown(folder)


def test_a_run_without_steps_and_one_without_numbers(tmp_path: Path):
    empty = make_run(tmp_path / "empty", [], exit_code=1)
    assert "exit code 1: no step was completed" in shown(empty)
    assert str(empty / "logs") in shown(empty, width=400)
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([read_run(empty)])
    assert "<img" not in as_html([read_run(empty)])

    timed = make_run(tmp_path / "timed", [step(1, loss=math.nan, grad_norm=math.nan)])
    (timed / LAST_STEP_TABLE).write_text("aten::mm <4,370,230.0 us>\n")
    page = as_html([read_run(timed)])
    assert "nan" not in shown(timed).lower() and "aten::mm &lt;4,370,230.0 us&gt;" in page and "<img" in page


def test_the_page_stands_alone_escapes_and_holds_all_steps(tmp_path: Path):
    runs = [read_run(make_run(tmp_path / name)) for name in ("a", "b")]
    page = as_html(runs)
    assert "http" not in page and "a &lt;b&gt; recipe.toml" in page and "data:image/png;base64,iVBOR" in page
    assert page.count("8.40000") == 4  # of either run, in the table of both and in its own
    data = json.loads(page.partition('id="runs">')[2].partition("</script>")[0])
    assert [len(run["steps"]) for run in data] == [60, 60]


def test_the_picture_shows_what_there_is(tmp_path: Path):
    both = draw([read_run(make_run(tmp_path / "both"))])
    assert both.startswith(b"\x89PNG")
    untimed = draw([read_run(make_run(tmp_path / "untimed", [step(n, predicted=None) for n in (1, 2)]))])
    unlearned = draw([read_run(make_run(tmp_path / "unlearned", [step(1, loss=math.nan)]))])

    def height(png: bytes) -> int:
        return int.from_bytes(png[20:24], "big")

    assert height(both) == height(untimed) + height(unlearned)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (FACTS_FILE, None, "no run folder of `trn train` (there is no run.json)"),
        (FACTS_FILE, "{", "run.json: not what `trn train` writes"),
        (FACTS_FILE, "[]", "run.json: not what `trn train` writes"),
        (FACTS_FILE, '{"recipe": "a"}', "run.json: not what `trn train` writes: 'model' is missing"),
        (METRICS_FILE, "{}\n", "metrics.jsonl, line 1: not what `trn train` writes"),
        (METRICS_FILE, step(1).as_json() + "\n[]\n", "metrics.jsonl, line 2: not what `trn train` writes"),
        (METRICS_FILE, '{"predicted": {"speed": 1}}\n', "metrics.jsonl, line 1: not what `trn train` writes"),
    ],
)
def test_damaged_folders_are_named(tmp_path: Path, file: str, content: str | None, words: str):
    folder = make_run(tmp_path / "run", [step(1)])
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(RunFolderError, match=re.escape(words)):
        read_run(folder)
    result = CliRunner().invoke(trn, ["report", str(folder)])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and words in result.stderr


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(trn, ["report", *arguments])

    assert call().exit_code == 1 and "no run folder in runs" in call().stderr
    make_run(tmp_path / "runs" / "new", [step(1, loss=math.inf)], started="2026-12-01T00:00:00+00:00")
    make_run(tmp_path / "runs" / "old")
    assert newest_run(Path("runs")).name == "new"
    assert call().exit_code == 0 and call().stdout.startswith("new\n")
    (run,) = json.loads(call("--json").stdout, parse_constant=pytest.fail)
    assert run["run_folder"] == "runs/new" and run["steps"][0]["loss"] is None
    assert (
        call("--html", "page.html").stdout.endswith("page.html\n") and "<h1>new</h1>" in Path("page.html").read_text()
    )
    assert call("nowhere").exit_code == 2 and "'nowhere' does not exist" in call("nowhere").stderr
    assert call("--html", "no/page.html").exit_code == 1
    assert call("--html", "no/page.html").stderr == "Error: no/page.html: No such file or directory\n"
