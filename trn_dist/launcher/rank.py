"""What a process forked from the zygote does to become a rank: it ends up as ``python -u script.py`` begins.

Runs in the rank only, called by ``zygote``. With ``--no-fork`` it becomes that very command. Otherwise it differs from
a fresh interpreter in what a program can see: modules that the zygote imported are there already, all ranks of a node
share one string hash seed, and at the end exit handlers run and open files are flushed but the interpreter is not torn
down (with torch loaded that costs 0.3 s of CPU a rank).
"""

from __future__ import annotations

import _io
import atexit
import dataclasses
import gc
import io
import os
import re
import runpy
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from typing import NoReturn

from trn_dist.launcher import control, processes, stacks
from trn_dist.launcher.plan import Program


@dataclasses.dataclass(frozen=True)
class RankRequest:
    """What the zygote knows about the rank that it has just forked."""

    rank: int
    program: Program
    environment: Mapping[str, str]  # complete, not a difference
    zygote_pid: int
    stdout_fd: int
    stderr_fd: int
    channel: socket.socket  # to the supervisor, for the report of a failure
    scratch: str = ""  # the run's folder for temporary files, which the answers to `trn stacks` go to
    fork: bool = True  # go on in this process, else start an interpreter in its place


def become(request: RankRequest) -> NoReturn:
    """Turn this process into the rank, run the program and exit."""
    processes.die_with_parent(request.zygote_pid)
    os.setsid()
    processes.set_thread_name(f"trn:rank{request.rank}")
    os.dup2(request.stdout_fd, 1)
    os.dup2(request.stderr_fd, 2)
    os.close(request.stdout_fd)
    os.close(request.stderr_fd)
    program = request.program
    command = [sys.executable, "-u", *(["-m"] if program.is_module else []), program.target, *program.args]
    if not request.fork:
        os.execve(sys.executable, command, request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    _reseed()
    if request.scratch:
        stacks.register(request.scratch, request.rank)
    sys.argv = [program.target, *program.args]
    sys.orig_argv = command
    _exit(_run(program, request.rank, request.channel))


def _reseed() -> None:
    """Give each rank random numbers of its own. ``random`` reseeds itself after a fork, NumPy does not."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(program: Program, rank: int, channel: socket.socket) -> int:
    """Run the program as ``__main__``; returns the exit status as the interpreter would have it."""
    pid = os.getpid()
    try:
        if program.is_module:
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            _run_script(program.target)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return (request.code or 0) & 0xFF
        print(request.code, file=sys.stderr)
        if os.getpid() == pid:
            _report(channel, rank, str(request.code), "")
        return 1
    except BaseException as error:
        text = _traceback(error, rank)
        if os.getpid() == pid:
            if not _report(channel, rank, _summary(error), text):
                sys.stderr.write(text)
        else:  # a process that the program forked; its parent answers for it
            sys.stderr.write(text)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def _run_script(path: str) -> None:
    """What the interpreter does with a script: its code runs in a module ``__main__`` that stays until the end."""
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__.update(
        __builtins__=__builtins__, __cached__=None, __loader__=SourceFileLoader("__main__", path), __spec__=None
    )
    sys.modules["__main__"] = main
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _traceback(error: BaseException, rank: int) -> str:
    """What the exception hook prints of an uncaught exception, without the launcher's frames.

    The hook need not be Python's own: init_process_group sets one that puts ``[rank3]: `` before each line, which the
    supervisor's own prefix makes redundant.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    error.__traceback__ = frames
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.excepthook(type(error), error, frames)
        text = sys.stderr.getvalue()
    except BaseException:
        text = "".join(traceback.format_exception(error))
    finally:
        sys.stderr = stderr
    return re.sub(rf"^\[rank{rank}\]: ", "", text, flags=re.MULTILINE)


def _summary(error: BaseException) -> str:
    """The last line of a traceback: type and the first line of the message."""
    return traceback.format_exception_only(error)[-1].strip().split("\n", 1)[0]


def _report(channel: socket.socket, rank: int, error: str, text: str) -> bool:
    """Tell the supervisor why this rank fails, before exit handlers run, which may take long."""
    try:
        message = {"event": "failed", "rank": rank, "error": control.shorten(error), "traceback": control.shorten(text)}
        control.send(channel, message)
    except (OSError, ValueError):  # the program closed the descriptor
        return False
    return True


def _exit(status: int) -> NoReturn:
    """Leave as the interpreter would: join threads, run exit handlers, flush. Status -N means to die of signal N."""
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush_open_files, processes.flush_c_streams):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:
            traceback.print_exc()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _flush_open_files() -> None:
    """Write out files that the program left open; the interpreter does so when it deletes the objects.

    Buffers lie in layers: text files first, then the buffered ones below them. Objects older than the fork are frozen
    and not among those listed here; of these only the standard streams matter.
    """
    # By type: isinstance asks the object for its class too, and lazy modules import themselves when asked for anything.
    # And not by the abstract io.IOBase, which would look through all its subclasses.
    files = [sys.stdout, sys.stderr, *(item for item in gc.get_objects() if issubclass(type(item), _io._IOBase))]
    for layer in (io.TextIOBase, io.BufferedIOBase):
        for file in files:
            try:
                if isinstance(file, layer) and not file.closed and file.writable():
                    file.flush()
            except (OSError, ValueError):  # its other end is gone
                continue
