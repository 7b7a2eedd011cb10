"""Runs from start to end: output, exit codes, failures, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.runs import Run, trn, write
from trn_dist.launcher import LaunchError, zygote


def test_a_rank_is_like_a_fresh_interpreter(tmp_path: Path) -> None:
    """What a script relies on without thinking: ``__main__``, exit handlers, threads, open files, random numbers."""
    write(
        tmp_path / "ordinary.py",
        """
        import atexit, ctypes, os, pickle, random, sys, threading, time
        import numpy as np
        import torch

        class Config: pass
        rank = os.environ["RANK"]
        assert sys.modules["__main__"].Config is Config
        assert type(pickle.loads(pickle.dumps(Config()))) is Config

        def later():
            time.sleep(0.3)
            print("thread done")
        threading.Thread(target=later).start()  # not a daemon: the interpreter waits for it
        atexit.register(lambda: print("exit handler", len(threading.enumerate())))
        left_open = open(f"open{rank}.txt", "w")
        left_open.write(f"{random.random()} {np.random.rand()}")
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        libc.fputs(b"from C", ctypes.c_void_p(libc.fopen(f"c{rank}.txt".encode(), b"w")))
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0, 2.0] and torch.get_num_threads() == 1
        print("main done")
        """,
    )
    result = trn("run", "-n", 2, "ordinary.py", cwd=tmp_path)
    assert result.code == 0, result.stderr
    for rank in range(2):
        mine = [line for line in result.stdout.splitlines() if line.startswith(f"[rank{rank}]")]
        lines = [line.removeprefix(f"[rank{rank}] ") for line in mine]
        assert lines == ["main done", "thread done", "exit handler 1"]
        assert (tmp_path / f"c{rank}.txt").read_text() == "from C"
    numbers = [set((tmp_path / f"open{rank}.txt").read_text().split()) for rank in range(2)]
    assert len(numbers[0]) == len(numbers[1]) == 2
    assert not numbers[0] & numbers[1]


def test_the_first_failure_is_shown_once_and_ends_the_run(tmp_path: Path) -> None:
    write(
        tmp_path / "fail.py",
        """
        import os, time
        if os.environ["RANK"] == "3":
            time.sleep(0.5)
            raise ValueError("the learning rate is negative")
        time.sleep(60)
        """,
    )
    start = time.monotonic()
    result = trn("run", "-n", 5, "--local-ranks-filter", "0", "--log-dir", "logs", "fail.py", cwd=tmp_path)
    assert time.monotonic() - start < 45
    assert result.code == 1
    lines = result.stderr.splitlines()
    assert lines[0].startswith("trn: rank 3 failed first, after ")
    assert lines[0].endswith(" s: ValueError: the learning rate is negative")
    # The traceback of a plain `python fail.py`, without frames of the launcher.
    assert lines[1:-1] == [
        "Traceback (most recent call last):",
        '  File "fail.py", line 5, in <module>',
        '    raise ValueError("the learning rate is negative")',
        "ValueError: the learning rate is negative",
    ]
    assert lines[-1] == "trn: ranks 0-2, 4: stopped"
    assert "ValueError: the learning rate is negative\n" in (tmp_path / "logs" / "rank3.log").read_text()


def test_the_same_failure_everywhere_is_told_once(tmp_path: Path) -> None:
    write(
        tmp_path / "same.py",
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)  # until all are there
        raise KeyError("tok_embeddings")
        """,
    )
    result = trn("run", "-n", 4, "same.py", cwd=tmp_path)
    assert result.code == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("KeyError: 'tok_embeddings'") == 3  # headline, traceback, one line for the others
    assert "in <module>" in result.stderr


def test_a_killed_rank_is_named_and_not_its_peers_that_notice(tmp_path: Path) -> None:
    write(
        tmp_path / "notice.py",
        """
        import os, signal, sys, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 2:
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(5)
        dist.all_reduce(torch.ones(1))  # raises as soon as the connection is closed
        """,
    )
    result = trn("run", "-n", 4, "notice.py", "killed", cwd=tmp_path)
    assert result.code == 1, result.stderr
    assert "trn: rank 2 failed first" in result.stderr
    assert "was killed by SIGKILL" in result.stderr
    assert "Traceback" not in result.stderr
    result = trn("run", "-n", 4, "notice.py", "left", cwd=tmp_path)
    assert result.code == 1, result.stderr
    assert "exited with code 5" in result.stderr


def test_ctrl_c_reaches_the_ranks_and_the_second_one_kills(tmp_path: Path) -> None:
    write(
        tmp_path / "wait.py",
        """
        import os, pathlib, signal, sys, time
        rank = os.environ["RANK"]
        if sys.argv[1] == "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path(f"up{rank}").touch()
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("saved", flush=True)
            raise
        """,
    )
    run = Run("run", "-n", 2, "wait.py", "polite", cwd=tmp_path)
    for rank in range(2):
        run.wait_for(tmp_path / f"up{rank}")
    run.process.send_signal(signal.SIGINT)
    result = run.result()
    assert result.code == 130
    assert sorted(result.stdout.splitlines()) == ["[rank0] saved", "[rank1] saved"]
    assert "Traceback" not in result.stderr
    assert "trn: ranks 0-1: KeyboardInterrupt" in result.stderr

    for rank in range(2):
        (tmp_path / f"up{rank}").unlink()
    run = Run("run", "-n", 2, "--grace-s", 60, "wait.py", "stubborn", cwd=tmp_path)
    for rank in range(2):
        run.wait_for(tmp_path / f"up{rank}")
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.process.poll() is None
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    result = run.result()
    assert time.monotonic() - start < 45
    assert result.code == 130
    assert "trn: ranks 0-1: killed" in result.stderr


def test_ctrl_c_while_importing_ends_at_once(tmp_path: Path) -> None:
    write(tmp_path / "never.py", "raise SystemExit(9)")
    run = Run("run", "-n", 2, "never.py", cwd=tmp_path)
    run.pid_of("trn:zygote")
    run.process.send_signal(signal.SIGINT)
    assert run.result().code == 130


def test_a_closed_terminal_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path / "chatty.py", "while True: print('x' * 1000)")
    command = f"{sys.executable} -m trn_dist.cli run -n 2 chatty.py | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stdout.endswith("x\n")
    assert done.stderr == ""


def test_ranks_meet_and_are_shown_and_logged(tmp_path: Path) -> None:
    write(
        tmp_path / "meet.py",
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        print("total", total.item(), "node", os.environ["GROUP_RANK"], "core", os.environ["LOCAL_RANK"], *sys.argv[1:])
        print("careful", file=sys.stderr)
        dist.destroy_process_group()
        """,
    )
    options = ["--nodes", 2, "--local-ranks-filter", "0", "--log-dir", "logs"]
    result = trn("run", "-n", 4, *options, "meet.py", "-n", "x", cwd=tmp_path)
    assert result.code == 0, result.stderr
    shown = ["[rank0] total 6.0 node 0 core 0 -n x", "[rank2] total 6.0 node 1 core 0 -n x"]
    assert sorted(result.stdout.splitlines()) == shown
    careful = sorted(line for line in result.stderr.splitlines() if "careful" in line)
    assert careful == ["[rank0] careful", "[rank2] careful"]
    for rank in range(4):
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert f"total 6.0 node {rank // 2} core {rank % 2} -n x\n" in log
        assert "careful\n" in log


def test_exit_codes(tmp_path: Path) -> None:
    write(
        tmp_path / "leave.py",
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("last words", file=sys.stderr)
            if sys.argv[1] == "code":
                sys.exit(3)
            os.kill(os.getpid(), 11)
        time.sleep(60)
        """,
    )
    for how, words in [("code", "exited with code 3"), ("signal", "was killed by SIGSEGV")]:
        result = trn("run", "-n", 2, "--local-ranks-filter", "0", "leave.py", how, cwd=tmp_path)
        assert result.code == 1, result.stderr
        assert "trn: rank 1 failed first" in result.stderr
        assert words in result.stderr
        assert "last words" in result.stderr, "a hidden rank's error output is shown when it fails"
        assert "trn: rank 0: stopped" in result.stderr


def test_modules_run_and_their_errors_look_like_pythons(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    write(tmp_path / "jobs" / "__init__.py", "")
    write(
        tmp_path / "jobs" / "train.py",
        """
        import sys
        from . import helper
        print(sys.argv, helper.__name__, __name__)
        sys.exit("no such dataset")
        """,
    )
    write(tmp_path / "jobs" / "helper.py", "")
    start = time.monotonic()
    result = trn("run", "-n", 1, "--grace-s", 60, "-m", "jobs.train", "--x", cwd=tmp_path)
    assert time.monotonic() - start < 45, "nobody is left to wait for"
    assert result.code == 1
    assert result.stdout == f"{[str(tmp_path / 'jobs' / 'train.py'), '--x']} jobs.helper __main__\n"
    assert result.stderr.startswith("no such dataset\ntrn: rank 0 failed first, after ")
    assert result.stderr.endswith(": no such dataset\n")
    result = trn("run", "-n", 1, "-m", "jobs.nothing", cwd=tmp_path)
    assert result.code == 1
    assert "No module named jobs.nothing" in result.stderr
    assert "Traceback" not in result.stderr


def test_ranks_that_go_on_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    """They ignore the request, print without end and have descendants out of their session."""
    write(
        tmp_path / "stubborn.py",
        """
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "120"], start_new_session=True)
        if os.fork() == 0:
            time.sleep(120)
        start = time.monotonic()
        while True:
            print("x" * 200)
            if os.environ["RANK"] == "0" and time.monotonic() - start > 0.5:
                raise RuntimeError("enough")
        """,
    )
    start = time.monotonic()
    result = trn("run", "-n", 3, "--grace-s", 0.5, "stubborn.py", cwd=tmp_path)
    assert time.monotonic() - start < 45
    assert result.code == 1
    assert "trn: rank 0 failed first" in result.stderr
    assert "trn: ranks 1-2: killed" in result.stderr


def test_refuses_to_fork_beside_a_thread(tmp_path: Path) -> None:
    write(
        tmp_path / "background.py",
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """,
    )
    write(tmp_path / "main.py", "print('started')")
    result = trn("run", "-n", 2, "--preload", "json,background", "main.py", cwd=tmp_path)
    assert result.code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: importing background left 1 live thread(s)")
    assert "torchrun" in result.stderr


def test_the_import_that_fails_is_named_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path / "wrapped_failure.py",
        """
        try:
            raise OSError("libneuron.so is too old")
        except OSError as error:
            raise RuntimeError("failed to load the extension") from error
        """,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match=r"importing wrapped_failure failed in .*: OSError: libneuron.so is too old"):
        zygote._import("wrapped_failure")


def test_sixty_four_ranks_start_in_seconds_with_the_users_limits(tmp_path: Path) -> None:
    """The supervisor needs many descriptors; the ranks must neither see its limit nor each other's pipes."""
    write(
        tmp_path / "look.py",
        """
        import os, resource
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd")))
        """,
    )
    command = f"ulimit -Sn 100; exec {sys.executable} -m trn_dist.cli run -n 64 look.py"
    start = time.monotonic()
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 45, "about 3 s on two idle cores; benchmarks/startup.py has the figure"
    seen = [line.split("] ")[1] for line in done.stdout.splitlines()]
    # The three standard streams, the control channel, the file for stacks and the folder being listed.
    assert seen == ["100 6"] * 64


def test_ranks_import_and_read_nothing_that_the_warm_process_could_have(tmp_path: Path) -> None:
    """What one rank needs for its first collective, 64 need: the device's modules and the cluster's files are there."""
    write(
        tmp_path / "modules.py",
        """
        import sys
        before = set(sys.modules)
        import torch
        import torch.distributed as dist
        from trn_dist.hardware import cluster

        def refuse(*_):
            raise AssertionError("a rank read the cluster's files itself")

        cluster.read_config = refuse
        dist.init_process_group()
        dist.all_reduce(torch.ones(4, device="neuron"))
        print(sorted(set(sys.modules) - before))
        dist.destroy_process_group()
        """,
    )
    result = trn("run", "-n", 2, "--local-ranks-filter", "1", "modules.py", cwd=tmp_path)
    assert (result.code, result.stdout) == (0, "[]\n"), result.stderr


def test_huge_pages_keep_what_lies_in_them(tmp_path: Path) -> None:
    """In a process of its own: a heap of 64 MiB moves where the kernel can; its bytes and a fork's stay the same."""
    program = """
    import os
    from trn_dist.launcher import processes

    blocks = [bytearray([number % 251]) * 4096 for number in range(16384)]
    moved = processes.use_huge_pages()
    shown = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
    assert moved == 0 or int(shown[0].split()[1]) * 1024 >= moved // 2, (moved, shown)
    child = os.fork()
    assert all(block == bytes([number % 251]) * 4096 for number, block in enumerate(blocks))
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(moved)
    """
    write(tmp_path / "pages.py", program)
    done = subprocess.run([sys.executable, "pages.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_ranks_without_a_fork_are_fresh_interpreters(tmp_path: Path) -> None:
    write(
        tmp_path / "fresh.py",
        """
        import os, sys
        print("torch" in sys.modules, sys.orig_argv[1:], os.environ["RANK"], os.environ["TRN_CLUSTER"])
        if len(sys.argv) > 1:
            raise ValueError(sys.argv[1])
        """,
    )
    options = ["-n", 2, "--no-fork", "--cluster", "trn2.3xlarge"]
    result = trn("run", *options, "fresh.py", cwd=tmp_path)
    assert result.code == 0, result.stderr
    seen = sorted(line for line in result.stdout.splitlines() if "False" in line)
    assert seen == [f"[rank{rank}] False ['-u', 'fresh.py'] {rank} trn2.3xlarge" for rank in range(2)]
    result = trn("run", "-n", 2, "--no-fork", "--log-dir", "logs", *options[3:], "fresh.py", "too small", cwd=tmp_path)
    assert result.code == 1
    assert "ValueError: too small" in result.stderr and "exited with code 1" in result.stderr


def test_no_fork_ranks_reduce_under_the_store(tmp_path: Path) -> None:
    write(
        tmp_path / "meet.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group()
        total = torch.ones(1, device="neuron")
        dist.all_reduce(total)
        print("total", total.item())
        dist.destroy_process_group()
        """,
    )
    result = trn("run", "-n", 2, "--no-fork", "meet.py", cwd=tmp_path)
    assert result.code == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[rank0] total 2.0", "[rank1] total 2.0"]


def test_a_run_that_gives_way(tmp_path: Path) -> None:
    write(tmp_path / "nice.py", "import os; print(os.nice(0))")
    result = trn("run", "-n", 1, "--nice", 5, "nice.py", cwd=tmp_path)
    assert int(result.stdout) == min(19, os.nice(0) + 5)
