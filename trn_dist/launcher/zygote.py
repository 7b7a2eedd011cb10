"""The warm process: it imports torch once and forks a rank on request.

Started by ``supervisor`` as ``python -u zygote.py CONTROL_FD fork|exec PRELOAD -m|- TARGET ARGS...`` with the
environment that all ranks share. It runs no operator, no backward and no thread, because neither survives a fork; it
refuses to fork when an imported module has started a thread. With ``exec`` (``--no-fork``) it imports nothing, and each
rank starts an interpreter of its own. It also forks the process that hosts the TCPStore, which needs a thread.

When the supervisor goes away, however it does, the zygote kills the whole run; when the zygote goes away the kernel
kills the ranks (``processes.die_with_parent``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # Python puts the folder of a script first on the path; this one's must not shadow anything for the ranks.
    _here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != _here]
    if importlib.util.find_spec("trn_dist") is None:  # used from a checkout that is not installed
        sys.path.append(str(Path(__file__).resolve().parents[2]))

from trn_dist.launcher import control, processes
from trn_dist.launcher.plan import LaunchError, Program
from trn_dist.launcher.rank import RankRequest, become
from trn_dist.launcher.running import RUN_FILE

# What torch imports anyway and what does not need torch, long enough to hide the loading of torch's library behind it.
WARM_BESIDE_TORCH_LIBRARY = ("numpy", "sympy")

WARM_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it: 0.5 s of CPU in each rank
)

# What the device imports at its first use, if torch has loaded it (not so with TORCH_DEVICE_BACKEND_AUTOLOAD=0).
WARM_DEVICE_MODULES = (
    "trn_dist.hardware",
    "trn_dist.timing.cluster",
    "trn_dist.timing.chip_rates",
    "trn_dist.timing.collective_costs",
    "trn_dist.timing.program",
    "trn_dist.neuron.telemetry",
)

# Thread pools that libraries would start at import. Set in this process only; ranks get the user's values back.
_SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

_MANY_RANKS = 16
"""From here on huge pages, which take 0.3 s to make and save 15 ms of each rank's start and end, pay for themselves."""

_THREAD_SETTLE_S = 0.5
"""How long a thread that an import started and that is about to end may take to do so."""


def main() -> NoReturn:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    fork = sys.argv[2] == "fork"
    preload = [name for name in sys.argv[3].split(",") if name]
    program = Program(sys.argv[5], tuple(sys.argv[6:]), is_module=sys.argv[4] == "-m")
    environment = dict(os.environ)
    processes.set_thread_name("trn:zygote")
    processes.adopt_orphans()
    processes.die_with_parent(os.getppid())  # while it imports, it does not see the channel close
    try:
        import_s = warm_up(program, preload) if fork else 0.0
    except LaunchError as error:
        control.send(channel, {"event": "refused", "reason": str(error)})
        sys.exit(1)
    processes.outlive_parent()  # from now on it ends the ranks first
    try:
        control.send(channel, {"event": "ready", "import_s": import_s})
    except OSError:
        sys.exit(1)  # the launcher has died
    become(_serve(channel, program, environment, fork))


def warm_up(program: Program, preload: list[str]) -> float:
    """Import what the ranks will need; returns the seconds it took. Raises LaunchError when forking would be unsafe."""
    start = time.monotonic()
    _refuse_threads("starting Python (a .pth file or sitecustomize)")
    os.environ.update(_SINGLE_THREADED)
    gc.disable()  # imports make objects that stay: looking through them again and again takes a fifth of the time
    with _loading_torch_library():
        for name in WARM_BESIDE_TORCH_LIBRARY:
            with contextlib.suppress(ImportError):  # for torch to say
                importlib.import_module(name)
    for name in WARM_MODULES:
        _import(name)
    if "trn_dist._C" in sys.modules:
        for name in WARM_DEVICE_MODULES:
            _import(name)
        _read_cluster()
    if not sys.flags.safe_path:
        # As `python -m` and `python script.py` do it; after torch, lest a file of the user's shadow its imports.
        first = os.getcwd() if program.is_module else os.path.dirname(os.path.realpath(program.target))
        sys.path.insert(0, first)
    for name in preload:
        _import(name)
    # init_process_group empties these, for whose memory each rank would pay.
    sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
    # Finalizers of imported modules (torch.library undoes its registrations) cost a rank 30 ms at exit for nothing.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # a collection in a rank must not touch, and so copy, the pages that all ranks share
    gc.enable()
    return time.monotonic() - start


@contextlib.contextmanager
def _loading_torch_library() -> Iterator[None]:
    """Load libtorch_cpu, a tenth of the time of all imports, on the other core meanwhile; its thread ends here."""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    library = Path(folders[0]) / "lib" / "libtorch_cpu.so" if folders else None
    if library is None or not library.exists():  # importing torch says what is wrong, if anything is
        yield
        return
    # Called as a C function, dlopen runs without Python's lock; ctypes.CDLL(library) would keep it. Whether it succeeds
    # is for the import of torch to say.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    thread = threading.Thread(target=dlopen, args=(os.fsencode(library), os.RTLD_NOW))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException as error:
        cause = error
        while (
            cause.__cause__ is not None
        ):  # torch hides why a device's extension does not load behind an error of its own
            cause = cause.__cause__
        raise LaunchError(f"importing {name} failed in {sys.prefix}: {type(cause).__name__}: {cause}") from None
    _refuse_threads(f"importing {name}")


def _read_cluster() -> None:
    """Read the files of the simulated cluster for all ranks. An error waits: a program may name another one."""
    from trn_dist.hardware import ConfigError
    from trn_dist.hardware.environment import named_cluster

    with contextlib.suppress(ConfigError):
        named_cluster()


def _refuse_threads(cause: str) -> None:
    deadline = time.monotonic() + _THREAD_SETTLE_S
    while names := processes.other_threads():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{cause} left {len(names)} live thread(s) in the process that ranks are forked from "
                f"({', '.join(names)}), and a thread does not survive a fork; start this program with torchrun"
            )
        time.sleep(0.01)


def _serve(channel: socket.socket, program: Program, environment: dict[str, str], fork: bool) -> RankRequest:
    """Answer the supervisor until it says so or is gone. Returns only in a forked child, with what it shall be."""
    ranks: dict[int, int] = {}  # pid of a live child -> its rank
    store_pid = 0
    scratch = ""
    zygote_pid = os.getpid()
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    def leave_zygote() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(wake_reader)
        os.close(wake_writer)

    try:
        while True:
            readable, _, _ = select.select([channel.fileno(), wake_reader], [], [])
            if wake_reader in readable:
                _drain(wake_reader)
                _report_ended(channel, ranks, store_pid)
            if channel.fileno() not in readable:
                continue
            received = control.receive(channel)
            if received is None:  # the supervisor is gone
                break
            message, fds = received
            if message["op"] == "quit":
                break
            if message["op"] == "begin":
                scratch = message["scratch"]
                try:
                    os.mkdir(scratch, 0o700)
                    Path(scratch, RUN_FILE).write_text(json.dumps(message["run"]))
                except OSError as error:
                    reason = f"the folder for temporary files {scratch} cannot be written: {error.strerror}"
                    control.send(channel, {"event": "refused", "reason": reason})
                if fork and message["world_size"] >= _MANY_RANKS:
                    processes.use_huge_pages()
                store_pid = _fork(channel, "the store for rendezvous")
                if store_pid == 0:
                    leave_zygote()
                    channel.close()
                    _host_store(zygote_pid, fds[0])
            elif message["op"] == "spawn":
                pid = _fork(channel, f"rank {message['rank']}")
                if pid == 0:
                    leave_zygote()
                    rank_environment = {**environment, **message["environment"]}
                    return RankRequest(
                        rank=message["rank"],
                        program=program,
                        environment=rank_environment,
                        zygote_pid=zygote_pid,
                        stdout_fd=fds[0],
                        stderr_fd=fds[1],
                        channel=channel,
                        scratch=scratch,
                        fork=fork,
                    )
                ranks[pid] = message["rank"]
                control.send(channel, {"event": "started", "rank": message["rank"], "pid": pid})
            elif message["op"] == "signal":
                _signal_ranks(ranks, message["signal"], set(message["ranks"]))
            for fd in fds:
                os.close(fd)
    except OSError:  # the supervisor went away while this process was answering, or knows already what is wrong
        pass
    processes.kill_run(environment[processes.RUN_ID_VARIABLE])
    processes.reap_children()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _fork(channel: socket.socket, what: str) -> int:
    """Fork; where the host refuses, tell the supervisor why and raise OSError."""
    try:
        return os.fork()
    except OSError as error:
        reason = f"{what} cannot be started, the host refuses another process: {error.strerror} (ulimit -u, memory)"
        control.send(channel, {"event": "refused", "reason": reason})
        raise


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def _report_ended(channel: socket.socket, ranks: dict[int, int], store_pid: int) -> None:
    """Reap every child that has ended and report those that the supervisor knows."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        pid = ended.si_pid
        if pid in ranks:
            # What the rank started in its session ends with it. Before reaping, while the number is still its own.
            _kill_group(pid, signal.SIGKILL)
        _, wait_status = os.waitpid(pid, 0)
        status: dict[str, Any] = {"status": os.waitstatus_to_exitcode(wait_status)}
        if pid in ranks:
            control.send(channel, {"event": "ended", "rank": ranks.pop(pid), **status})
        elif pid == store_pid:
            control.send(channel, {"event": "store_ended", **status})


def _signal_ranks(ranks: dict[int, int], number: int, chosen: set[int]) -> None:
    """Signal live ranks. They are children not yet reaped, so a pid cannot mean somebody else."""
    for pid, rank in ranks.items():
        if rank in chosen:
            if number == signal.SIGKILL:
                _kill_group(pid, number)
            os.kill(pid, number)


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # not its own session yet, or all of it ended
        return


def _host_store(zygote_pid: int, listen_fd: int) -> NoReturn:
    """Host the TCPStore that the ranks meet at, as torchrun's agent does, until the zygote ends."""
    try:
        processes.die_with_parent(zygote_pid)
        processes.set_thread_name("trn:store")
        os.setsid()
        from torch.distributed import TCPStore

        port = socket.socket(fileno=os.dup(listen_fd)).getsockname()[1]
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
        while store is not None:
            signal.pause()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main()
