"""Modules move between devices as they do between cpu and cuda: the same parameters, on another device."""

import warnings

import pytest
import torch
from torch import nn


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.role = "bias"
    return model


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("neuron"),
        lambda model: model.to("neuron:1"),
        lambda model: model.to(device="neuron", dtype=torch.float64),
        lambda model: model.neuron(),
        lambda model: model.to("neuron").cpu(),
        lambda model: model.neuron().to("cpu"),
    ],
)
def test_parameters_keep_their_identity(move):
    model = tied()
    before = list(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert move(model) is model
    after = list(model.parameters())
    assert [id(p) for p in after] == [id(p) for p in before]
    assert model[0].weight is model[1].weight and model[0].bias.role == "bias"
    assert all(type(p) is nn.Parameter and p.requires_grad and p.is_leaf for p in after)


def test_an_optimizer_made_before_trains_what_was_moved():
    losses = {}
    for device in ("cpu", "neuron"):
        torch.manual_seed(0)
        model = tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model.to(device)
        losses[device] = []
        for _ in range(3):
            loss = model(torch.ones(2, 3, device=device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses["neuron"] == losses["cpu"] and losses["cpu"][2] < losses["cpu"][0]


def test_gradients_and_buffers_move_along():
    model = nn.BatchNorm1d(3).to("neuron")
    model(torch.randn(4, 3).to("neuron")).sum().backward()
    gradient = model.weight.grad.cpu()
    model.cpu()
    assert model.running_mean.device.type == "cpu" and torch.equal(model.weight.grad, gradient)


def test_parameters_that_a_graph_holds_are_replaced_with_a_warning():
    model = nn.Linear(3, 3)
    output = model(torch.ones(1, 3, requires_grad=True))  # saves the weight
    with pytest.warns(UserWarning, match="Linear was moved to neuron while autograd"):
        model.to("neuron")
    assert model.weight.device.type == "neuron"
    output.sum().backward()


def test_lazy_modules_stay_lazy():
    model = nn.LazyLinear(2).to("neuron")
    assert isinstance(model.weight, nn.UninitializedParameter)
    assert model(torch.ones(4, 5, device="neuron")).shape == (4, 2)
    assert model.weight.shape == (2, 5) and model.weight.device.type == "neuron"


def test_what_does_not_reach_neuron_is_pytorchs_own():
    model = nn.Linear(2, 2)
    assert model.to(torch.float64).weight.dtype == torch.float64
    assert not torch.__future__.get_swap_module_params_on_conversion()
    with pytest.raises(NotImplementedError, match="meta"):
        nn.Linear(2, 2, device="meta").to("neuron")
    assert nn.Linear(2, 2, device="meta").to_empty(device="neuron").weight.device.type == "neuron"
