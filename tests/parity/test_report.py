"""The report of a made-up comparison: table, picture, page, JSON."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trn_dist.parity.cause import Cause, Explanation
from trn_dist.parity.comparison import Comparison, Mode
from trn_dist.parity.divergence import Divergence, Finding, divergence_as_json
from trn_dist.parity.layout import parse_layouts
from trn_dist.parity.report import as_html, as_json, draw, print_table, write_report
from trn_dist.parity.rounding import Bound, Sums
from trn_dist.parity.verdict import Curves, Excess, Kind, Verdict


@pytest.fixture
def comparison() -> Comparison:
    curve = [8.0, 7.0, 6.0]
    wrong = [8.0, 7.0, math.nan]
    bound = Bound(np.full(3, 1e-6), np.full(3, 1e-6), 8.6)
    curves: dict[str, Curves] = {
        name: {"loss": c, "grad_norm": curve} for name, c in (("1", curve), ("tp=2", curve), ("cp=2", wrong))
    }
    modes = tuple(Mode(limit, curves, {"loss": bound, "grad_norm": bound}) for limit in (math.inf, 0.25))
    worst = Excess("loss", 3, math.nan, 1e-5)
    verdicts = tuple(
        verdict
        for clipped in (False, True)
        for verdict in (
            Verdict("tp=2", clipped, Kind.WITHIN_ROUNDING, "in another order", "1", Excess("loss", 1, 0.0, 1e-5)),
            Verdict("cp=2", clipped, Kind.DIFFERENT, "loss of step 3 </script> [red]", "1", worst, 3),
            Verdict("pp=2", clipped, Kind.FAILED, "exit code 1", "1"),
        )
    )
    layouts = tuple(parse_layouts("1; tp=2; cp=2; pp=2"))
    commands = {"1": ["trn", "train", "a recipe.toml"]}
    return Comparison(Path("r.toml"), layouts, 3, 8, modes, verdicts, commands, Sums(512, 1000))


def test_the_table_has_a_row_for_each_and_reasons_for_what_fails(comparison: Comparison):
    console = Console(width=100, record=True)
    print_table(comparison, console)
    text = console.export_text()
    assert "2 of 6 pass; reference 1, 3 steps of 8 samples, float32" in text
    assert "cp=2 (unclipped) different: loss of step 3 </script> [red]" in text
    assert "pp=2 (clipped) failed: exit code 1" in text
    assert "in another order" not in text


def test_json_is_strict_and_whole(comparison: Comparison):
    text = json.dumps(as_json(comparison), allow_nan=False)
    data = json.loads(text)
    assert not data["passes"] and len(data["verdicts"]) == 6
    assert data["modes"][0]["max_norm"] == "inf" and data["modes"][1]["max_norm"] == 0.25
    assert data["modes"][0]["curves"]["cp=2"]["loss"] == [8.0, 7.0, "nan"]
    assert data["verdicts"][1]["worst"] == {
        "quantity": "loss", "step": 3, "deviation": "nan", "bound": 1e-5, "ratio": "inf"
    }  # fmt: skip


def test_the_page_stands_alone_and_escapes_what_it_shows(comparison: Comparison):
    page = as_html(comparison, draw(comparison))
    assert page.count("</script>") == 1
    assert "&lt;/script&gt;" in page and "'a recipe.toml'" in page.replace("&#39;", "'")
    data = page.partition('id="comparison">')[2].partition("</script>")[0]
    assert json.loads(data) == as_json(comparison)
    assert "http" not in page


def test_three_files_are_written(comparison: Comparison, tmp_path: Path):
    files = write_report(comparison, tmp_path / "out")
    assert [file.name for file in files] == ["parity.json", "parity.png", "parity.html"]
    assert all(file.stat().st_size > 500 for file in files)


def test_a_divergence_as_json():
    explanation = Explanation(Cause.SCALE, "twice as large")
    finding = Finding(("gradient", "layers.0.weight", ""), 2.0, math.inf, 0.5, explanation)
    divergence = Divergence("1", "tp=2", 3, finding, (finding.key, 0.25), 40, ("a buffer",))
    found = json.loads(json.dumps(divergence_as_json(divergence), allow_nan=False))
    assert found["equal"] is False and found["step"] == 3 and found["skipped"] == ["a buffer"]
    assert found["finding"]["cause"] == Cause.SCALE.value and found["finding"]["size"] == "inf"
    assert divergence_as_json(dataclasses.replace(divergence, finding=None, first_bit=None))["equal"] is True
