"""How a step is accounted for: every picosecond once, and in the right place."""

import itertools

import torch

from tests.timing.chips import DEVICE_OPERATOR_PS, HOST_OPERATOR_PS, PATIENT_HOST, TRAINIUM2, on_chip
from trn_dist import _C, timing
from trn_dist.timing.steps import step_times


def train(steps=3, wait_every=2):
    """A small model trained for some steps, with a side stream and, now and then, a wait for the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.neuron.Stream()
    timing.mark_step()
    found = []
    for step in range(steps):
        loss = torch.nn.functional.cross_entropy(
            model(torch.randn(32, 64, device="neuron")), torch.arange(32, device="neuron") % 8
        )
        side.wait_stream(torch.neuron.current_stream())
        with torch.neuron.stream(side):
            copy = model[0].weight.detach().clone()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % wait_every == 0:
            loss.item()
            torch.neuron.current_stream().wait_stream(side)
            copy.sum()
        found.append(timing.mark_step())
    return found


def test_parts_add_up_to_the_step_to_the_picosecond():
    for chip in (TRAINIUM2, PATIENT_HOST):
        with on_chip(chip):
            steps = train()
        for before, after in itertools.pairwise(steps):
            assert after.start_ps == before.end_ps
        for step in steps:
            assert step.time_ps > 0
            assert sum(step.parts().values()) == step.time_ps
            assert all(time >= 0 for time in step.parts().values())


def test_the_times_so_far_are_those_of_all_steps():
    with on_chip(TRAINIUM2):
        timing.mark_step()
        before = step_times(_C._times_so_far())
        steps = train()
        after = step_times(_C._times_so_far())
        assert after == step_times(_C._times_so_far()), "asking changes nothing"
    assert after.start_ps == 0 and sum(after.parts().values()) == after.time_ps
    assert after.end_ps == steps[-1].end_ps
    for name, spent in after.parts().items():
        # What train() marks at its start is in no step of those that it returns.
        known = before.parts().get(name, 0) + sum(step.parts().get(name, 0) for step in steps)
        assert spent >= known
    assert after.flops - before.flops >= sum(step.flops for step in steps) > 0


def test_small_operators_are_bound_by_the_host():
    with on_chip(TRAINIUM2):
        x = torch.zeros(4, device="neuron")
        torch.neuron.synchronize()
        timing.mark_step()
        for _ in range(10):
            x.add_(1)
        step = timing.mark_step()
    busy = step.operators[0].busy_ps // 10
    assert step.time_ps == 10 * HOST_OPERATOR_PS + busy
    assert step.host_bound_ps == 10 * HOST_OPERATOR_PS - 9 * busy
    assert step.launch_ps == 10 * DEVICE_OPERATOR_PS
    assert step.engines["vector"] == 10 * (busy - DEVICE_OPERATOR_PS)


def test_large_operators_hide_the_host():
    with on_chip(TRAINIUM2):
        x = torch.zeros(1 << 22, device="neuron")
        torch.neuron.synchronize()
        timing.mark_step()
        for _ in range(5):
            x.neg()
        step = timing.mark_step()
    assert step.host_bound_ps == HOST_OPERATOR_PS
    assert step.idle_ps == 0
    assert step.hbm_bound_ps == step.engines["vector"] > 0.8 * step.time_ps


def test_a_wait_for_the_device_is_the_devices_time():
    with on_chip(TRAINIUM2):
        x = torch.zeros(1 << 22, device="neuron")
        torch.neuron.synchronize()
        timing.mark_step()
        x.neg()
        torch.neuron.synchronize()
        step = timing.mark_step()
        assert step.host_bound_ps == HOST_OPERATOR_PS
        assert step.engines["vector"] + step.launch_ps == step.time_ps - HOST_OPERATOR_PS
        assert step.end_ps == _C._virtual_host_ps()


def test_operators_that_overlap_are_counted_once():
    with on_chip(PATIENT_HOST):
        x = torch.zeros(1 << 20, device="neuron")
        y = torch.empty_like(x)
        side = torch.neuron.Stream()
        torch.neuron.synchronize()
        timing.mark_step()
        x.neg()
        with torch.neuron.stream(side):
            y.copy_(x)
        torch.neuron.synchronize()
        step = timing.mark_step()
    assert sum(step.parts().values()) == step.time_ps
    assert sum(operator.busy_ps for operator in step.operators) > step.time_ps


def test_an_empty_step_is_empty():
    torch.neuron.synchronize()
    timing.mark_step()
    step = timing.mark_step()
    assert step.time_ps == 0
    assert step.parts() == {**dict.fromkeys(step.parts(), 0)}


def test_a_long_step_is_summed_up_on_the_way():
    count = 140_000  # more than the journal keeps
    with on_chip(TRAINIUM2):
        x = torch.zeros(1, device="neuron")
        torch.neuron.synchronize()
        timing.mark_step()
        _C._time_pricing("aten::add", [x], count)
        step = timing.mark_step()
    assert sum(operator.count for operator in step.operators) == count
    assert sum(step.parts().values()) == step.time_ps
    assert step.launch_ps == count * DEVICE_OPERATOR_PS


def test_the_table_names_what_took_the_time():
    with on_chip(TRAINIUM2):
        (step, *_) = train(steps=1)
    table = step.table(operators=30)
    assert "compute.tensor" in table
    assert "host_bound" in table
    assert "aten::addmm" in table
    assert f"{step.time_ps / 1e6:,.1f} us" in table
