"""The launcher's own process: starts the zygote, watches the ranks, ends the run.

One thread and one loop over signals, the control channel and the ranks' pipes. The first rank that fails is shown with
its traceback; the others are asked to stop (SIGTERM) and killed after a grace period. A signal from the user is passed
on; a second one kills; SIGUSR1 shows where each rank stands. Called by ``trn_dist.cli`` and ``trn_dist.titan`` through
``launch``; imports no torch.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trn_dist.launcher import control, environment, output, processes, stacks
from trn_dist.launcher.plan import LaunchError, LaunchPlan

_START_TIMEOUT_S = 300.0
"""For importing torch and what was asked for beside it, on a cold and busy machine."""

_END_TIMEOUT_S = 5.0
_SUSPICION_S = 0.2
"""How long an uncaught exception waits for news of a rank that died without one. Peers of a killed rank may well raise
before the zygote has told of its death, and are not to blame."""

_KILL_ATTEMPTS = 3
_READ_BYTES = 1 << 16
_DRAIN_READS = 1024
"""At most 64 MiB at once from a rank that fails while another of its threads goes on printing."""
_SHOWN_CHARS = 1000


def launch(plan: LaunchPlan) -> int:
    """Run a plan to its end in the calling process, which must be in its main thread.

    Returns:
        The exit code: 0 when every rank exited with 0; 1 when a rank failed, as torchrun has it (the rank's own code
        is in the report), or the launcher itself; 128 + N when the launcher was stopped by signal N.

    Raises:
        LaunchError: the run could not start. Nothing is left behind.
    """
    plan.check()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("launch() handles signals and must be called in the main thread")
    run = _Run(plan)
    try:
        run.start()
        return run.watch()
    finally:
        run.end()


@dataclasses.dataclass
class _Rank:
    """What the supervisor knows about one rank."""

    output: output.RankOutput
    pipes: dict[int, int] = dataclasses.field(default_factory=dict)  # descriptor -> output.STDOUT or STDERR
    started: bool = False
    status: int | None = None  # exit code, or -N for signal N; None while it lives
    error: str = ""  # why it failed, in its own words

    @property
    def alive(self) -> bool:
        return self.started and self.status is None


class _Run:
    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self.run_id = str(uuid.uuid4())
        self.ranks: list[_Rank] = []
        self.exit_code: int | None = None  # decided by the first failure or signal
        self.first_failed: int | None = None
        self.stopped_by: signal.Signals | None = None
        self.suspect: tuple[int, bytes] | None = None  # rank with an uncaught exception, and its traceback
        self.blame_at: float | None = None  # when the suspect is taken for the first failure
        self.kill_at: float | None = None
        self.kill_attempts = 0
        self.killed: set[int] = set()
        self.start_time = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.zygote: subprocess.Popen[bytes] | None = None
        self.zygote_ready = False
        self.ready_by = self.start_time + _START_TIMEOUT_S
        self.channel: socket.socket | None = None
        self.listener: socket.socket | None = None
        # Made by the zygote, removed by whichever of the two lives to the end.
        try:
            self.scratch = os.path.join(tempfile.gettempdir(), f"trn_dist_{self.run_id}")
        except FileNotFoundError as error:
            raise LaunchError(f"{error.strerror}; set TMPDIR to a folder that can be written") from None
        self.wake_fds: tuple[int, int] | None = None
        self.old_handlers: dict[signal.Signals, Any] = {}
        self.old_wakeup_fd = -1
        self.descriptor_limit: tuple[int, int] | None = None

    # Start

    def start(self) -> None:
        """Start the zygote. The ranks follow one by one as it answers."""
        plan = self.plan
        self._open_outputs()
        self._catch_signals()
        # Loopback only, the port is the kernel's choice. Ranks that connect before the store answers wait in the queue.
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(max(128, plan.world_size))
        self.channel, zygote_end = control.pair()
        program = plan.program
        command = [sys.executable, "-u", str(Path(__file__).with_name("zygote.py")), str(zygote_end.fileno())]
        command += [
            "fork" if plan.fork else "exec",
            ",".join(plan.preload),
            "-m" if program.is_module else "-",
            program.target,
            *program.args,
        ]
        with zygote_end:
            try:
                self.zygote = subprocess.Popen(
                    command,
                    env=environment.run_environment(os.environ, self.run_id) | plan.environment(),
                    pass_fds=[zygote_end.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which passes it on
                )
            except OSError as error:
                raise LaunchError(f"the warm process cannot be started: {error}") from None
        if plan.nice:  # all other processes of the run inherit it
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self.zygote.pid, min(19, own + plan.nice))
        self._raise_descriptor_limit()
        self.selector.register(self.channel, selectors.EVENT_READ)

    def _open_outputs(self) -> None:
        plan = self.plan
        if plan.log_dir is not None:
            try:
                plan.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--log-dir {plan.log_dir}: {error.strerror}") from None
        local_ranks = range(plan.local_world_size) if plan.shown_local_ranks is None else plan.shown_local_ranks
        prefixed = plan.prefixed and len(local_ranks) * plan.nodes > 1
        for rank in range(plan.world_size):
            log_path = plan.log_dir / f"rank{rank}.log" if plan.log_dir is not None else None
            shown = rank % plan.local_world_size in local_ranks
            try:
                self.ranks.append(_Rank(output.RankOutput(rank, shown, prefixed, log_path)))
            except OSError as error:
                raise LaunchError(f"{log_path}: {error.strerror}") from None

    def _raise_descriptor_limit(self) -> None:
        """Called after the zygote started, so that ranks keep the user's limit. The plan has checked the hard limit."""
        needed = self.plan.descriptors
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            self.descriptor_limit = (soft, hard)

    def _catch_signals(self) -> None:
        """Handlers do nothing; the number arrives as a byte in a pipe that the loop reads."""
        self.wake_fds = os.pipe()
        for fd in self.wake_fds:
            os.set_blocking(fd, False)
        self.old_wakeup_fd = signal.set_wakeup_fd(self.wake_fds[1], warn_on_full_buffer=False)
        for name in (*environment.FORWARDED_SIGNALS, "SIGUSR1", "SIGCHLD"):
            number = signal.Signals[name]
            old = signal.getsignal(number)
            if old is signal.SIG_IGN and name != "SIGCHLD":  # nohup, or a background job of a script: stays ignored
                continue
            self.old_handlers[number] = old
            signal.signal(number, lambda *_: None)
        self.selector.register(self.wake_fds[0], selectors.EVENT_READ)

    # Watch

    def watch(self) -> int:
        """Handle events until every rank has ended; returns the exit code of the run."""
        try:
            while True:
                timeout_s = self._meet_deadlines()
                if self._finished():
                    break
                events = self.selector.select(timeout_s)
                # Output first: what a rank wrote before it ended is then shown before the news of its end.
                for key, _ in events:
                    if key.data is not None:
                        self._read_pipe(key.fd, key.data)
                for key, _ in events:
                    if self.channel is not None and key.fileobj is self.channel:
                        self._read_channel()
                    elif self.wake_fds is not None and key.fd == self.wake_fds[0]:
                        self._read_signals()
            for rank in self.ranks:
                rank.output.finish()
            self._tell_others()
        except output.TerminalClosedError:
            return 128 + signal.SIGPIPE
        return self.exit_code or int(bool(output.lost) or any(rank.output.log_is_cut for rank in self.ranks))

    def _meet_deadlines(self) -> float | None:
        """Do what is due; returns the seconds until something else is, None for never."""
        now = time.monotonic()
        if not self.zygote_ready and now >= self.ready_by:
            raise LaunchError(f"the warm process did not finish its imports in {_START_TIMEOUT_S:g} s")
        if self.blame_at is not None and now >= self.blame_at:
            self._blame_suspect()
        if self.kill_at is not None and now >= self.kill_at:
            self._kill_ranks()
        ready_by = None if self.zygote_ready else self.ready_by
        deadlines = [time_s for time_s in (ready_by, self.blame_at, self.kill_at) if time_s is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _finished(self) -> bool:
        if self.zygote is None or self.zygote.returncode is not None or self.kill_attempts > _KILL_ATTEMPTS:
            return True
        if self.blame_at is not None:
            return False
        if self.exit_code is not None:  # ranks that were not started yet are not started any more
            return not any(rank.alive for rank in self.ranks)
        return all(rank.status is not None for rank in self.ranks)

    def _read_channel(self) -> None:
        assert self.channel is not None
        received = control.receive(self.channel)
        if received is None:  # the zygote's end; its status comes with SIGCHLD
            self.selector.unregister(self.channel)
            return
        message, _ = received
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "ready": self._on_ready,
            "refused": self._on_refused,
            "started": self._on_started,
            "failed": self._on_failed,
            "ended": self._on_ended,
            "store_ended": self._on_store_ended,
        }
        handlers[message["event"]](message)

    def _on_ready(self, message: dict[str, Any]) -> None:
        assert self.listener is not None
        self.zygote_ready = True
        program = self.plan.program
        run = {
            "local_world_size": self.plan.local_world_size,
            "command": " ".join((*(["-m"] if program.is_module else []), program.target, *program.args))[:_SHOWN_CHARS],
        }
        begin = {"op": "begin", "scratch": self.scratch, "run": run, "world_size": self.plan.world_size}
        self._send(begin, [self.listener.fileno()])
        self._spawn(0)

    def _on_refused(self, message: dict[str, Any]) -> None:
        raise LaunchError(message["reason"])

    def _spawn(self, rank: int) -> None:
        assert self.listener is not None
        error_file = os.path.join(self.scratch, f"rank{rank}.error.json")
        port = self.listener.getsockname()[1]
        variables = environment.rank_environment(
            rank, self.plan.world_size, self.plan.local_world_size, port, error_file
        )
        ends = []
        for stream in (output.STDOUT, output.STDERR):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.ranks[rank].pipes[reader] = stream
            self.selector.register(reader, selectors.EVENT_READ, rank)
            ends.append(writer)
        self._send({"op": "spawn", "rank": rank, "environment": variables}, ends)
        for end in ends:
            os.close(end)

    def _on_started(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        self.ranks[rank].started = True
        if self.stopped_by is not None:
            self._signal(self.stopped_by, [rank])
        elif self.exit_code is not None:
            self._signal(signal.SIGTERM, [rank])
        elif rank + 1 < self.plan.world_size:
            self._spawn(rank + 1)

    def _on_failed(self, message: dict[str, Any]) -> None:
        """A rank tells about an exception that nobody caught; its exit handlers are still to run."""
        rank = self.ranks[message["rank"]]
        self._drain(message["rank"])
        rank.error = message["error"]
        text = message["traceback"].encode(errors="backslashreplace")
        rank.output.log(text)
        if self.exit_code is None and self.suspect is None:
            self.suspect = (message["rank"], text)
            self.blame_at = time.monotonic() + _SUSPICION_S

    def _on_ended(self, message: dict[str, Any]) -> None:
        rank = self.ranks[message["rank"]]
        self._drain(message["rank"])
        rank.status = message["status"]
        for fd in list(rank.pipes):
            self._close_pipe(fd, message["rank"])
        rank.output.finish()
        if rank.status and self.exit_code is None and not rank.error:
            self._first_failure(message["rank"], self._why(message["rank"], rank.status), b"")

    def _why(self, rank: int, status: int) -> str:
        for fault in self.plan.faults:
            if (fault.rank, fault.kind, status) == (rank, "kill", -signal.SIGKILL):
                return f"was killed by SIGKILL, as the fault {fault.text!r} asks"
        return _describe(status)

    def _blame_suspect(self) -> None:
        assert self.suspect is not None
        number, text = self.suspect
        self._first_failure(number, self.ranks[number].error, text)

    def _first_failure(self, number: int, reason: str, text: bytes) -> None:
        rank = self.ranks[number]
        self.blame_at = None
        self.exit_code = 1
        self.first_failed = number
        after_s = time.monotonic() - self.start_time
        output.say(f"rank {number} failed first, after {after_s:.1f} s: {reason}")
        if not text and output.STDERR not in rank.output.shown:
            text = b"".join(rank.output.tail)
        output.write_terminal(output.STDERR, text)
        for other, state in enumerate(self.ranks):
            if other != number:  # what they still have to say follows from the first failure; log files get it
                state.output.shown.discard(output.STDERR)
        self._ask_to_stop(signal.SIGTERM, exclude=number)

    def _on_store_ended(self, message: dict[str, Any]) -> None:
        if self.exit_code is None:
            self.exit_code = 1
            output.say(f"the process that hosts the store for rendezvous {_describe(message['status'])}; the run ends")
            self._ask_to_stop(signal.SIGTERM)

    def _read_signals(self) -> None:
        assert self.wake_fds is not None
        try:
            numbers = os.read(self.wake_fds[0], 4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCHLD:
                self._check_zygote()
            elif number == signal.SIGUSR1:
                self._show_stacks()
            elif signal.Signals(number) in self.old_handlers:
                self._on_user_signal(signal.Signals(number))

    def _check_zygote(self) -> None:
        assert self.zygote is not None and self.channel is not None
        if self.zygote.poll() is None:
            return
        # The reason may still lie in the channel. Its other end can be open yet, in what the ranks have forked.
        while self.channel in self._registered() and select.select([self.channel], [], [], 0)[0]:
            self._read_channel()
        started = any(rank.started for rank in self.ranks)
        what = "the warm process that ranks are forked from"
        if not started:
            raise LaunchError(f"{what} {_describe(self.zygote.returncode)} before it was ready")
        for number, rank in enumerate(self.ranks):
            self._drain(number)
            rank.output.finish()
        if self.exit_code is None:
            output.say(f"{what} {_describe(self.zygote.returncode)}; all ranks are killed")
            self.exit_code = 1

    def _show_stacks(self) -> None:
        assert self.zygote is not None
        groups = stacks.grouped(stacks.collect(self.zygote.pid))
        if not groups:
            output.say("SIGUSR1: no rank runs yet or any more")
        for ranks, text in groups:
            output.say(f"{output.name_ranks(ranks)}:\n{text}")

    def _registered(self) -> list[Any]:
        return [key.fileobj for key in self.selector.get_map().values()]

    def _on_user_signal(self, number: signal.Signals) -> None:
        alive = [index for index, rank in enumerate(self.ranks) if rank.alive]
        if self.stopped_by is not None or self.exit_code is not None:
            output.say(f"{number.name} again: killing {output.name_ranks(alive)}" if alive else f"{number.name} again")
            self._kill_ranks()
            return
        self.stopped_by = number
        self.blame_at = None
        self.exit_code = 128 + number
        if alive:
            output.say(
                f"{number.name}: asking {output.name_ranks(alive)} to stop, "
                f"killing after {self.plan.grace_s:g} s or at the next signal"
            )
            self._ask_to_stop(number)

    # Stop

    def _ask_to_stop(self, number: signal.Signals, exclude: int | None = None) -> None:
        self._signal(number, [i for i, rank in enumerate(self.ranks) if rank.alive and i != exclude])
        self.kill_at = time.monotonic() + self.plan.grace_s

    def _kill_ranks(self) -> None:
        alive = [index for index, rank in enumerate(self.ranks) if rank.alive]
        self.killed.update(alive)
        self.kill_attempts += 1
        self._signal(signal.SIGKILL, alive)
        self.kill_at = time.monotonic() + _END_TIMEOUT_S  # again, should one be in the middle of its fork

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        self._send({"op": "signal", "signal": int(number), "ranks": list(ranks)})

    def _send(self, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
        assert self.channel is not None
        try:
            control.send(self.channel, message, list(fds))
        except OSError:  # the zygote is gone: SIGCHLD says so in a moment
            return

    def _tell_others(self) -> None:
        """One line for all ranks that ended alike, other than the one that was shown."""
        if self.exit_code is None:
            return
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for number, rank in enumerate(self.ranks):
            if number == self.first_failed or not rank.started:
                continue
            if number in self.killed:
                groups["killed"].append(number)
            elif rank.error:
                groups[rank.error].append(number)
            elif rank.status is None:
                groups["killed with the warm process"].append(number)
            elif rank.status:
                asked = self.stopped_by or signal.SIGTERM
                groups["stopped" if rank.status == -asked else _describe(rank.status)].append(number)
            elif self.stopped_by is not None:
                groups["stopped"].append(number)
        for fate, numbers in groups.items():
            output.say(f"{output.name_ranks(numbers)}: {fate}")

    def end(self) -> None:
        """Leave nothing behind, whatever happened before: no process, pipe, folder or signal handler."""
        if self.channel is not None:
            self._send({"op": "quit"})
            self.channel.close()
        if self.zygote is not None:
            try:
                self.zygote.wait(_END_TIMEOUT_S if self.zygote_ready else 0)  # while it imports it does not listen
            except subprocess.TimeoutExpired:
                self.zygote.kill()
                self.zygote.wait()
            survivors = processes.kill_run(self.run_id)
            if survivors:
                output.say(f"these processes of the run cannot be killed: {', '.join(map(str, survivors))}")
        for number, rank in enumerate(self.ranks):
            for fd in list(rank.pipes):
                self._close_pipe(fd, number)
            rank.output.close()
        if self.listener is not None:
            self.listener.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.descriptor_limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.descriptor_limit)
        if self.wake_fds is not None:
            signal.set_wakeup_fd(self.old_wakeup_fd)
            for caught, handler in self.old_handlers.items():
                signal.signal(caught, handler)
            for fd in self.wake_fds:
                os.close(fd)
        self.selector.close()

    # Pipes

    def _read_pipe(self, fd: int, number: int) -> bool:
        """Pass on what one pipe holds, at most one buffer; False when there is nothing more now."""
        rank = self.ranks[number]
        if fd not in rank.pipes:
            return False
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(fd, number)
            return False
        rank.output.feed(rank.pipes[fd], data)
        return True

    def _drain(self, number: int) -> None:
        for fd in list(self.ranks[number].pipes):
            for _ in range(_DRAIN_READS):
                if not self._read_pipe(fd, number):
                    break

    def _close_pipe(self, fd: int, number: int) -> None:
        del self.ranks[number].pipes[fd]
        self.selector.unregister(fd)
        os.close(fd)


def _describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory on this host?)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
