"""``trn_dist.testing.ranks``: tests on a warm pool of ranks. PyTorch's own base class for such tests, too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

from trn_dist.testing import RankFailed, ranks, run_on_ranks


@pytest.mark.parametrize("factor", [1.0, 2.5])
@ranks(4)
def test_parameters_fixtures_and_a_group(factor: float, tmp_path: Path) -> None:
    x = torch.full((3,), factor, device="neuron")
    dist.all_reduce(x)
    assert x.tolist() == [4 * factor] * 3
    assert x.device.index == dist.get_rank() == int(os.environ["LOCAL_RANK"])
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4


class TestInAClass:
    @ranks(4)
    def test_method(self) -> None:
        assert dist.get_world_size() == 4


@ranks(2, backend="")
def test_without_a_group() -> None:
    assert not dist.is_initialized() and os.environ["WORLD_SIZE"] == "2"


def draw() -> float:
    return torch.rand((), device="neuron").item()


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail_on(bad: int, how: str) -> None:
    if dist.get_rank() == bad:
        if how == "leave":
            os._exit(7)
        if how == "skip":
            pytest.skip("no such core")
        if how == "sleep":
            time.sleep(60)
        raise ValueError("the learning rate is negative")
    x = torch.ones(1, device="neuron")
    dist.all_reduce(x)
    x.item()


def test_ranks_stay_and_draw_alike_each_time() -> None:
    first, second = run_on_ranks(rank_and_pid, 4), run_on_ranks(rank_and_pid, 4)
    assert first == second and [rank for rank, _ in first] == [0, 1, 2, 3]
    assert run_on_ranks(draw, 4) == run_on_ranks(draw, 4)
    begin = time.monotonic()
    for _ in range(10):
        run_on_ranks(rank_and_pid, 4)
    assert (time.monotonic() - begin) / 10 < 0.7, "0.05 s on two idle cores"


def test_failures_name_the_rank_and_the_next_test_runs() -> None:
    before = run_on_ranks(rank_and_pid, 4)
    with pytest.raises(
        RankFailed, match=r"rank 2 of 4: ValueError: the learning rate is negative\nTraceback"
    ) as caught:
        run_on_ranks(fail_on, 4, 2, "raise")
    assert "in fail_on" in str(caught.value) and "in _carry_out" not in str(caught.value)
    assert run_on_ranks(rank_and_pid, 4) != before, "ranks are replaced after a failure"
    with pytest.raises(RankFailed, match="rank 1 of 4: left with exit code 7"):
        run_on_ranks(fail_on, 4, 1, "leave")
    with pytest.raises(RankFailed, match=r"not over after 0\.5 s on rank"):
        run_on_ranks(fail_on, 4, 3, "sleep", deadline_s=0.5)
    with pytest.raises(pytest.skip.Exception, match="no such core"):
        run_on_ranks(fail_on, 4, 0, "skip")
    assert len(run_on_ranks(rank_and_pid, 4)) == 4


def test_what_cannot_be_sent_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="defined inside a function"):
        run_on_ranks(inner, 2)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        run_on_ranks(fail_on, 2, (item for item in []))
    with pytest.raises(ValueError, match="at least 1 rank"):
        ranks(0)


@pytest.mark.slow
def test_a_foreign_project(tmp_path: Path) -> None:
    """A test file of a user's, in a folder that is no package, and a failing one: pytest's report names the rank."""
    (tmp_path / "test_mine.py").write_text(
        "import torch.distributed as dist\n"
        "from trn_dist.testing import ranks\n"
        "@ranks(2)\n"
        "def test_good():\n"
        "    assert dist.get_world_size() == 2\n"
        "@ranks(2)\n"
        "def test_bad():\n"
        "    assert dist.get_rank() == 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "rank 1 of 2: AssertionError" in done.stdout and 'test_mine.py", line 8, in test_bad' in done.stdout


@pytest.mark.slow
class TestPyTorchsOwn(MultiProcessTestCase):
    """``torch.testing._internal.common_distributed``: processes started by spawn, one a rank."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_all_reduce(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("neuron", store=store, rank=self.rank, world_size=self.world_size)
        torch.accelerator.set_device_index(self.rank)
        x = torch.full((3,), float(self.rank + 1), device="neuron")
        dist.all_reduce(x)
        self.assertEqual(x, torch.full((3,), 3.0, device="neuron"))
        dist.destroy_process_group()
