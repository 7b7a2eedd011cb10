"""Random numbers: reproducible, independent of the CPU's generator, and the same however a tensor is sharded."""

import os
import subprocess
import sys

import pytest
import torch

DRAWS = {
    "uniform": lambda t: t.uniform_(-1, 3),
    "normal": lambda t: t.normal_(1, 2),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(),
    "random": lambda t: t.random_(0, 100),
    "log_normal": lambda t: t.log_normal_(),
    "cauchy": lambda t: t.cauchy_(),
    "geometric": lambda t: t.geometric_(0.4),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def set_offset(offset):
    state = torch.neuron.get_rng_state()
    state[8:] = torch.tensor([offset]).view(torch.uint8)
    torch.neuron.set_rng_state(state)


@pytest.mark.parametrize("name", DRAWS)
def test_same_seed_gives_the_same_draw(name):
    first = DRAWS[name](torch.empty(100, device="neuron"))
    second = DRAWS[name](torch.empty(100, device="neuron"))
    torch.manual_seed(0)
    again = DRAWS[name](torch.empty(100, device="neuron"))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("name", DRAWS)
def test_a_shard_is_drawn_as_the_slice_of_the_whole(name):
    whole = DRAWS[name](torch.empty(16, 6, device="neuron"))
    for ranks in (2, 4, 8):
        rows = 16 // ranks
        for rank in range(ranks):
            torch.manual_seed(0)
            set_offset(rank * rows * 6)
            assert torch.equal(
                DRAWS[name](torch.empty(rows, 6, device="neuron")), whole[rank * rows : (rank + 1) * rows]
            )


def test_a_draw_does_not_depend_on_strides():
    whole = torch.empty(8, 6, device="neuron").normal_()
    torch.manual_seed(0)
    assert torch.equal(torch.empty(6, 8, device="neuron").t().normal_(), whole)


def test_offset_advances_by_elements_rounded_up_to_four():
    torch.empty(5, device="neuron").uniform_()
    assert torch.neuron.get_rng_state()[8:].view(torch.int64).item() == 8


def test_draws_do_not_touch_the_cpu_generator():
    before = torch.get_rng_state()
    t = torch.ones(20, device="neuron")
    torch.randperm(10, device="neuron")
    torch.multinomial(t, 3)
    torch.poisson(t)
    torch.nn.functional.dropout(t, 0.5)
    torch.nn.functional.rrelu(t, training=True)
    torch.binomial(t, t * 0.5)
    torch._standard_gamma(t)
    torch.normal(t, t)
    torch.randn(3, device="neuron")
    torch.rand_like(t)
    torch.randint_like(t, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cpu_generator_does_not_touch_draws():
    first = torch.randperm(50, device="neuron")
    torch.manual_seed(0)
    torch.rand(7)
    assert torch.equal(torch.randperm(50, device="neuron"), first)


def test_generator_object():
    generator = torch.Generator(device="neuron").manual_seed(3)
    assert generator.device == torch.device("neuron:0") and generator.initial_seed() == 3
    before = torch.neuron.get_rng_state()
    first = torch.randn(4, device="neuron", generator=generator)
    state = generator.get_state()
    second = torch.randperm(9, device="neuron", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.randperm(9, device="neuron", generator=generator), second)
    generator.manual_seed(3)
    assert torch.equal(torch.randn(4, device="neuron", generator=generator), first)
    assert torch.equal(torch.neuron.get_rng_state(), before)
    clone = generator.clone_state()
    assert torch.equal(
        torch.rand(4, device="neuron", generator=clone), torch.rand(4, device="neuron", generator=generator)
    )


def test_generator_of_the_wrong_device_is_refused():
    with pytest.raises(
        RuntimeError, match=r"[Ee]xpected a '(neuron|privateuseone)' device type for generator but found 'cpu'"
    ):
        torch.randn(4, device="neuron", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="'neuron' device type for generator but found 'cpu'"):
        torch.randperm(4, device="neuron", generator=torch.Generator())


def test_state_is_sixteen_bytes_and_bad_states_are_refused():
    assert torch.neuron.get_rng_state().numel() == 16
    with pytest.raises(ValueError, match="16 bytes"):
        torch.neuron.set_rng_state(torch.zeros(8, dtype=torch.uint8))


def test_fork_rng_restores_the_device():
    before = torch.neuron.get_rng_state()
    with torch.random.fork_rng(device_type="neuron", devices=[0]):
        torch.randn(3, device="neuron")
    assert torch.equal(torch.neuron.get_rng_state(), before)


def test_each_device_has_a_generator_and_manual_seed_reaches_all():
    torch.manual_seed(11)
    assert [g.initial_seed() for g in torch.neuron.default_generators[:3]] == [11, 11, 11]
    torch.randn(3, device="neuron:1")
    assert torch.neuron.get_rng_state(0)[8:].view(torch.int64).item() == 0
    assert torch.neuron.get_rng_state(1)[8:].view(torch.int64).item() == 4
    torch.neuron.manual_seed(12)
    assert torch.neuron.initial_seed() == 12 and torch.neuron.default_generators[1].initial_seed() == 11


def test_states_and_seeds_of_all_devices():
    torch.neuron.manual_seed_all(7)
    states = torch.neuron.get_rng_state_all()
    assert len(states) == torch.neuron.device_count()
    drawn = torch.randn(3, device="neuron:1")
    torch.neuron.set_rng_state_all(states)
    assert torch.equal(torch.randn(3, device="neuron:1"), drawn)
    seeds = []
    for _ in range(2):
        torch.neuron.seed_all()
        seeds.append({generator.initial_seed() for generator in torch.neuron.default_generators})
    assert [len(seed) for seed in seeds] == [1, 1] and seeds[0] != seeds[1]


def test_generators_of_two_devices_with_one_seed_draw_the_same():
    draws = []
    for device in ("neuron:0", "neuron:1"):
        generator = torch.Generator(device).manual_seed(5)
        generator.set_offset(8)
        assert generator.device == torch.device(device) and generator.get_offset() == 8
        draws.append(torch.randn(6, device=device, generator=generator).cpu())
    assert torch.equal(*draws)


def test_moments():
    n = 200_000
    normal = torch.randn(n, device="neuron")
    uniform = torch.rand(n, device="neuron")
    assert abs(normal.mean().item()) < 0.01 and abs(normal.std().item() - 1) < 0.01
    assert abs(uniform.mean().item() - 0.5) < 0.005 and uniform.min().item() >= 0 and uniform.max().item() < 1
    assert abs(torch.empty(n, device="neuron").bernoulli_(0.25).mean().item() - 0.25) < 0.005
    assert abs(torch.empty(n, device="neuron").exponential_(2).mean().item() - 0.5) < 0.01
    # Kolmogorov-Smirnov against the uniform distribution: one seed in a thousand passes 1.95 / sqrt(n).
    steps = torch.arange(1, n + 1) / n
    assert (uniform.cpu().sort().values - steps).abs().max().item() < 1.95 / n**0.5


def test_low_precision_uniform_never_reaches_its_upper_bound():
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.empty(100_000, device="neuron", dtype=dtype).uniform_().max().item() < 1


def test_cpu_rng_draws_what_the_cpu_draws():
    program = """
import torch
import torch.nn.functional as F
def draws(device):
    torch.manual_seed(1)
    t = torch.full((37,), 0.5, device=device)
    return [torch.randn(37, device=device), torch.rand(5, device=device), torch.randperm(9, device=device),
            F.dropout(t, 0.5), torch.bernoulli(t), torch.multinomial(t, 4), torch.randint(7, (5,), device=device),
            torch.nn.init.trunc_normal_(torch.empty(8, device=device)), torch.nn.Linear(3, 3, device=device).weight]
for a, b in zip(draws("cpu"), draws("neuron")):
    assert b.is_neuron and torch.equal(a, b.cpu()), (a, b)
print("same")
"""
    environment = {**os.environ, "TRN_CPU_RNG": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout == "same\n", run.stderr
