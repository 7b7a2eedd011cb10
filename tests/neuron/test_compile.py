"""torch.compile on the device: eager mode's bits, static shapes, and the counts of get_dynamo_metrics."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trn_dist.testing import ranks


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.neuron.reset_dynamo_metrics()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(F.gelu(self.out(h.transpose(1, 2).reshape(x.shape))))


def train(compiled, model_class=Layer, steps=4, **options):
    torch.manual_seed(0)
    model = model_class().to("neuron")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = torch.compile(model, backend="neuron", **options) if compiled else model
    log = []
    for _ in range(steps):
        x = torch.randn(2, 8, 32, device="neuron")
        loss = forward(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    return log, [p.detach().cpu() for p in model.parameters()]


def check_same(*args, **options):
    (eager, eager_parameters), (compiled, parameters) = train(False, *args), train(True, *args, **options)
    assert eager == compiled
    assert all(torch.equal(a, b) for a, b in zip(eager_parameters, parameters, strict=True))


def test_training_has_eager_modes_bits():
    check_same(fullgraph=True)
    metrics = torch.neuron.get_dynamo_metrics()
    assert metrics["graphs"] == 1 and metrics["recompilations"] == 0
    assert metrics["forward_runs"] == 4 and metrics["backward_runs"] == 4 and metrics["operators"] > 5


class Checkpointed(Layer):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoint_with_dropout_has_eager_modes_bits():
    check_same(Checkpointed)


class Breaking(Layer):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def test_graph_breaks_are_counted():
    check_same(Breaking)
    metrics = torch.neuron.get_dynamo_metrics()
    assert metrics["graphs"] == 2 and metrics["graph_breaks"] >= 1


def test_fullgraph_refuses_a_break():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        train(True, Breaking, fullgraph=True)


def test_each_shape_is_a_compilation():
    function = torch.compile(lambda x: (x * 2).sum(), backend="neuron")
    for size in range(1, 13):
        assert function(torch.ones(size, device="neuron")).item() == 2 * size
    function(torch.ones(3, device="neuron"))
    metrics = torch.neuron.get_dynamo_metrics()
    assert metrics["graphs"] == 12 and metrics["recompilations"] == 11


@pytest.mark.parametrize("how", ["function", "decorator", "module"])
def test_dynamic_shapes_are_refused(how):
    with pytest.raises(RuntimeError, match="static shapes only"):
        if how == "function":
            torch.compile(lambda x: x, backend="neuron", dynamic=True)
        elif how == "decorator":
            torch.compile(backend="neuron", dynamic=True)(lambda x: x)
        else:
            nn.Linear(2, 2).compile(backend="neuron", dynamic=True)


def test_dimensions_marked_dynamic_are_refused():
    x = torch.ones(4, 2, device="neuron")
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Exception, match=r"static shapes only|specialized|marked"):
        torch.compile(lambda t: t * 2, backend="neuron")(x)


def test_other_modes_warn():
    with pytest.warns(UserWarning, match="only mode"):
        function = torch.compile(lambda x: x + 1, backend="neuron", mode="max-autotune")
    assert function(torch.ones(1, device="neuron")).item() == 2


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match="no option 'nonesuch'"):
        torch.compile(lambda x: x + 1, backend="neuron", options={"nonesuch": 1})(torch.ones(1, device="neuron"))


def test_module_compile():
    module = Layer().to("neuron").eval()
    x = torch.ones(2, 4, 32, device="neuron")
    expected = module(x)
    module.compile(backend="neuron", fullgraph=True)
    assert torch.equal(module(x), expected)
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"backend": "inductor"}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_autotune": True}}],
)
def test_inductor_makes_way_with_a_notice(options):
    import trn_dist.neuron.compile as backend

    backend._notice_given = False
    with pytest.warns(UserWarning, match='backend "neuron" takes its place'):
        assert torch.compile(lambda x: x.exp(), **options)(torch.zeros(3, device="neuron")).tolist() == [1, 1, 1]
    assert torch.neuron.get_dynamo_metrics()["graphs"] == 1


def test_inductors_options_are_still_checked():
    with pytest.raises(RuntimeError, match="Unexpected optimization option nonesuch"):
        torch.compile(lambda x: x, options={"nonesuch": 1})


def test_compiled_flex_attention_forward_and_backward():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def run(attention):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 128, 16, device="neuron", requires_grad=True) for _ in range(3))
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="neuron")
        out = attention(q, k, v, block_mask=mask)
        out.sum().backward()
        return out, q.grad, k.grad, v.grad

    compiled = torch.compile(flex_attention, options={"max_autotune": True})
    for actual, expected in zip(run(compiled), run(flex_attention), strict=True):
        assert torch.equal(actual, expected)


def test_backends_of_others_are_left_alone():
    seen = []

    def mine(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(lambda x: x + 1, backend=mine)(torch.ones(1, device="neuron")).item() == 2
    assert seen == [1] and torch.neuron.get_dynamo_metrics()["graphs"] == 0


def test_dynamo_finds_the_backend_by_name():
    assert "neuron" in torch._dynamo.list_backends()


def test_dynamo_finds_the_devices_functions_by_name():
    interface = torch._dynamo.device_interface.get_interface_for_device("neuron")
    assert interface.current_device() == 0 and interface.device_count() == torch.neuron.device_count()
    with interface.device(1):
        assert interface.current_device() == 1


def test_casts_moves_and_new_tensors_are_traced():
    @torch.compile(backend="neuron", fullgraph=True)
    def function(x):
        with torch.autocast("neuron", dtype=torch.float16):
            return (x @ torch.ones(2, 2)).cpu()

    with torch.device("neuron"):
        result = function(torch.ones(2, 2))
    assert result.is_cpu and result.dtype == torch.float16 and result.tolist() == [[2, 2], [2, 2]]


def test_fake_tensors_take_the_current_device():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        total = torch.empty(3, device="neuron") + torch.empty(3, device="neuron:0")
    assert total.device == torch.device("neuron:0") and total.shape == (3,)


class Attention(nn.Module):
    """Draws inside a checkpointed region whose weights are DTensors, so that the compiled graph saves a mesh too."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def attend(self, x):
        heads = self.qkv(x).view(*x.shape[:2], -1, 3, 8).permute(3, 0, 2, 1, 4)
        h = F.scaled_dot_product_attention(*heads, dropout_p=0.25, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)


@ranks(2)
def test_checkpoint_with_draws_under_tensor_parallel_has_eager_modes_bits():
    mesh = init_device_mesh("neuron", (2,))
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Attention().to("neuron")
        parallelize_module(model, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
        forward = torch.compile(model, backend="neuron", fullgraph=True) if compiled else model
        x = torch.randn(2, 8, 32, device="neuron", requires_grad=True)
        torch.manual_seed(1)
        for _ in range(2):
            forward(x).square().mean().backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        results.append([x.grad.cpu(), *(gradient.cpu() for gradient in gradients)])
    assert all(torch.equal(eager, other) for eager, other in zip(*results, strict=True))
    assert torch.neuron.get_dynamo_metrics()["backward_runs"] == 2
