"""PyTorch's OptimizerInfo suite on the device: every optimizer in every implementation has the CPU's bits."""

import warnings

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

STEPS = 4


def parameters(device, name):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (4, 4)] if name in ("Muon", "SparseAdam") else [(5, 3), (7,), (2, 3, 4), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def train(info, options, device, sparse=False):
    held = parameters(device, info.optim_cls.__name__)
    optimizer = info.optim_cls(held, **options)
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator).to(device) for p in held] for _ in range(STEPS)]
    for step in range(STEPS):

        def closure(step=step):
            for parameter, gradient in zip(held, gradients[step], strict=True):
                parameter.grad = gradient.to_sparse() if sparse else gradient.clone()
            return sum((p.detach() ** 2).sum() for p in held)

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    state = [v for values in optimizer.state_dict()["state"].values() for v in values.values()]
    return [t.detach().cpu() for t in (*held, *state) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.optim_cls.__name__)
@pytest.mark.parametrize("implementation", ["forloop", "foreach", "fused"])
def test_optimizer(info, implementation):
    if implementation != "forloop" and implementation not in info.supported_impls:
        pytest.skip(f"{info.optim_cls.__name__} has no {implementation} implementation")
    compared = 0
    for sample in info.optim_inputs_func(device="cpu"):
        options = dict(sample.kwargs)
        if implementation != "forloop":
            options[implementation] = True
        elif "foreach" in info.supported_impls:
            options["foreach"] = False
        sparse = info.optim_cls.__name__ == "SparseAdam"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = train(info, options, "cpu", sparse)
            except (RuntimeError, ValueError):
                continue
            actual = train(info, options, "neuron", sparse)
        assert len(expected) == len(actual)
        for left, right in zip(expected, actual, strict=True):
            assert torch.equal(left, right), f"{sample.desc}: {options}"
        compared += 1
    assert compared
