"""Training in plain PyTorch gives the same bits on cpu and neuron, and autograd's features work."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_leaves


class Block(nn.Module):
    """A transformer block beside a convolution, small enough for a test and of many operators."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.projection = nn.Linear(64, 64)
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        h = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(h)).view(*tokens.shape, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.projection(attention.transpose(1, 2).reshape(h.shape))
        h = h + self.convolution(h.transpose(1, 2)).transpose(1, 2)
        return self.head(h)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


def train(device, optimizer, steps=20, autocast=False):
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    generator = torch.Generator().manual_seed(1)
    log = []
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 32), generator=generator)
        targets = torch.roll(tokens, 1, 1)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.append((loss.item(), norm.item()))
    return log, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_have_the_cpus_bits(optimizer):
    (cpu_log, cpu), (neuron_log, neuron) = train("cpu", optimizer), train("neuron", optimizer)
    assert cpu_log == neuron_log
    assert all(torch.equal(a, b) for a, b in zip(cpu, neuron, strict=True))
    assert neuron_log[-1][0] < neuron_log[0][0]


def test_two_runs_have_the_same_bits():
    assert train("neuron", "adamw", steps=5)[0] == train("neuron", "adamw", steps=5)[0]


def test_autocast_trains():
    log, _ = train("neuron", "adamw", autocast=True)
    assert log[-1][0] < log[0][0]


def test_autocast_casts_by_cudas_lists():
    a = torch.ones(4, 4, device="neuron")
    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("neuron")
        assert (a @ a).dtype == torch.bfloat16
        assert F.linear(a, a).dtype == torch.bfloat16
        assert F.softmax(a @ a, -1).dtype == torch.float32
        assert F.layer_norm(a @ a, (4,)).dtype == torch.float32
        assert (a + a).dtype == torch.float32
        assert torch.cat([a, a.bfloat16()]).dtype == torch.float32
        with torch.autocast("neuron", enabled=False):
            assert (a @ a).dtype == torch.float32
    assert torch.get_autocast_dtype("neuron") in torch.neuron.get_amp_supported_dtype()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_any_inputs_nested_and_backward(dtype):
    x = torch.full((2, 2), 0.5, device="neuron")
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    weight = x.clone().requires_grad_()
    with torch.autocast("neuron", dtype=dtype):
        assert (x @ x.to(other)).dtype == dtype and (x.to(dtype) @ x).dtype == dtype
        with torch.autocast("neuron", dtype=other):
            assert (x @ x).dtype == other
        assert x.asin().dtype == x.to(dtype).asin().dtype == torch.float32
        (weight @ weight).sum().backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.tolist() == [[2, 2], [2, 2]]


def test_autocast_has_a_dtype_that_can_be_set():
    default = torch.get_autocast_dtype("neuron")
    try:
        torch.set_autocast_dtype("neuron", torch.bfloat16)
        with torch.autocast("neuron"):
            assert (torch.ones(2, 2, device="neuron") @ torch.ones(2, 2, device="neuron")).dtype == torch.bfloat16
    finally:
        torch.set_autocast_dtype("neuron", default)


def test_autocast_refuses_binary_cross_entropy():
    x = torch.full((2,), 0.5, device="neuron")
    with torch.autocast("neuron"), pytest.raises(RuntimeError, match=r"unsafe to autocast.*BCEWithLogitsLoss"):
        F.binary_cross_entropy(x, x)
    assert F.binary_cross_entropy(x, x).item() > 0


def test_autocast_refuses_other_dtypes():
    with pytest.warns(UserWarning, match="neuron"), torch.autocast("neuron", dtype=torch.float64):
        assert not torch.is_autocast_enabled("neuron")


def test_grad_scaler():
    model = nn.Linear(4, 4, device="neuron")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("neuron", init_scale=4.0, growth_interval=1)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 4, device="neuron")).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.bias.grad.tolist() == [2, 2, 2, 2]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0 and not torch.equal(before, model.weight)
    model.weight.grad.fill_(float("inf"))
    kept = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and torch.equal(kept, model.weight)


def both(function):
    """The function's result on the two devices, each moved to the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(5, 6)
    results = []
    for device in ("cpu", "neuron"):
        output = function(copy.deepcopy(model).to(device), inputs.to(device, copy=True))
        results.append([tensor.detach().cpu() for tensor in tree_leaves(output) if tensor is not None])
    return results


def check_same(function):
    cpu, neuron = both(function)
    assert cpu and all(torch.equal(a, b) for a, b in zip(cpu, neuron, strict=True))


def test_double_backward():
    def penalty(model, x):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], x.grad

    check_same(penalty)


def test_func_transforms():
    def per_sample(model, x):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, sample):
            return torch.func.functional_call(model, parameters, (sample,)).square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        hessian = torch.func.hessian(lambda s: loss(parameters, s))(x[0])
        _, tangent = torch.func.jvp(lambda s: loss(parameters, s), (x[0],), (torch.ones_like(x[0]),))
        jacobian = torch.func.jacrev(lambda s: torch.func.functional_call(model, parameters, (s,)))(x[0])
        return gradients, hessian, tangent, jacobian

    check_same(per_sample)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    def run(model, x):
        x.requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=reentrant)
        torch.nn.functional.dropout(model[2](hidden), 0.0).sum().backward()
        return [p.grad for p in model.parameters()], x.grad

    check_same(run)


def test_checkpoint_restores_the_devices_generator():
    x = torch.ones(1000, device="neuron", requires_grad=True)
    torch.manual_seed(0)
    output = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False)
    torch.rand(5, device="neuron")
    output.sum().backward()
    assert torch.equal(x.grad, output.detach())


def test_hooks():
    def run(model, x):
        seen = []
        model[0].weight.register_hook(lambda g: seen.append(g.clone()))
        model[2].register_forward_hook(lambda module, inputs, output: output * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model(x).sum().backward()
        return seen

    check_same(run)


def test_saved_tensor_hooks_to_the_cpu():
    x = torch.randn(8, device="neuron", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x.exp() * x).sum()
    y.backward()
    expected = x.detach().cpu().requires_grad_()
    (expected.exp() * expected).sum().backward()
    assert torch.equal(x.grad.cpu(), expected.grad)


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        t = torch.zeros(4, device="neuron")
        t.index_add_(0, torch.tensor([0, 0, 1], device="neuron"), torch.ones(3, device="neuron"))
        assert t.tolist() == [2, 1, 0, 0]
        assert torch.empty(3, device="neuron").isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_anomaly_mode_finds_nan():
    x = torch.zeros(2, device="neuron", requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan"):
        (x.sqrt() * 0).sum().backward()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_agree_with_the_cpu_within_rounding(layer, bias):
    torch.manual_seed(0)
    model = layer(5, 7, num_layers=2, bias=bias, bidirectional=True).double()
    inputs = torch.randn(6, 3, 5, dtype=torch.float64)
    results = []
    for device in ("cpu", "neuron"):
        moved, x = copy.deepcopy(model).to(device), inputs.to(device, copy=True).requires_grad_()
        output, state = moved(x)
        (output.square().sum() + sum(s.sum() for s in tree_leaves(state))).backward()
        results.append(
            [t.detach().cpu() for t in (output, *tree_leaves(state), x.grad, *(p.grad for p in moved.parameters()))]
        )
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-12, atol=1e-12)


def test_custom_operator_runs_its_cpu_kernel():
    @torch.library.custom_op("trn_dist_tests::double_plus", mutates_args=(), device_types="cpu")
    def double_plus(x: torch.Tensor, y: float) -> torch.Tensor:
        return x * 2 + y

    double_plus.register_autograd(lambda ctx, grad: (grad * 2, None))
    x = torch.ones(3, device="neuron", requires_grad=True)
    out = double_plus(x, 1.0)
    out.sum().backward()
    assert out.is_neuron and out.tolist() == [3, 3, 3] and x.grad.tolist() == [2, 2, 2]


def test_operator_without_a_cpu_kernel_says_so():
    library = torch.library.Library("trn_dist_tests", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"trn_dist_tests::nowhere has no kernel for device neuron"):
        torch.ops.trn_dist_tests.nowhere(torch.ones(2, device="neuron"))


def test_grouped_mm():
    torch.manual_seed(0)
    a, b = torch.randn(12, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    offsets = torch.tensor([4, 6, 12], dtype=torch.int32)
    expected = torch._grouped_mm(a, b, offs=offsets)
    actual = torch._grouped_mm(a.to("neuron"), b.to("neuron"), offs=offsets.to("neuron"))
    assert torch.equal(actual.cpu(), expected)
