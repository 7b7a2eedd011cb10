"""Which layouts must share every bit."""

from typing import Any

import pytest

from trn_dist.parity.layout import parse_layout
from trn_dist.parity.promise import promise


def promised(a: str, b: str, clipped: bool = False, **options: Any) -> tuple[bool, bool] | None:
    made = promise(parse_layout(a), parse_layout(b), 8, clipped, **options)
    return None if made is None else (made.loss, made.grad_norm)


BITS = (True, True)
LOSS = (True, False)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("1", "cpu", BITS),
        ("ddp=2", "fsdp=2", LOSS),
        ("fsdp=4", "hsdp=2x2", LOSS),
        ("1,microbatch=2", "pp=2,microbatch=2", LOSS),
        ("1,microbatch=4", "pp=2", LOSS),
        ("fsdp=2", "fsdp=2 --activation_checkpoint.mode full", BITS),
        ("1", "1,rerun", BITS),
        ("fsdp=2", "fsdp=2,resume=3", BITS),
        ("fsdp=2,launch=run", "fsdp=2,launch=torchrun", BITS),
        ("1", "fsdp=2", None),  # another number of sums
        ("1", "tp=2", None),
        ("1", "pp=2", None),  # one rank has one backward, the pipeline two
        ("fsdp=2", "fsdp=2,gloo", None),
        ("ddp=2,microbatch=1", "fsdp=2,microbatch=1", None),  # DDP reduces the accumulated gradient again
        ("fsdp=2", "fsdp=2 --optimizer.lr 1e-3", None),
    ],
)
def test_promises_with_clipping_off(a: str, b: str, expected: tuple[bool, bool] | None):
    assert promised(a, b) == expected


def test_clipping_brings_the_norms_rounding_into_the_weights():
    assert promised("ddp=2", "fsdp=2", clipped=True) is None
    assert promised("1,microbatch=4", "pp=2", clipped=True) is None
    assert promised("1", "cpu", clipped=True) == BITS


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("1,microbatch=1", "ddp=2,microbatch=1", BITS),
        ("ddp=4,microbatch=1", "fsdp=8,microbatch=1", BITS),
        ("1,microbatch=2", "fsdp=4", BITS),
        ("1", "fsdp=4", None),  # another microbatch
        ("1", "cpu", None),  # only the device has exact sums
        ("1,microbatch=1", "pp=2,microbatch=1", None),
    ],
)
@pytest.mark.parametrize("clipped", [False, True])
def test_exact_sums_promise_more(a: str, b: str, expected: tuple[bool, bool] | None, clipped: bool):
    assert promised(a, b, clipped, exact_sums=True) == expected


def test_exact_sums_need_powers_of_two():
    made = promise(parse_layout("1,microbatch=1"), parse_layout("fsdp=3,microbatch=1"), 12, False, exact_sums=True)
    assert made is None


def test_low_precision_promises_only_what_repeats():
    for a, b in (("1", "cpu"), ("ddp=2", "fsdp=2"), ("1,microbatch=4", "pp=2")):
        assert promised(a, b, dtype="bfloat16") is None
    assert promised("fsdp=2", "fsdp=2,rerun", dtype="bfloat16") == BITS
    assert promised("fsdp=2", "fsdp=2 --activation_checkpoint.mode full", dtype="bfloat16") == BITS
