"""What virtual time costs on this host: per operator, and as a share of a training step.

    python benchmarks/virtual_time.py

prints (1) nanoseconds to price and launch one operator in virtual time, measured inside C++ on a call's own tensors;
(2) an add of 16 elements on ``cpu`` and on ``neuron``; (3) the share of pricing in a step of a small Llama block
(forward, backward, AdamW), as operators a step times (1) over the step's host time.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

from trn_dist import _C, timing

REPEATS = 7


def median_us(call, loops: int) -> float:
    """Median over :data:`REPEATS` runs of one call's time, in microseconds."""
    for _ in range(loops // 10 + 1):
        call()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(loops):
            call()
        times.append((time.perf_counter() - begin) / loops * 1e6)
        timing.mark_step()  # drops the records, as a training loop does
    return statistics.median(times)


class Block(torch.nn.Module):
    """Attention and a gated MLP, of width 256 with 8 heads: a layer of TorchTitan's Llama 3 debug model."""

    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def main() -> None:
    torch.set_num_threads(1)
    a = torch.randn(16, device="neuron")
    matrix = torch.randn(64, 64, device="neuron")
    print("pricing and launching one operator, inside C++ (target: at most 150 ns)")
    costs = {}
    for name, tensors in {"aten::add": [a, a], "aten::mm": [matrix, matrix], "aten::exp": [a]}.items():
        costs[name] = min(_C._time_pricing(name, tensors, 200_000) for _ in range(REPEATS))
        print(f"  {name:<12} {costs[name]:6.0f} ns")
        timing.mark_step()

    on_cpu = torch.randn(16)
    cpu_us, neuron_us = median_us(lambda: on_cpu + on_cpu, 20_000), median_us(lambda: a + a, 20_000)
    print(f"add of 16 elements: cpu {cpu_us:.2f} us, neuron {neuron_us:.2f} us, overhead {neuron_us - cpu_us:.2f} us")

    model = torch.nn.Sequential(*(Block() for _ in range(6))).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1, 256, 256, device="neuron")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step_us = median_us(step, 3)
    step()
    times = timing.mark_step()
    operators = sum(operator.count for operator in times.operators)
    share = operators * costs["aten::add"] / 1e3 / step_us
    print(
        f"six blocks of the Llama debug model: {operators} operators, {step_us / 1e3:.1f} ms on this host, "
        f"pricing {100 * share:.2f} % of it (target: at most 5 %); predicted on {timing.cluster().name}: "
        f"{times.time_ps / 1e9:.3f} ms"
    )
    print(times.table())

    with tempfile.TemporaryDirectory() as folder:
        timing.start_trace(folder)

        def traced_step() -> None:
            step()
            timing.flush_trace()

        traced_us = median_us(traced_step, 3)
    print(f"traced: {traced_us / 1e3:.1f} ms a step, {100 * (traced_us / step_us - 1):+.1f} % (target: below 10 %)")


if __name__ == "__main__":
    main()
