"""What a program states of its own operators' cost: one launch with that cost, the CPU kernel's numbers."""

import json
import subprocess
import sys

import pytest
import torch

from tests.timing.chips import DEVICE_OPERATOR_PS, PATIENT_HOST, on_chip
from trn_dist import _C

Cost = torch.neuron.OperatorCost


@torch.library.custom_op("trn_dist_costs::mlp", mutates_args=())
def mlp(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, squared: bool = False) -> torch.Tensor:
    hidden = torch.nn.functional.silu(x @ weight.T) * scale
    return hidden.square() if squared else hidden.clone()


mlp.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.T @ ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, keyword_only_inputs, output: ctx.save_for_backward(inputs[0], inputs[1]),
)


@torch.neuron.register_operator_cost("trn_dist_costs::mlp")
def mlp_cost(x, weight, scale=1.0, *, squared=False):
    m, k = x.shape
    n = weight.shape[0]
    return Cost(matmul=(1, m, k, n), vector_elements=m * n if squared else 0, scalar_elements=m * n, hbm_bytes=x.nbytes)


def device_ps(run):
    """Time of what `run` launches, beside the first launch's own, on a device whose host takes none."""
    torch.neuron.synchronize()
    before = stream_ps()
    result = run()
    return stream_ps() - before - DEVICE_OPERATOR_PS, result


def stream_ps():
    return _C._virtual_stream_ps(0, torch.neuron.current_stream().stream_id)


def test_one_launch_at_the_stated_cost_with_the_cpu_kernels_numbers():
    x, weight = torch.randn(256, 1024), torch.randn(2048, 1024)
    with on_chip(PATIENT_HOST):
        on_device = x.to("neuron"), weight.to("neuron")
        time_ps, result = device_ps(lambda: mlp(*on_device))
        assert torch.equal(result.cpu(), mlp(x, weight))
        assert time_ps == int(_C._matmul_ps(1, 256, 1024, 2048, torch.bfloat16))  # whole picoseconds, cut


def test_arguments_arrive_by_place_and_by_name():
    seen = []

    @torch.neuron.register_operator_cost(torch.ops.trn_dist_costs.mlp)
    def cost(*args, **kwargs):
        seen.append((args[2], kwargs))
        return Cost()

    try:
        mlp(torch.ones(2, 2, device="neuron"), torch.ones(2, 2, device="neuron"), 3.0, squared=True)
    finally:
        torch.neuron.register_operator_cost(torch.ops.trn_dist_costs.mlp.default)(mlp_cost)
    assert seen == [(3.0, {"squared": True})]


def test_gradients_flow_as_without_a_stated_cost():
    grads = []
    for device in ("cpu", "neuron"):
        x = torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4).to(device).requires_grad_()
        weight = torch.linspace(1, 2, 8).reshape(2, 4).to(device).requires_grad_()
        mlp(x, weight, 0.5).sum().backward()
        grads.append((x.grad.cpu(), weight.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_stated_bytes_bind_where_they_take_longer():
    @torch.library.custom_op("trn_dist_costs::stream", mutates_args=())
    def stream(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    times = []
    for hbm_bytes in (0, 1 << 30, 1 << 31):
        torch.neuron.register_operator_cost("trn_dist_costs::stream")(lambda x, n=hbm_bytes: Cost(hbm_bytes=n))
        with on_chip(PATIENT_HOST):
            x = torch.ones(4, device="neuron")
            times.append(device_ps(lambda x=x: stream(x))[0])
    assert times[0] == 0 and times[2] == pytest.approx(2 * times[1]) and times[1] > 0


PROGRAM = """
    import sys, torch

    @torch.library.custom_op("trn_dist_costs::mlp", mutates_args=())
    def mlp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T
    mlp.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))

    @torch.neuron.register_operator_cost("trn_dist_costs::mlp")
    def cost(x, weight):
        return torch.neuron.OperatorCost(matmul=(1, *x.shape, weight.shape[0]))

    x, weight = torch.ones(512, 512, device="neuron"), torch.ones(512, 512, device="neuron")
    torch.neuron.synchronize()
    start, end = torch.neuron.Event(enable_timing=True), torch.neuron.Event(enable_timing=True)
    start.record()
    mlp(x, weight)
    end.record()
    end.synchronize()
    print(start.elapsed_time(end))
"""


def test_timing_mode_has_the_same_time(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(line[4:] for line in PROGRAM.splitlines()))
    times = []
    for timing_only in ("0", "1"):
        command = ["env", f"TRN_TIMING_ONLY={timing_only}", sys.executable, str(program)]
        times.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert times[0] == times[1] > 0


def test_mistakes():
    with pytest.raises(ValueError, match="there is no operator trn_dist_costs::nothing"):
        torch.neuron.register_operator_cost("trn_dist_costs::nothing")(mlp_cost)
    with pytest.raises(ValueError, match="aten::matmul is a composition of operators"):
        torch.neuron.register_operator_cost(torch.ops.aten.matmul.default)(mlp_cost)
    with pytest.raises(ValueError, match="has a kernel of its own for device neuron"):
        torch.neuron.register_operator_cost("aten::copy_")(mlp_cost)
    with pytest.raises(ValueError, match=r"matmul = \(1, 2, 3\): expected the sizes \(batch, m, k, n\)"):
        Cost(matmul=(1, 2, 3))
    with pytest.raises(ValueError, match="scalar_elements = -1: expected a number from 0 on"):
        Cost(scalar_elements=-1)

    @torch.library.custom_op("trn_dist_costs::wrong", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    torch.neuron.register_operator_cost("trn_dist_costs::wrong")(lambda x: 3)
    with pytest.raises(TypeError, match=r"trn_dist_costs::wrong must be a torch.neuron.OperatorCost, not int"):
        wrong(torch.ones(2, device="neuron"))
    torch.neuron.register_operator_cost("trn_dist_costs::wrong")(lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrong(torch.ones(2, device="neuron"))
