"""Memory of the device: statistics under torch.cuda's keys, running out of it and going on, and giving it back."""

import gc
import itertools
import pickle
import random

import pytest
import torch

from trn_dist import _C

GIB = 1 << 30

# The keys that torch.cuda.memory_stats documents (torch 2.13), without those of cudaMallocAsync and oversized blocks.
FAMILIES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
DOCUMENTED_KEYS = {
    f"{family}.{pool}.{metric}"
    for family, pool, metric in itertools.product(
        FAMILIES, ("all", "small_pool", "large_pool"), ("current", "peak", "allocated", "freed")
    )
} | {
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "num_oom_rejections",
    *("oversize_allocations.current", "oversize_allocations.peak"),
    *("oversize_allocations.allocated", "oversize_allocations.freed"),
    *("oversize_segments.current", "oversize_segments.peak"),
    *("oversize_segments.allocated", "oversize_segments.freed"),
    "max_split_size",
}


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
    torch.neuron.empty_cache()
    torch.neuron.reset_peak_memory_stats()
    yield
    torch.neuron.set_per_process_memory_fraction(1.0)
    torch.neuron.empty_cache()


def empty(nbytes: int) -> torch.Tensor:
    """A tensor that takes no memory of this machine as long as nobody writes to it."""
    return torch.empty(nbytes, dtype=torch.uint8, device="neuron")


def limit(nbytes):
    """Lets the device reserve ``nbytes`` more than it has now."""
    total = torch.neuron.get_device_properties().total_memory
    torch.neuron.set_per_process_memory_fraction((torch.neuron.memory_reserved() + nbytes) / total)


def test_statistics_have_the_documented_keys():
    assert set(torch.neuron.memory_stats()) == DOCUMENTED_KEYS
    nested = torch.neuron.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == torch.neuron.memory_allocated()
    assert (
        torch.accelerator.memory_stats()["active_bytes.all.peak"]
        == torch.neuron.memory_stats()["active_bytes.all.peak"]
    )


def test_allocation_and_release_are_counted():
    before = torch.neuron.memory_allocated()
    t = empty(1 << 20)
    assert torch.neuron.memory_allocated() == before + (1 << 20)
    assert torch.neuron.memory_reserved() >= torch.neuron.memory_allocated()
    view = t[:10]
    del t
    assert torch.neuron.memory_allocated() == before + (1 << 20)
    del view
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.max_memory_allocated() >= before + (1 << 20)
    torch.neuron.reset_peak_memory_stats()
    assert torch.neuron.max_memory_allocated() == before
    assert torch.neuron.max_memory_reserved() == torch.neuron.memory_reserved()


def test_outputs_are_counted_and_scratch_is_not():
    t = torch.rand(512, 512, device="neuron")
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    values, indices = t.sort()
    assert torch.neuron.memory_allocated() == before + 512 * 512 * 12
    assert torch.neuron.max_memory_allocated() == before + 512 * 512 * 12
    del values, indices


def test_requests_are_rounded_to_size_classes():
    before = torch.neuron.memory_stats()
    t = empty(1)
    after = torch.neuron.memory_stats()
    assert after["requested_bytes.all.current"] - before["requested_bytes.all.current"] == 1
    assert after["allocated_bytes.small_pool.current"] - before["allocated_bytes.small_pool.current"] == 256
    del t


def test_small_and_large_pool():
    small, large, huge = empty(1000), empty(2 << 20), empty(100 << 20)
    sizes = [(s["segment_type"], s["total_size"]) for s in torch.neuron.memory_snapshot() if s["allocated_size"]]
    assert ("small", 2 << 20) in sizes and ("large", 32 << 20) in sizes and ("large", 100 << 20) in sizes
    del small, large, huge


def test_free_memory_is_kept_until_empty_cache():
    reserved = torch.neuron.memory_reserved()
    t = empty(64 << 20)
    del t
    assert torch.neuron.memory_reserved() == reserved + (64 << 20)
    torch.neuron.empty_cache()
    assert torch.neuron.memory_reserved() == reserved
    free, total = torch.neuron.mem_get_info()
    assert total == torch.neuron.get_device_properties().total_memory and free == total - reserved


def test_out_of_memory_says_what_is_there_and_leaves_the_device_usable():
    total = torch.neuron.get_device_properties().total_memory
    before = torch.neuron.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError) as error:
        empty(total + 1)
    message = str(error.value)
    for part in ("neuron out of memory. Tried to allocate", "neuron:0 has a total capacity of", "largest free block"):
        assert part in message
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.memory_stats()["num_ooms"] >= 1
    assert torch.ones(3, device="neuron").sum().item() == 3


def test_out_of_memory_names_the_biggest_tensors():
    big, bigger = empty(8 * GIB), empty(9 * GIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"9\.00 GiB.*8\.00 GiB"):
        empty(10 * GIB)
    del big, bigger


def test_out_of_memory_names_the_lines_that_made_them():
    torch.neuron.memory._record_memory_history()
    try:
        big = empty(20 * GIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"20\.00 GiB \(.*test_memory\.py:\d+ in empty\)"):
            empty(10 * GIB)
        assert "oom" in [entry["action"] for entry in torch.neuron.memory._snapshot()["device_traces"][0]]
    finally:
        torch.neuron.memory._record_memory_history(enabled=None)
    del big


def test_out_of_memory_in_an_operators_output():
    limit(40 << 20)
    t = empty(24 << 20)
    held = _C._arena_used_bytes()
    with pytest.raises(torch.OutOfMemoryError, match="allowed by set_per_process_memory_fraction") as error:
        torch.cat([t, t])
    del error
    assert _C._arena_used_bytes() == held
    del t


def test_a_retry_gives_free_segments_back_first():
    total = torch.neuron.get_device_properties().total_memory
    t = empty(total // 2 + GIB)
    del t
    retries = torch.neuron.memory_stats()["num_alloc_retries"]
    t = empty(total // 2 + 2 * GIB)
    assert torch.neuron.memory_stats()["num_alloc_retries"] == retries + 1
    del t


def test_filling_failing_and_freeing_a_thousand_times():
    limit(250 << 20)
    begin = torch.neuron.memory_stats(), _C._arena_used_bytes()
    for _ in range(1000):
        held = []
        try:
            while True:
                held.append(empty(30 << 20))
        except torch.OutOfMemoryError:
            pass
        assert len(held) == 8
        held.clear()
    torch.neuron.empty_cache()
    end = torch.neuron.memory_stats(), _C._arena_used_bytes()
    assert end[1] == begin[1]
    assert end[0]["allocated_bytes.all.current"] == begin[0]["allocated_bytes.all.current"]
    assert end[0]["reserved_bytes.all.current"] == begin[0]["reserved_bytes.all.current"]


def test_a_fragmented_pool_says_so():
    limit(96 << 20)
    pieces = [empty(8 << 20) for _ in range(12)]
    del pieces[::2]
    match = r"(48|49|50)\.\d+ MiB is reserved by PyTorch but unallocated; the largest free block is 8\.00 MiB"
    with pytest.raises(torch.OutOfMemoryError, match=match):
        empty(12 << 20)
    del pieces


def test_fraction_is_checked():
    for fraction in (0, -1, 1.5):
        with pytest.raises(ValueError, match="fraction must be above 0"):
            torch.neuron.set_per_process_memory_fraction(fraction)


def test_copies_views_and_graphs_give_their_memory_back():
    def use(size):
        x = torch.ones(size, device="neuron", requires_grad=True)
        copied, parts = x.detach().cpu().to("neuron:1"), (x.view(10, -1), x[1:], x.clone())
        (x * 2 + parts[0].sum()).sum().backward()
        return copied.add_(1).mul_(2)

    use(1000)
    before = [torch.neuron.memory_allocated(device) for device in (0, 1)]
    for size in (100, 1000, 100_000) * 10:
        use(size)
    assert [torch.neuron.memory_allocated(device) for device in (0, 1)] == before


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_million_random_allocations_leave_everything_as_it_was():
    chooser = random.Random(0)
    sizes = [
        chooser.choice((chooser.randint(1, 512), chooser.randint(1, 1 << 16), chooser.randint(1, 32 << 20)))
        for _ in range(4096)
    ]
    torch.neuron.empty_cache()
    begin = torch.neuron.memory_stats(), _C._arena_used_bytes()
    allocate = torch.UntypedStorage
    held = [None] * 256
    choose = chooser.randrange
    resident = []
    for i in range(1_000_000):
        slot = choose(256)
        held[slot] = None if held[slot] is not None and i & 1 else allocate(sizes[i & 4095], device="neuron")
        if i % 250_000 == 0:
            resident.append(resident_bytes())
    del held
    torch.neuron.empty_cache()
    end = torch.neuron.memory_stats(), _C._arena_used_bytes()
    for key, value in begin[0].items():
        if key.endswith(".current"):
            assert end[0][key] == value, key
    assert end[1] == begin[1]
    assert resident[-1] - resident[1] < 16 << 20


def test_pages_go_back_on_empty_cache():
    t = torch.ones(64 << 20, dtype=torch.uint8, device="neuron")
    full = resident_bytes()
    del t
    torch.neuron.empty_cache()
    assert full - resident_bytes() > 60 << 20


def test_memory_summary():
    t = empty(1 << 20)
    summary = torch.neuron.memory_summary()
    assert "neuron:0" in summary and "Allocated memory" in summary and "GPU reserved memory" not in summary
    assert "Reserved memory" in torch.neuron.memory_summary(abbreviated=True)
    del t


def test_history_and_snapshot():
    torch.neuron.memory._record_memory_history(max_entries=1000)
    try:
        t = empty(3 << 20)
        size = t.nbytes
        del t
        snapshot = torch.neuron.memory._snapshot()
    finally:
        torch.neuron.memory._record_memory_history(enabled=None)
    trace = snapshot["device_traces"][0]
    actions = [entry["action"] for entry in trace if entry["size"] >= size]
    assert "alloc" in actions and "free_completed" in actions and "segment_alloc" in actions
    allocation = next(entry for entry in trace if entry["action"] == "alloc" and entry["size"] >= size)
    names = [frame["name"] for frame in allocation["frames"]]
    assert "test_history_and_snapshot" in names and allocation["frames"][0].keys() == {"filename", "line", "name"}
    assert {"addr", "size", "stream", "time_us", "action", "frames"} <= allocation.keys()
    pickle.dumps(snapshot)
    segment = snapshot["segments"][0]
    assert {
        "address",
        "total_size",
        "stream",
        "segment_type",
        "allocated_size",
        "active_size",
        "blocks",
        "device",
    } <= segment.keys()


def test_history_keeps_the_last_entries():
    torch.neuron.memory._record_memory_history(max_entries=5)
    try:
        for _ in range(10):
            empty(100)
        assert len(torch.neuron.memory._snapshot()["device_traces"][0]) == 5
    finally:
        torch.neuron.memory._record_memory_history(enabled=None)
    assert torch.neuron.memory._snapshot()["device_traces"][0] == []


def test_snapshot_is_read_by_pytorchs_visualiser(tmp_path):
    from torch.cuda import _memory_viz

    torch.neuron.memory._record_memory_history()
    try:
        t = empty(1 << 20)
        torch.neuron.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.neuron.memory._record_memory_history(enabled=None)
    with open(tmp_path / "snapshot.pickle", "rb") as file:
        snapshot = pickle.load(file)
    assert "alloc" in _memory_viz.trace(snapshot)
    assert "1.0MiB" in _memory_viz.segsum(snapshot)
    del t
