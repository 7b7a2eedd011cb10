"""What operators cost: figures by hand, and properties that must hold whatever the sizes."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timing.chips import DEVICE_OPERATOR_PS, PATIENT_HOST, TRAINIUM2, changed, on_chip
from trn_dist import _C, timing

HBM_PS_PER_BYTE = 1e3 / (TRAINIUM2.hbm_bandwidth_gbps_per_logical_core * TRAINIUM2.efficiency.hbm)
PEAK_FLOPS_PER_PS = TRAINIUM2.tensor_tflops_per_logical_core("bfloat16") * TRAINIUM2.efficiency.tensor
SIZES = st.integers(1, 5000)


@pytest.fixture(autouse=True)
def patient_host():
    with on_chip(PATIENT_HOST):
        torch.neuron.synchronize()
        yield


def matmul_ps(batch, m, k, n, dtype=torch.bfloat16):
    return _C._matmul_ps(batch, m, k, n, dtype)


def cost_of(call):
    """(device time without the launch in ps, the one operator's times) of a call that makes one operator."""
    torch.neuron.synchronize()
    timing.mark_step()
    call()
    step = timing.mark_step()
    (operator,) = step.operators
    assert operator.count == 1
    return operator.busy_ps - DEVICE_OPERATOR_PS, operator


# Matrix products


def test_a_large_product_runs_at_the_arrays_rate():
    flops = 2 * 4096**3
    # The file's 79 TFLOPS at full tiles.
    assert matmul_ps(1, 4096, 4096, 4096) == pytest.approx(flops / PEAK_FLOPS_PER_PS)
    assert matmul_ps(1, 4096, 4096, 4096, torch.float32) == pytest.approx(flops / PEAK_FLOPS_PER_PS * 79 / 20)
    assert matmul_ps(1, 4096, 4096, 4096, torch.float8_e4m3fn) == pytest.approx(flops / PEAK_FLOPS_PER_PS / 2)


def test_a_tile_that_is_not_full_costs_a_full_one():
    full = matmul_ps(1, 1024, 1024, 1024)
    assert matmul_ps(1, 1024, 1023, 1024) == full
    assert matmul_ps(1, 1024, 1025, 1024) == pytest.approx(full * 9 / 8)
    assert matmul_ps(1, 1024, 1, 1024) == full / 8


def test_fewer_moving_rows_than_the_issue_interval_cost_as_many():
    # One stationary tile, at least 64 rows past it on either core.
    assert matmul_ps(1, 128, 128, 1) == matmul_ps(1, 128, 128, 64) == matmul_ps(1, 128, 128, 128)
    assert matmul_ps(1, 128, 128, 256) == 2 * matmul_ps(1, 128, 128, 128)


@given(batch=st.integers(1, 64), m=SIZES, k=SIZES, n=SIZES)
def test_products_never_beat_the_peak_and_do_not_care_for_orientation(batch, m, k, n):
    time = matmul_ps(batch, m, k, n)
    assert time >= 2 * batch * m * k * n / PEAK_FLOPS_PER_PS * (1 - 1e-12)
    assert time == matmul_ps(batch, n, k, m)


@given(batch=st.integers(1, 64), m=SIZES, k=SIZES, n=SIZES, more=st.integers(1, 300))
def test_a_bigger_product_is_never_cheaper(batch, m, k, n, more):
    time = matmul_ps(batch, m, k, n)
    for bigger in ((batch + more, m, k, n), (batch, m + more, k, n), (batch, m, k + more, n), (batch, m, k, n + more)):
        assert matmul_ps(*bigger) >= time


@given(m=st.integers(1, 300), k=st.integers(1, 300), n=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_every_form_of_a_product_costs_the_same_engine_time(m, k, n):
    a = torch.zeros(m, k, device="neuron", dtype=torch.bfloat16)
    b = torch.zeros(k, n, device="neuron", dtype=torch.bfloat16)
    bias = torch.zeros(n, device="neuron", dtype=torch.bfloat16)
    engine = int(matmul_ps(1, m, k, n))
    flops = 2 * m * k * n
    calls = {
        "aten::mm": lambda: torch.mm(a, b),
        "aten::bmm": lambda: torch.bmm(a[None], b[None]),
        "aten::addmm": lambda: torch.addmm(bias, a, b),
    }
    for name, call in calls.items():
        time, operator = cost_of(call)
        assert operator.name == name
        assert operator.flops == flops
        assert time == engine or operator.hbm_bound_ps > 0
        assert time >= engine


def test_attention_pays_half_when_causal_and_more_backward():
    # As models lay them out, (batch, sequence, heads, size) in memory: the result is given so.
    q, k, v = (torch.zeros(1, 1024, 4, 64, device="neuron", requires_grad=True).transpose(1, 2) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        full, operator = cost_of(lambda: attend(q, k, v))
        causal, causal_operator = cost_of(lambda: attend(q, k, v, is_causal=True))
    assert "flash_attention" in operator.name
    assert operator.flops == 4 * 4 * 1024 * 1024 * 64
    # 8 x 8 tiles, of which 36 are on the diagonal or below.
    assert causal == pytest.approx(full * 36 / 64, rel=1e-6)
    assert causal_operator.flops == operator.flops * 36 / 64
    out = attend(q, k, v)
    timing.mark_step()
    out.sum().backward()
    backward = {o.name: o for o in timing.mark_step().operators}
    (name,) = (name for name in backward if "attention" in name)
    assert backward[name].flops == 2.5 * operator.flops
    assert backward[name].busy_ps > full


def test_convolution_is_a_product_with_the_unfolded_input():
    x = torch.zeros(2, 16, 20, 20, device="neuron")
    weight = torch.zeros(32, 16, 3, 3, device="neuron")
    with torch.no_grad():
        _, operator = cost_of(lambda: torch.nn.functional.conv2d(x, weight))
    assert operator.flops == 2 * 32 * (16 * 9) * (2 * 18 * 18)


# Memory


@pytest.mark.parametrize(
    ("call", "nbytes"),
    [
        (lambda x: x.add_(1), 8),  # reads and writes
        (lambda x: x + 1, 8),
        (lambda x: x * x, 8),  # read once
        (lambda x: x.fill_(1), 4),  # only writes
        (lambda x: torch.add(x, 1, out=torch.empty_like(x)), 8),
        (lambda x: x.sum(), 4),
        (lambda x: x.clone(), 8),
        (lambda x: torch.sin(x), 8),
        (lambda x: x.to(torch.bfloat16), 6),
    ],
)
def test_hbm_traffic_is_what_is_read_and_written(call, nbytes):
    count = 1 << 16
    x = torch.zeros(count, device="neuron")
    _, operator = cost_of(lambda: call(x))
    assert operator.bytes == pytest.approx(nbytes * count, abs=8)


def test_an_expanded_tensor_is_read_once():
    row = torch.zeros(1024, device="neuron")
    _, operator = cost_of(lambda: row.expand(64, 1024) + 1.0)
    assert operator.bytes == 4 * 1024 + 4 * 64 * 1024


def test_a_lookup_does_not_read_the_table():
    table = torch.zeros(50_000, 64, device="neuron")
    index = torch.arange(128, device="neuron")
    for call in (lambda: torch.nn.functional.embedding(index, table), lambda: table[index]):
        time, operator = cost_of(call)
        assert operator.bytes == 128 * 8 + 2 * 128 * 64 * 4
        assert time < 1e6


def test_an_update_of_rows_does_not_move_the_table():
    table = torch.zeros(50_000, 64, device="neuron")
    index = torch.arange(128, device="neuron")
    rows = torch.ones(128, 64, device="neuron")
    _, operator = cost_of(lambda: table.index_put_((index,), rows))
    assert operator.bytes == 128 * 8 + 3 * 128 * 64 * 4


def test_a_big_pointwise_operator_is_bound_by_hbm():
    x = torch.zeros(1 << 20, device="neuron")
    time, operator = cost_of(lambda: x.neg())
    assert time == pytest.approx(8 * (1 << 20) * HBM_PS_PER_BYTE, rel=1e-6)
    assert operator.hbm_bound_ps == operator.busy_ps


@given(count=st.integers(1, 1 << 18), more=st.integers(1, 1 << 16))
@settings(max_examples=30, deadline=None)
def test_time_grows_with_size(count, more):
    x = torch.zeros(count + more, device="neuron")
    for call in (lambda y: y.add_(1), torch.exp, lambda y: y.clone(), torch.sum, lambda y: torch.softmax(y, 0)):
        assert cost_of(lambda call=call: call(x[:count]))[0] <= cost_of(lambda call=call: call(x))[0]


@given(count=st.integers(1, 1 << 20))
@settings(max_examples=15, deadline=None)
def test_twice_the_rates_halve_what_is_bound_by_them(count):
    x = torch.zeros(count, device="neuron")
    before, _ = cost_of(lambda: x.neg())
    engine = dataclasses.replace(TRAINIUM2.engines.vector, clock_ghz=2 * TRAINIUM2.engines.vector.clock_ghz)
    twice = changed(
        launch={"host_operator_us": 0.0},
        hbm={"bandwidth_gbps": 2 * TRAINIUM2.hbm.bandwidth_gbps},
        engines={"vector": engine},
    )
    with on_chip(twice):
        after, _ = cost_of(lambda: x.neg())
    assert abs(after - before / 2) <= 1


def test_an_empty_result_costs_its_launch_only():
    x = torch.zeros(0, device="neuron")
    time, _ = cost_of(lambda: x + 1)
    assert time <= TRAINIUM2.engines.vector.instruction_overhead_cycles / TRAINIUM2.engines.vector.clock_ghz * 1e3 + 1


def test_a_result_that_the_host_needs_makes_it_wait():
    x = torch.ones(1 << 20, device="neuron")
    for call in (lambda: x.sum().item(), lambda: torch.nonzero(x), lambda: torch.equal(x, x)):
        before = _C._virtual_host_ps()
        call()
        assert _C._virtual_host_ps() == _C._virtual_stream_ps(0, 0) > before
