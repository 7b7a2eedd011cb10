"""PyTorch's ModuleInfo suite on the device: outputs and gradients of every torch.nn module have the CPU's bits."""

import inspect
import itertools
import warnings

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

from tests.conformance.comparison import Mover, difference, seed_everything
from tests.conformance.expected_failures import EXPECTED_FAILURES

FAST_SAMPLES = 24  # nn.LinearCrossEntropyLoss has a hundred
MODULES = {info.name: info for info in module_db}


@pytest.fixture(autouse=True, scope="module")
def draws_of_the_cpu():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.neuron.random.use_cpu_rng(True)
    yield
    torch.neuron.random.use_cpu_rng(False)
    torch.set_num_threads(threads)


def run(module, arguments, keywords):
    """Outputs and the gradients of inputs and parameters, from output gradients made on the CPU."""
    seed_everything()
    output = module(*arguments, **keywords)
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    inputs = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    wanted = [tensor for tensor in (*inputs, *module.parameters()) if tensor.requires_grad]
    grads = []
    if outputs and wanted:
        generator = torch.Generator().manual_seed(0)
        grad_outputs = [torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device) for t in outputs]
        grads = list(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True))
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, output), grads


def build(info, arguments, dtype):
    seed_everything()
    options = dict(arguments.kwargs)
    if "dtype" in inspect.signature(info.module_cls.__init__).parameters:
        options |= {"dtype": dtype, "device": "cpu"}
    return info.module_cls(*arguments.args, **options).to(dtype)


def compare(name, dtype, training, most=None):
    info = MODULES[name]
    seed_everything()
    compared = 0
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in itertools.islice(samples, most):
        if sample.forward_input is None:
            continue
        module, moved = (build(info, sample.constructor_input, dtype).train(training) for _ in range(2))
        moved = moved.to("neuron")
        arguments = (sample.forward_input.args, sample.forward_input.kwargs)
        try:
            expected = run(module, *tree_map(Mover("cpu"), arguments))
        except (RuntimeError, NotImplementedError):
            continue
        found = difference(expected, run(moved, *tree_map(Mover("neuron"), arguments)))
        assert found is None, f"{name} {dtype} {sample.desc}: {found}"
        compared += 1
    return compared


def check(name, dtype, most=None):
    key = f"{name}:{str(dtype).removeprefix('torch.')}:module"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for training in (True, False):
                compare(name, dtype, training, most)
        except Exception:
            if key not in EXPECTED_FAILURES:
                raise
            return
    assert most is not None or key not in EXPECTED_FAILURES, f"passes now: take it out of expected_failures.py: {key}"


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    check(name, torch.float32, FAST_SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_module_in_every_dtype(name):
    for dtype in MODULES[name].dtypes:
        check(name, dtype)


def test_most_modules_are_compared():
    assert compare("nn.Linear", torch.float32, True) == 3
    assert compare("nn.TransformerEncoderLayer", torch.float32, True) >= 1
    assert compare("nn.Conv2d", torch.float32, True) >= 1
