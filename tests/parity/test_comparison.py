"""``trn parity`` from end to end: a short comparison on real ranks, its report, its exit codes, the fixture."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trn_dist.cli import trn

pytest_plugins = ["pytester"]

RECIPE = Path(__file__).parents[2] / "recipes" / "llama3_debug.toml"
SHORT = ["--training.seq_len", "64"]
TINY = ["--experimental.custom_import", "benchmarks.tiny_llama", "--model.flavor", "tiny", "--training.seq_len", "32"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(trn, ["parity", str(RECIPE), *arguments], env={"COLUMNS": "140"})


def test_three_layouts_agree_and_are_reported(cache: Path, tmp_path: Path):
    arguments = ["--layouts", "1; fsdp=2; cpu", "--steps", "3", "--clipping", "off", "--members", "2", *SHORT]
    found = call(*arguments, "--cache", str(cache), "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    assert "2 of 2 pass" in found.output
    data = json.loads((tmp_path / "parity.json").read_text())
    verdicts = {verdict["layout"]: verdict for verdict in data["verdicts"]}
    assert verdicts["fsdp=2"]["verdict"] == "within rounding" and verdicts["fsdp=2"]["worst"]["ratio"] <= 1
    assert verdicts["cpu"]["verdict"] == "bit-equal" and verdicts["cpu"]["against"] == "1"
    curves = data["modes"][0]["curves"]
    assert curves["cpu"] == curves["1"]
    assert curves["1"]["loss"] != curves["fsdp=2"]["loss"] or curves["1"]["grad_norm"] != curves["fsdp=2"]["grad_norm"]
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "parity.html").read_text()
    assert "data:image/png;base64," in page and not re.search(r"(src|href)=\"(?!data:)", page)

    again = call(*arguments, "--cache", str(cache), "--out", str(tmp_path))
    assert again.exit_code == 0
    assert again.output.count("from the cache") == 6  # the weights, three layouts, two perturbed runs


def test_a_wrong_layout_fails_and_its_factor_is_named(cache: Path, tmp_path: Path):
    bug = "fsdp=2 --experimental.custom_import tests.parity.plants.gradient_averaged_twice"
    arguments = ["--layouts", f"1; {bug}", "--steps", "3", "--clipping", "off", "--members", "2", *SHORT]
    found = call(*arguments, "--cache", str(cache), "--out", str(tmp_path))
    assert found.exit_code == 1, found.output
    (verdict,) = json.loads((tmp_path / "parity.json").read_text())["verdicts"]
    assert verdict["verdict"] == "different" and verdict["first_step"] == 1
    assert "0.5 times that of the reference, 1/2: the data-parallel group's size" in verdict["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layouts", "1; fspd=2"], "did you mean fsdp?"),
        (["--layouts", "1"], "only one layout, '1': name another"),
        (["--layouts", "1; fsdp=3"], "3 data-parallel ranks cannot share the recipe's global batch of 8 samples"),
        (["--layouts", "1; tp=2", "--training.seq_len", "63"], "training.seq_len"),
        (["--layouts", "1; tp=2", "--trainin.seq_len", "64"], "--trainin.seq_len"),
        (["--bisect", "1", "2"], "say how the 2 ranks are arranged"),
        (["--step", "3"], "--step belongs to --bisect"),
        (["--layouts", "1; tp=2", "--bisect", "1", "tp=2"], "leave out --layouts"),
    ],
)
def test_mistakes_end_with_2_before_anything_runs(arguments: list[str], words: str, tmp_path: Path):
    found = call(*arguments, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path))
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert not list(tmp_path.glob("parity.*"))


def judged(cache: Path, out: Path, layouts: str, *arguments: str) -> dict[tuple[str, bool], tuple[str, str]]:
    """Kind and reason of each verdict on the small model, by layout and whether it was clipped."""
    words = ["--layouts", layouts, "--members", "2", *TINY, *arguments]
    found = call(*words, "--cache", str(cache), "--out", str(out))
    assert found.exit_code == 0, found.output
    verdicts = json.loads((out / "parity.json").read_text())["verdicts"]
    return {(v["layout"], v["clipped"]): (v["verdict"], v["reason"]) for v in verdicts}


def test_a_rerun_and_a_resumed_run_and_checkpointed_activations_have_the_same_bits(cache: Path, tmp_path: Path):
    layouts = "fsdp=2; fsdp=2,rerun; fsdp=2,resume=2; fsdp=2 --activation_checkpoint.mode full"
    found = judged(cache, tmp_path, layouts, "--steps", "4", "--clipping", "on")
    reasons = ("a run repeats its own numbers", "a resumed run goes on as if it had not stopped", "computes the same")
    for layout, reason in zip(layouts.split("; ")[1:], reasons, strict=True):
        kind, text = found[(layout, True)]
        assert kind == "bit-equal" and reason in text, (layout, text)
    assert found[("fsdp=2", True)][0] == "within rounding"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_does_not_matter_who_starts_the_ranks(cache: Path, tmp_path: Path):
    layouts = (
        "1; 1,launch=torchrun; fsdp=2; fsdp=2,launch=train; fsdp=2,launch=run; fsdp=2,launch=torchrun; fsdp=2,gloo"
    )
    found = judged(cache, tmp_path, layouts, "--steps", "3", "--clipping", "off")
    for layout in layouts.split("; ")[3:6]:
        assert found[(layout, False)] == (
            "bit-equal",
            "loss and gradient norm bit-equal to "
            + ", ".join(layouts.split("; ")[2 : layouts.split("; ").index(layout)])
            + ": who starts the ranks does not reach the numbers",
        )
    assert found[("1,launch=torchrun", False)][0] == "bit-equal"
    assert found[("fsdp=2,gloo", False)][0] == "within rounding"


def test_what_casts_of_fsdp_do_is_within_the_bounds_of_bfloat16(cache: Path, tmp_path: Path):
    """FSDP2 computes with rounded norm weights, on one rank autocast leaves them as they are."""
    words = ["--training.mixed_precision_param", "bfloat16", "--training.seq_len", "128", "--optimizer.lr", "0.003"]
    words += ["--training.global_batch_size", "16", "--debug.seed", "519501", "--neuron.shuffle_block", "64"]
    arguments = ["--layouts", "fsdp=2", *TINY, *words, "--steps", "4", "--clipping", "off"]
    found = call(*arguments, "--cache", str(cache), "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    verdict = json.loads((tmp_path / "parity.json").read_text())["verdicts"][0]
    # A bound that is too wide says nothing either.
    assert verdict["verdict"] == "within rounding" and 0.01 < verdict["worst"]["ratio"] < 0.5


def test_exact_sums_make_data_parallel_layouts_of_any_size_equal(cache: Path, tmp_path: Path):
    layouts = "1,microbatch=1; ddp=2,microbatch=1; fsdp=4,microbatch=1"
    found = judged(cache, tmp_path, layouts, "--steps", "3", "--clipping", "on", "--neuron.exact_sums")
    assert [kind for kind, _ in found.values()] == ["bit-equal"] * 2
    assert "exact sums of the same microbatches" in found[("ddp=2,microbatch=1", True)][1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_exact_sums_on_the_debug_recipe(cache: Path, tmp_path: Path):
    layouts = [f"{kind}={size},microbatch=1" for kind in ("ddp", "fsdp") for size in (2, 4, 8)]
    arguments = ["--layouts", "; ".join(["1,microbatch=1", *layouts]), "--neuron.exact_sums", "--steps", "5"]
    found = call(*arguments, *SHORT, "--cache", str(cache), "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    verdicts = json.loads((tmp_path / "parity.json").read_text())["verdicts"]
    assert [verdict["verdict"] for verdict in verdicts] == ["bit-equal"] * 12


def test_exact_sums_of_other_layouts_are_refused(cache: Path, tmp_path: Path):
    arguments = ["--layouts", "1; hsdp=2x2; tp=2", "--neuron.exact_sums", "--cache", str(cache), "--out", str(tmp_path)]
    found = call(*arguments)
    assert found.exit_code == 2
    assert "neuron.exact_sums = true: works with DDP and FSDP2 alone, and this layout has HSDP 2 x 2" in found.output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_list_on_the_debug_recipe(tmp_path: Path):
    found = call("--cache", str(tmp_path / "cache"), "--out", str(tmp_path))
    assert found.exit_code == 0, found.output
    verdicts = json.loads((tmp_path / "parity.json").read_text())["verdicts"]
    kinds = {(verdict["layout"], verdict["clipped"]): verdict["verdict"] for verdict in verdicts}
    assert kinds[("cpu", False)] == kinds[("cpu", True)] == "bit-equal"
    assert kinds[("hsdp=2x2", False)] == "bit-equal"
    assert len(verdicts) == 18


def test_the_fixture_fails_a_test_whose_layouts_differ(pytester: pytest.Pytester, cache: Path):
    pytester.makepyfile(
        f"""
        LAYOUTS = ["1", "cpu"]

        def test_equal(parity):
            parity({str(RECIPE)!r}, LAYOUTS, *{SHORT!r}, steps=3, members=2)

        def test_different(parity):
            parity({str(RECIPE)!r}, ["1", "cpu --optimizer.lr 0.1"], *{SHORT!r}, steps=3, members=2)
        """
    )
    installed = importlib.metadata.entry_points(group="pytest11", name="trn_dist_parity")
    plugin = [] if installed else ["-p", "trn_dist.parity.pytest_plugin"]
    result = pytester.runpytest_inprocess(*plugin, "--parity-cache", str(cache))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*cpu --optimizer.lr 0.1 (unclipped) different: *"])
