"""Layouts as text, and what they become as overrides of a recipe."""

import pytest

from trn_dist.parity.comparison import DEFAULT_LAYOUTS
from trn_dist.parity.layout import Layout, LayoutError, parse_layout, parse_layouts


def overrides(text: str, global_batch_size: int = 8) -> dict[str, str]:
    words = parse_layout(text).recipe_overrides(global_batch_size)
    return {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}


def test_the_default_list_is_read():
    layouts = parse_layouts(DEFAULT_LAYOUTS)
    assert [layout.text for layout in layouts] == [part.strip() for part in DEFAULT_LAYOUTS.split(";")]
    assert [layout.ranks for layout in layouts] == [1, 2, 4, 8, 2, 4, 2, 2, 4, 1]
    assert [layout.on_cpu for layout in layouts] == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", Layout("1")),
        ("fsdp=2,tp=2", Layout("fsdp=2,tp=2", dp_shard=2, tp=2)),
        (" fsdp = 2 , gloo ", Layout("fsdp = 2,gloo", dp_shard=2, on_cpu=True)),
        ("hsdp=2x4", Layout("hsdp=2x4", dp_replicate=2, dp_shard=4)),
        ("pp=2,schedule=GPipe", Layout("pp=2,schedule=GPipe", pp=2, schedule="GPipe")),
        ("1,rerun", Layout("1,rerun", rerun=True)),
        ("fsdp=2,resume=3", Layout("fsdp=2,resume=3", dp_shard=2, resume=3)),
        ("ddp=2,launch=torchrun", Layout("ddp=2,launch=torchrun", dp_replicate=2, launch="torchrun")),
        ("1,microbatch=4", Layout("1,microbatch=4", microbatch=4)),
        (
            "cp=2 --activation_checkpoint.mode full",
            Layout("cp=2 --activation_checkpoint.mode full", cp=2, overrides=("--activation_checkpoint.mode", "full")),
        ),
    ],
)
def test_layouts_are_read(text: str, expected: Layout):
    assert parse_layout(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no layout in ''"),
        ("1; ; tp=2", "an empty layout"),
        ("1; tp=2; tp=2", "'tp=2' stands twice"),
        ("fdsp=2", "'fdsp=2': no such part; did you mean fsdp?"),
        ("4", "'4': say how the 4 ranks are arranged, such as fsdp=4"),
        ("fsdp", "expected fsdp=N, a whole number"),
        ("fsdp=0", "fsdp=0: expected a whole number from 1 on"),
        ("fsdp=-2", "fsdp=-2: expected a whole number from 1 on"),
        ("tp=two", "tp=two: expected a whole number from 1 on"),
        ("tp=2,tp=4", "tp stands twice"),
        ("ddp=2,fsdp=2", "write hsdp=RxS"),
        ("ddp=2,tp=2", "TorchTitan's DDP cannot be combined with tp"),
        ("hsdp=4", "hsdp=4: expected RxS"),
        ("1,tp=2", "1 is a layout of one rank and cannot stand beside tp"),
        ("cpu,fsdp=2", "write gloo in its place"),
        ("gloo", "gloo needs a layout to run, such as fsdp=2,gloo"),
        ("cpu=2", "cpu takes no value"),
        ("fsdp=2,schedule=1F1B", "schedule is a pipeline's; add pp=N"),
        ("fsdp=2,launch=slurm", "launch=slurm: expected one of train, run, torchrun"),
        ("fsdp=2,gloo,resume=2", "launch and resume are for layouts on the device"),
        ("fsdp=2,launch=run,resume=2", "write two layouts"),
        ("tp=2 --training.seed 'x", "the overrides cannot be read"),
    ],
)
def test_mistakes_are_named(text: str, words: str):
    with pytest.raises(LayoutError) as error:
        parse_layouts(text)
    assert words in str(error.value)


def test_every_layout_trains_the_whole_global_batch_in_one_backward():
    for text, local in (("1", 8), ("ddp=2", 4), ("fsdp=8", 1), ("hsdp=2x2", 2), ("fsdp=2,tp=2", 4), ("cp=2", 8)):
        found = overrides(text)
        assert (found["training.global_batch_size"], found["training.local_batch_size"]) == ("8", str(local)), text
        assert parse_layout(text).backwards_per_step(8) == 1


def test_a_pipeline_fills_its_stages_with_microbatches():
    found = overrides("fsdp=2,pp=2")
    assert found["training.local_batch_size"] == "4"
    assert found["parallelism.pipeline_parallel_microbatch_size"] == "2"
    assert parse_layout("fsdp=2,pp=2").backwards_per_step(8) == 2


def test_microbatches_accumulate_without_a_pipeline():
    found = overrides("fsdp=2,microbatch=1")
    assert found["training.local_batch_size"] == "1"
    assert parse_layout("fsdp=2,microbatch=1").backwards_per_step(8) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp=3", "3 data-parallel ranks cannot share the recipe's global batch of 8 samples"),
        ("fsdp=16", "16 data-parallel ranks cannot share"),
        ("fsdp=2,microbatch=3", "microbatches of 3 do not divide"),
        ("pp=2,microbatch=8", "1 microbatches of 8; a pipeline of 2 stages needs 2 or more"),
        ("fsdp=8,pp=2", "1 microbatches of 1; a pipeline of 2 stages needs 2 or more"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(text: str, words: str):
    with pytest.raises(LayoutError, match=words):
        overrides(text)
