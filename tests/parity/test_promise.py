"""Which layouts must share every bit."""

import pytest

from trn_dist.parity.layout import parse_layout
from trn_dist.parity.promise import promise


def promised(a: str, b: str, clipped: bool = False) -> tuple[bool, bool] | None:
    made = promise(parse_layout(a), parse_layout(b), 8, clipped)
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
