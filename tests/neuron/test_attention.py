"""Attention: the fused path has the CPU's numbers and needs no square matrix; flex attention runs in its dense form."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out


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


def test_shapes_of_grouped_query_gradients_as_dtensor_and_compile_ask_for_them():
    with torch.device("meta"):
        q, k, v = torch.empty(2, 8, 32, 16), torch.empty(2, 4, 32, 16), torch.empty(2, 4, 32, 24)
        out, log_sumexp, seed = torch.empty(2, 8, 32, 24), torch.empty(2, 8, 32), torch.empty((), dtype=torch.int64)
        gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            out, q, k, v, None, out, log_sumexp, seed, seed, 0.0, [True, True, True, False]
        )
    assert [gradient.shape for gradient in gradients[:3]] == [q.shape, k.shape, v.shape]


def test_compiled_attention_with_smaller_values_may_be_viewed():
    def attend(q, k, v):
        # In a compiled graph `contiguous` is left out, by the strides that the operator's shape function gives.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(2, 33, -1)

    q, k, v = (torch.randn(2, 4, 33, size, device="neuron") for size in (24, 24, 16))
    assert torch.equal(torch.compile(attend, backend="neuron")(q, k, v), attend(q, k, v))


def packed(lengths, heads, seed):
    torch.manual_seed(seed)
    return torch.randn(sum(lengths), heads, 16)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_variable_length_attention(window, kv_heads):
    """Against one call for each sequence, with its mask written out; a sequence of none among them."""
    lengths = [5, 0, 12, 1]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = [packed(lengths, heads, seed) for seed, heads in enumerate((4, kv_heads, kv_heads))]

    def together(q, k, v):
        cumulative = bounds.to("neuron")
        return varlen_attn(q, k, v, cumulative, cumulative, 12, 12, window_size=window, enable_gqa=kv_heads != 4)

    def one_by_one(q, k, v):
        outputs = []
        for sequence in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
            length = len(sequence[0])
            if length == 0:
                continue
            offset = torch.arange(length) - torch.arange(length)[:, None]
            seen = torch.ones(length, length, dtype=torch.bool)
            if window[1] >= 0:
                seen &= offset <= window[1]
            if window[0] >= 0:
                seen &= offset >= -window[0]
            q1, k1, v1 = (t.transpose(0, 1)[None] for t in sequence)
            out = F.scaled_dot_product_attention(q1, k1, v1, attn_mask=seen, enable_gqa=kv_heads != 4)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    for expected, actual in zip(run(one_by_one, inputs, "cpu"), run(together, inputs, "neuron"), strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-5, atol=1e-5)


def test_variable_length_attention_into_a_tensor_and_with_fewer_keys():
    q, k, v = (packed([6, 6], 4, seed).to("neuron") for seed in range(3))
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32, device="neuron")
    used = torch.tensor([6, 2], dtype=torch.int32, device="neuron")
    whole, lse = varlen_attn(q, k, v, bounds, bounds, 6, 6, return_aux=AuxRequest(lse=True))
    out = torch.empty_like(q)
    varlen_attn_out(out, q, k, v, bounds, bounds, 6, 6)
    assert torch.equal(out, whole) and lse.shape == (4, 12)
    fewer = varlen_attn(q, k, v, bounds, bounds, 6, 6, seqused_k=used)
    assert torch.equal(fewer[:6], whole[:6]) and not torch.equal(fewer[6:], whole[6:])


def test_paged_keys_are_refused():
    q, k, v = (packed([6], 4, seed).to("neuron") for seed in range(3))
    bounds = torch.tensor([0, 6], dtype=torch.int32, device="neuron")
    table = torch.zeros(1, 1, dtype=torch.int32, device="neuron")
    with pytest.raises(NotImplementedError, match=r"no paged keys \(block_table\)"):
        varlen_attn(q, k[None], v[None], bounds, bounds, 6, 6, block_table=table, seqused_k=bounds[1:])
