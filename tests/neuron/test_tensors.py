"""Tensors on the device: creation, views, copies, resizing, storages, and the errors of bad use."""

import copy
import io

import pytest
import torch


def on_neuron(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device="neuron")


def test_new_tensor_is_on_the_current_device():
    assert torch.empty(3, device="neuron").device == torch.device("neuron:0")
    with torch.neuron.device(2):
        assert torch.empty(3, device="neuron").device == torch.device("neuron:2")
    assert torch.ones(2, device="neuron:1").device == torch.device("neuron:1")
    assert torch.neuron.current_device() == 0


def test_result_is_on_its_arguments_device_not_the_current_one():
    a = torch.ones(3, device="neuron:3")
    assert (a + a).device == torch.device("neuron:3")
    assert a.neg().device == torch.device("neuron:3")
    assert torch.neuron.memory_stats(3)["allocation.all.current"] >= 1


def test_accelerator_is_neuron():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("neuron")
    assert torch.accelerator.device_count() == torch.neuron.device_count()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
)
def test_dtypes_survive_the_round_trip(dtype):
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    moved = values.to("neuron")
    assert moved.is_neuron and moved.dtype == dtype
    assert torch.equal(moved.cpu(), values)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t.view(2, 12),
        lambda t: t.reshape(3, 2, 4).transpose(0, 2),
        lambda t: t.expand(5, 4, 6),
        lambda t: t.unfold(1, 3, 2),
        lambda t: t.diagonal(),
        lambda t: t.as_strided((2, 2), (6, 2), 3),
        lambda t: t.split(2)[1],
        lambda t: t.view(torch.int32),
        lambda t: t.unsqueeze(0).squeeze(0).permute(1, 0),
    ],
)
def test_views_share_memory(view):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    moved = base.to("neuron")
    expected, actual = view(base), view(moved)
    assert actual.stride() == expected.stride() and actual.storage_offset() == expected.storage_offset()
    assert actual.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
    moved.fill_(7)
    base.fill_(7)
    assert torch.equal(actual.cpu(), expected)


def test_devices_have_memory_of_their_own():
    tensors = [torch.full((100,), i, device=f"neuron:{i % 2}") for i in range(20)]
    assert [t.device.index for t in tensors] == [0, 1] * 10
    assert len({t.data_ptr() for t in tensors}) == 20 and [t[0].item() for t in tensors] == list(range(20))
    moved = tensors[0].to("neuron:1")
    assert moved.data_ptr() != tensors[0].data_ptr() and torch.equal(moved.to("neuron:0"), tensors[0])
    assert moved.to("neuron:1") is moved and moved.to("neuron:1", copy=True).data_ptr() != moved.data_ptr()


def test_copies_in_every_direction():
    source = torch.arange(12.0).reshape(3, 4)
    first = torch.zeros(4, 3, device="neuron").t()
    first.copy_(source)
    other = torch.zeros(3, 4, device="neuron:1", dtype=torch.bfloat16)
    other.copy_(first)
    back = torch.zeros(3, 4)
    back.copy_(other, non_blocking=True)
    assert torch.equal(back, source)
    assert first.stride() == (1, 3)


def test_copy_between_overlapping_views_is_refused_as_on_the_cpu():
    for device in ("cpu", "neuron"):
        t = torch.arange(6.0, device=device)
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            t[1:].copy_(t[:-1])


def test_copy_into_an_expanded_tensor_is_refused():
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, device="neuron").expand(4).copy_(torch.ones(4, device="neuron"))


def test_inplace_operators_see_overlap():
    t = torch.arange(6.0, device="neuron")
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.add(t[:-1], 1, out=t[1:])


def test_copy_converts_conjugates_and_negatives():
    values = torch.tensor([1 + 2j, 3 - 1j])
    moved = values.to("neuron").conj()
    assert moved.is_conj()
    assert torch.equal(moved.cpu().resolve_conj(), values.conj().resolve_conj())
    assert torch.equal(moved.imag.cpu(), values.conj().imag)
    assert torch.equal(moved.clone().resolve_conj().cpu(), values.conj().resolve_conj())


def test_resize_keeps_the_elements():
    t = on_neuron(1, 2, 3)
    t.resize_(2)
    t.resize_(4)
    assert t[:3].tolist() == [1, 2, 3]
    t.resize_(2, 2, 1, 1, memory_format=torch.channels_last)
    assert t.is_contiguous(memory_format=torch.channels_last)


def test_set_shares_the_storage():
    source = torch.arange(6.0, device="neuron")
    t = torch.empty(0, device="neuron")
    t.set_(source.untyped_storage(), 2, (2, 2), (1, 2))
    assert t.tolist() == [[2, 4], [3, 5]]
    assert t.is_set_to(t) and not t.is_set_to(source)
    t.set_(source)
    assert t.is_set_to(source)
    t.set_()
    assert t.numel() == 0 and source.numel() == 6


def test_moving_a_module():
    module = torch.nn.Linear(2, 2)
    module.weight.grad = torch.ones(2, 2)
    moved = module.to("neuron")
    assert moved.weight.is_neuron and moved.weight.grad.is_neuron and moved.weight.requires_grad
    parameter = moved.bias
    moved.bias.data = torch.ones(2, device="neuron")
    assert parameter.tolist() == [1, 1]
    assert not module.cpu().weight.is_neuron


def test_storage_can_be_freed_and_revived():
    before = torch.neuron.memory_allocated()
    t = torch.ones(1024, device="neuron")
    storage = t.untyped_storage()
    storage.resize_(0)
    assert torch.neuron.memory_allocated() == before
    storage.resize_(4096)
    assert t.fill_(2).sum().item() == 2048
    assert storage.device == torch.device("neuron:0")


def test_untyped_storage_copies_across_devices():
    source = torch.arange(4.0)
    storage = torch.UntypedStorage(16, device="neuron")
    storage.copy_(source.untyped_storage())
    assert torch.empty(0, device="neuron").set_(storage, 0, (4,), (1,)).tolist() == [0, 1, 2, 3]
    assert storage.cpu().tolist() == source.untyped_storage().tolist()


def test_out_tensor_is_resized():
    out = torch.empty(0, device="neuron")
    data = torch.add(on_neuron(1, 2), 1, out=out)
    assert data is out and out.tolist() == [2, 3] and out.is_neuron


def test_out_tensor_with_gaps_is_written_in_place_or_resized():
    results = []
    for device in ("cpu", "neuron"):
        x = -torch.arange(12.0).reshape(2, 2, 3).to(device)
        out = torch.full((2, 2, 6), 7.0, device=device)
        torch.abs(x, out=out[:, :, ::2])
        with pytest.warns(UserWarning, match="was resized"):
            torch.abs(x, out=out[:, :, ::3])
        results.append(out.cpu())
    assert torch.equal(*results)


def test_operators_of_lists_and_of_numbers():
    v = on_neuron(1, 2)
    assert [t.tolist() for t in torch._foreach_add((v, v), (v, v))] == [[2, 4], [2, 4]]
    indices = torch.triu_indices(2, 2, device="neuron")
    assert indices.is_neuron and indices.tolist() == [[0, 0, 1], [0, 1, 1]]


def test_inplace_operator_returns_its_tensor():
    t = on_neuron(1, 2)
    assert t.add_(1) is t
    assert t.t_() is t


def test_deepcopy_and_pickle():
    shared = torch.arange(4.0, device="neuron")
    pair = copy.deepcopy([shared, shared[1:]])
    pair[0][1] = 9
    assert pair[1][0].item() == 9 and shared[1].item() == 1
    module = copy.deepcopy(torch.nn.Linear(2, 2, device="neuron"))
    assert module.weight.is_neuron and module.weight.requires_grad


def test_save_and_load():
    buffer = io.BytesIO()
    tensors = {"a": on_neuron(1, 2, 3), "b": torch.ones(2, device="neuron:1", dtype=torch.bfloat16)}
    torch.save(tensors, buffer)

    def load(**options):
        buffer.seek(0)
        return torch.load(buffer, **options)

    assert load()["a"].device == torch.device("neuron:0") and load()["b"].device == torch.device("neuron:1")
    assert load(map_location="cpu")["b"].device.type == "cpu"
    assert load(map_location={"neuron:1": "neuron:2"})["b"].device == torch.device("neuron:2")
    assert load(map_location="neuron:3")["a"].tolist() == [1, 2, 3]
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    assert load(map_location="neuron").is_neuron


def test_storages_are_located_by_name():
    for device, tag in (("neuron", "neuron:0"), ("neuron:1", "neuron:1")):
        assert torch.serialization.location_tag(torch.UntypedStorage(4, device=device)) == tag
        restored = torch.serialization.default_restore_location(torch.ones(2).untyped_storage(), tag)
        assert restored.device == torch.device(tag)


class AsOldFilesHaveIt:
    """A tensor of the device as a file of PyTorch 2.0 and before holds it: an array of NumPy."""

    def __reduce__(self):
        values = torch.arange(3.0).numpy()
        return torch._utils._rebuild_device_tensor_from_numpy, (values, torch.float32, "neuron:1", False)


def test_load_of_an_old_file():
    buffer = io.BytesIO()
    torch.save(AsOldFilesHaveIt(), buffer)
    for location, device in ((None, "neuron:1"), ("cpu", "cpu")):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False, map_location=location)
        assert loaded.device == torch.device(device) and loaded.tolist() == [0, 1, 2]


def test_loading_to_a_device_that_is_not_there_says_so():
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer)
    buffer.seek(0)
    with pytest.raises(RuntimeError, match="neuron"):
        torch.load(buffer, map_location="neuron:99")


def test_pinned_memory():
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert pinned[1:].is_pinned() and pinned[::2].is_pinned() and pinned.view(2, 2).is_pinned()
    storage = torch.ones(4).untyped_storage()
    assert not storage.is_pinned() and storage.pin_memory().is_pinned()
    for shared in (pinned.untyped_storage(), pinned.untyped_storage()[8:]):
        assert torch.empty(0).set_(shared, 0, (2,), (1,)).is_pinned()
    assert pinned.to("neuron", non_blocking=True).tolist() == [1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="dense CPU tensors can be pinned"):
        torch.empty(3, device="neuron", pin_memory=True)


def test_pin_memory_in_a_data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = list(torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=1))
    assert all(batch[0].is_pinned() for batch in batches)
    assert torch.cat([batch[0] for batch in batches]).tolist() == list(range(8))


def test_types_and_methods_named_after_the_device():
    names = {
        torch.float32: "Float",
        torch.float16: "Half",
        torch.int64: "Long",
        torch.uint8: "Byte",
        torch.bool: "Bool",
    }
    for dtype, name in names.items():
        assert torch.empty(1, dtype=dtype, device="neuron").type() == f"torch.neuron.{name}Tensor"
    for device in (1, "neuron:1", torch.device("neuron:1")):
        assert torch.ones(2).neuron(device).device == torch.device("neuron:1")
    storage = torch.ones(2).untyped_storage()
    assert storage.neuron().is_neuron and not storage.is_neuron


def test_packed_sequences():
    sequences = [torch.ones(length, 4) for length in (3, 2)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences)
    moved = packed.neuron()
    assert moved.is_neuron and moved.data.is_neuron and not packed.is_neuron
    lstm = torch.nn.LSTM(4, 5).requires_grad_(False)
    expected, _ = lstm(packed)
    output, (hidden, cell) = lstm.to("neuron")(packed.to("neuron"))
    assert output.is_neuron and hidden.is_neuron and cell.is_neuron
    torch.testing.assert_close(output.data.cpu(), expected.data)


def test_printing():
    assert repr(on_neuron(1, 2)) == "tensor([1., 2.], device='neuron:0')"
    assert "neuron" in repr(torch.empty(0, device="neuron"))


def test_scalars_and_zero_dimensional_cpu_tensors_mix():
    t = on_neuron(1, 2)
    assert (t * torch.tensor(3.0)).tolist() == [3, 6]
    assert (torch.tensor(3.0) * t).is_neuron
    assert torch.where(t > 1, t, 0.0).tolist() == [0, 2]


def test_indexing_by_a_cpu_tensor():
    t = torch.arange(6.0, device="neuron")
    assert t[torch.tensor([5, 0])].tolist() == [5, 0]
    t[torch.tensor([1])] = 9
    assert t[1].item() == 9
    assert t[t > 4].tolist() == [9, 5]


def test_mixing_devices_is_refused():
    with pytest.raises(RuntimeError, match=r"same device.*neuron:0 and cpu"):
        on_neuron(1, 2) + torch.ones(2)
    with pytest.raises(RuntimeError, match=r"same device.*neuron:0 and neuron:1"):
        on_neuron(1, 2) + torch.ones(2, device="neuron:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([on_neuron(1), torch.ones(1)])
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.Linear(2, 2)(on_neuron(1, 2))
    with pytest.raises(RuntimeError, match="device"):
        torch.add(torch.ones(2), 1, out=torch.empty(2, device="neuron"))


def test_a_device_that_is_not_there_is_refused():
    count = torch.neuron.device_count()
    for use in (
        lambda: torch.empty(1, device=f"neuron:{count}"),
        lambda: torch.ones(1).to(f"neuron:{count}"),
        lambda: torch.neuron.set_device(count),
        lambda: torch.neuron.memory_allocated(count),
        lambda: torch.neuron.set_device(-3),
    ):
        with pytest.raises(RuntimeError, match=rf"invalid device ordinal.*{count} logical NeuronCores"):
            use()
    with pytest.raises(ValueError, match="Expected a neuron device"):
        torch.neuron.set_device("cpu")


def test_wrong_dtype_errors_are_the_cpus():
    def message(device):
        with pytest.raises(RuntimeError) as error:
            torch.ones(2, 2, device=device) @ torch.ones(2, 2, dtype=torch.int64, device=device)
        return str(error.value)

    assert message("neuron") == message("cpu")


def test_a_failed_operator_leaves_its_arguments_as_they_were():
    t = on_neuron(1, 2, 3)
    with pytest.raises(RuntimeError):
        t.view(2)
    with pytest.raises(IndexError):
        t.sum(3)
    with pytest.raises(RuntimeError):
        t.add_(torch.ones(2, 3, device="neuron"))
    assert t.tolist() == [1, 2, 3]


def test_dlpack_to_and_from_the_host():
    for t in (torch.ones(2, 3, dtype=torch.int32, device="neuron"), torch.randn(3, 4, device="neuron").t()):
        again = torch.from_dlpack(t)
        assert again.dtype == t.dtype and again.stride() == t.stride() and torch.equal(again, t)
    t = torch.arange(4.0, device="neuron:1")
    for again in (torch.from_dlpack(t), torch.from_dlpack(torch.utils.dlpack.to_dlpack(t))):
        again[0] += 5
        assert again.device == t.device and again[0].item() == t[0].item()
    assert t[0].item() == 10


def test_numpy_needs_a_copy_to_the_host():
    with pytest.raises(TypeError, match="can't convert neuron:0 device type tensor to numpy"):
        on_neuron(1).numpy()


def test_histc_of_integers():
    # As on CUDA; the CPU has it for floating point alone. Mixture-of-experts routing counts tokens with it.
    experts = torch.tensor([0, 3, 3, 1, 7, 3], device="neuron")
    counts = torch.histc(experts, bins=8, min=0, max=8)
    assert counts.dtype == torch.int64 and counts.tolist() == [1, 1, 0, 3, 0, 0, 0, 1]
    assert torch.histc(experts.int(), bins=4, min=0, max=0).tolist() == [2, 3, 0, 1]
