"""Attention: the fused path has the CPU's numbers and needs no square matrix; flex attention runs in its dense form."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def tensors(query_heads, kv_heads, value_size, length=40, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, query_heads, length, 16), (2, kv_heads, length, 16), (2, kv_heads, length, value_size)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def run(attention, inputs, device):
    q, k, v = (t.to(device, copy=True).requires_grad_() for t in inputs)
    out = attention(q, k, v)
    out.square().sum().backward()
    return [t.detach().cpu() for t in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("query_heads,kv_heads,value_size", [(4, 4, 16), (8, 2, 16), (4, 4, 24), (8, 2, 8)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_has_the_cpus_numbers(query_heads, kv_heads, value_size, causal, dtype):
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=query_heads != kv_heads)

    inputs = tensors(query_heads, kv_heads, value_size, dtype=dtype)
    for expected, actual in zip(run(attention, inputs, "cpu"), run(attention, inputs, "neuron"), strict=True):
        if value_size == 16:
            assert torch.equal(expected, actual)
        else:  # the CPU takes plain operators, the device its flash kernel
            rounding = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(expected, actual, rtol=rounding, atol=rounding)


def test_a_mask_goes_through_the_fused_path():
    mask = torch.rand(40, 40) > 0.3
    mask[:, 0] = True

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device), scale=0.3)

    inputs = tensors(4, 4, 16)
    for expected, actual in zip(run(attention, inputs, "cpu"), run(attention, inputs, "neuron"), strict=True):
        assert torch.equal(expected, actual)


def test_the_choice_of_kernels_is_heeded():
    q, k, v = (t.to("neuron") for t in tensors(4, 4, 16))
    for backend, wanted in ((SDPBackend.MATH, False), (SDPBackend.EFFICIENT_ATTENTION, True)):
        with sdpa_kernel(backend), torch.profiler.profile() as profile:
            F.scaled_dot_product_attention(q, k, v)
        names = {event.key for event in profile.key_averages()}
        assert ("aten::_scaled_dot_product_efficient_attention" in names) == wanted


@pytest.mark.parametrize("query_heads,kv_heads,value_size", [(4, 4, 16), (8, 2, 16), (4, 4, 8)])
def test_attention_needs_no_square_matrix(query_heads, kv_heads, value_size):
    length = 2048
    q, k, v = (t.to("neuron").requires_grad_() for t in tensors(query_heads, kv_heads, value_size, length))
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query_heads != kv_heads)
    out.sum().backward()
    matrix = 2 * query_heads * length * length * 4
    assert torch.neuron.max_memory_allocated() - before < matrix / 4


def test_flex_attention_forward_and_backward():
    def causal(batch, head, query, key):
        return query >= key

    mask = create_block_mask(causal, None, None, 128, 128, device="neuron")
    inputs = tensors(4, 4, 16, length=128)
    expected = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, "cpu")
    actual = run(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), inputs, "neuron")
    for left, right in zip(expected, actual, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_flex_attention_with_a_score_function():
    inputs = tensors(4, 2, 16, length=64)

    def attention(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01, enable_gqa=True)

    with torch.no_grad():
        expected = attention(*inputs)
        actual = attention(*(t.to("neuron") for t in inputs))
    torch.testing.assert_close(expected, actual.cpu(), rtol=1e-5, atol=1e-5)


def test_flex_attention_on_other_devices_is_as_before():
    q, k, v = (t.requires_grad_() for t in tensors(4, 4, 16))
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(q, k, v)
