"""Each fault again and again, without one hang or leftover: TRN_FAULT_REPEATS times, 100 by default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.c10d import leftovers, ranks, test_deadlocks, test_failures

REPEATS = int(os.environ.get("TRN_FAULT_REPEATS", "100"))


def store_port() -> int:
    """Of a store for ranks that make their groups themselves. Kept until the test ends."""
    _servers.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _servers[-1].port


_servers: list[dist.TCPStore] = []

# A fault: how many ranks, the function, its arguments, and options of ranks.outcomes.
Fault = tuple[int, Callable[..., Any], Callable[[Path], tuple[Any, ...]], dict[str, Any]]
FAULTS: dict[str, Fault] = {
    **{
        f"disagree in {how}": (4, test_failures.disagree, lambda _, how=how: (how,), {})  # type: ignore[misc]
        for how in ("operation", "shape", "large shape", "dtype", "root", "reduce op", "small and large", "splits")
    },
    "another order": (4, test_failures.other_order, lambda _: (), {}),
    "another count": (4, test_failures.another_count, lambda _: (), {}),
    **{
        f"dies {when}": (4, test_failures.one_dies, lambda _, when=when: (when,), {})  # type: ignore[misc]
        for when in ("before", "in the middle", "exits")
    },
    "dies between": (4, test_failures.one_dies_between, lambda _: (), {}),
    "sender dies": (2, test_failures.sender_dies, lambda _: (), {}),
    "stopped and continued": (3, test_failures.stopped, lambda _: (), {}),
    "leaves": (3, test_failures.one_leaves, lambda _: (), {}),
    "late": (3, test_failures.one_is_late, lambda _: (), {"timeout_s": 1.0}),
    "never joins": (3, test_failures.does_not_join, lambda _: (store_port(),), {"backend": ""}),
    "destroyed with work pending": (2, test_failures.destroyed_with_work_pending, lambda _: (), {}),
    "aborted": (3, test_failures.aborted, lambda _: (), {}),
    "aborted from a thread": (3, test_failures.aborted_from_a_thread, lambda _: (), {}),
    "shrinks": (3, test_failures.shrinks, lambda _: (1, True), {}),
    "interrupted": (2, test_failures.interrupted, lambda _: (), {}),
    "forked": (2, test_failures.forked, lambda _: (), {}),
    "store goes away": (3, test_failures.store_goes_away, lambda _: (store_port(),), {"backend": ""}),
    "no descriptors": (2, test_failures.without_descriptors, lambda _: (), {}),
    "joins without descriptors": (
        2,
        test_failures.joins_without_descriptors,
        lambda _: (store_port(), 0),
        {"backend": ""},
    ),
    "all killed": (3, test_failures.killed_together, lambda folder: (str(folder / "found"),), {}),
    "deadlock across groups": (3, test_deadlocks.across_groups, lambda _: (), {}),
    "deadlock by order": (2, test_deadlocks.opposite_orders, lambda _: (), {}),
    "deadlock of messages": (2, test_deadlocks.head_to_head, lambda _: (), {}),
    "deadlock by count": (2, test_deadlocks.one_too_few, lambda _: (), {}),
    "no deadlock": (2, test_deadlocks.comes_late, lambda _: (), {}),
}
# In which no rank may fail.
HARMLESS = {
    "stopped and continued",
    "destroyed with work pending",
    "aborted",
    "interrupted",
    "forked",
    "no descriptors",
    "no deadlock",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_many_times(name: str, tmp_path: Path) -> None:
    size, fn, arguments, options = FAULTS[name]
    before = leftovers.find()
    slowest_s = 0.0
    for attempt in range(REPEATS):
        begin = time.monotonic()
        # A rank that hangs fails the test: ranks.outcomes has a deadline far below the groups' time-outs.
        results = ranks.outcomes(size, fn, *arguments(tmp_path), **{"timeout_s": 300.0, **options})
        slowest_s = max(slowest_s, time.monotonic() - begin)
        _servers.clear()
        leftovers.assert_none(before)
        where = f"{name}, attempt {attempt + 1} of {REPEATS}: {results}"
        for result in results:
            # An error that is meant, an answer, or a death that is meant; never an error of another kind.
            assert result.error_type in ("", "DistBackendError", "DistStoreError", "RuntimeError"), where
        if name in HARMLESS:
            assert not any(result.error for result in results), where
    print(f"{name}: {REPEATS} times, the slowest took {slowest_s:.1f} s")
