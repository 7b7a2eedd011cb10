"""PyTorch's OpInfo suite on the device: every operator gives the CPU's bits, forward, in place, with out= and backward.

An ordinary run takes the first float32 samples of every operator (of those without float32, of another dtype); the slow
one takes every sample of every dtype. ``python -m tests.conformance`` runs the same and prints totals.
"""

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from tests.conformance.comparison import CHECKS, compare
from tests.conformance.expected_failures import EXPECTED_FAILURES, key_of
from tests.conformance.operators import OPERATORS, dtypes_of

FAST_SAMPLES = 2


@pytest.fixture(autouse=True, scope="module")
def draws_of_the_cpu():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.neuron.random.use_cpu_rng(True)
    yield
    torch.neuron.random.use_cpu_rng(False)
    torch.set_num_threads(threads)


def check(name: str, dtype: torch.dtype, most: int | None) -> None:
    result = compare(OPERATORS[name], dtype, most)
    dtype_name = str(dtype).removeprefix("torch.")
    failed = result.failed_checks()
    keys = {check: key_of(name, dtype_name, check) for check in CHECKS}
    unexpected = [m for m in result.mismatches if keys[m.check] not in EXPECTED_FAILURES]
    assert not unexpected, "\n".join(f"{name} {dtype_name} {m.check}, sample {m.sample}: {m.what}" for m in unexpected)
    if most is None:
        passing = [keys[check] for check in result.checks - failed if keys[check] in EXPECTED_FAILURES]
        assert not passing, f"these pass now: take them out of expected_failures.py: {passing}"


def fast_dtype(name: str) -> torch.dtype:
    dtypes = dtypes_of(OPERATORS[name])
    return torch.float32 if torch.float32 in dtypes else dtypes[0]


@pytest.mark.parametrize("name", [name for name in OPERATORS if dtypes_of(OPERATORS[name])])
def test_operator(name):
    check(name, fast_dtype(name), FAST_SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_in_every_dtype(name):
    for dtype in dtypes_of(OPERATORS[name]):
        check(name, dtype, None)


def test_expected_failures_name_what_there_is():
    modules = {info.name: info.dtypes for info in module_db}
    for key, reason in EXPECTED_FAILURES.items():
        name, dtype, kind = key.rsplit(":", 2)
        dtypes = modules[name] if kind == "module" else dtypes_of(OPERATORS[name])
        assert getattr(torch, dtype) in dtypes and kind in (*CHECKS, "module") and reason, key


def test_a_difference_is_found():
    """The comparison itself: each kind of difference is seen."""
    from tests.conformance.comparison import Mover, difference

    move = Mover("neuron")
    t = torch.tensor([1.0, float("nan"), -0.0])
    assert difference(t, move(t)) is None
    for other in (
        torch.tensor([1.0, float("nan"), 0.0]),
        torch.tensor([1.0, 2.0, -0.0]),
        torch.tensor([1.0000001, float("nan"), -0.0]),
        t.double(),
        t[None],
    ):
        assert difference(t, move(other)) is not None
    assert difference(t, t) == "a result on cpu"
    assert difference([t], [move(t), move(t)]) is not None
    assert difference(torch.ones(2, 3), move(torch.ones(3, 2)).t()) is not None
    transposed = torch.arange(6.0).reshape(2, 3).t()[1:]
    moved = move(transposed)
    assert moved.stride() == transposed.stride() and moved.storage_offset() == transposed.storage_offset()
