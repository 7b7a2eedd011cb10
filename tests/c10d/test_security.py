"""Strangers are refused, and what peers write is checked before it is used."""

from __future__ import annotations

import array
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.c10d import ranks
from trn_dist import _C

# As in csrc/fabric/Fabric.cpp: Hello, with which a rank joins.
HELLO = struct.Struct("<Q16siiiiQQQ")
MAGIC = 0x74726E2D66616232
# The same in Answer: a reason to stop follows.
ANSWER = struct.Struct("<Qii1024s")


def tensor_on(rank: int, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=f"neuron:{rank}")


def meeting(port: int, prefix: str = "job") -> dist.Store:
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)))


def initialize(store: dist.Store, rank: int, size: int, timeout_s: float = 10) -> None:
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def handle(store: dist.Store) -> tuple[str, bytes]:
    """The address and the token that rank 0 has put into the store."""
    host = "0//neuron//trn/host/"
    store.wait([f"{host}0"])
    store.set(f"{host}1", store.get(f"{host}0").decode())  # rank 0 goes on when it knows rank 1's host: the same
    key = "0//neuron//trn/fabric/0"
    store.wait([key])
    name, token, *_ = store.get(key).decode().split()
    return name, bytes.fromhex(token)


def start_time() -> int:
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def connect(name: str) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(20)
    stranger.connect("\0" + name)
    return stranger


def memory(nbytes: int) -> int:
    fd = os.memfd_create("stranger")
    os.ftruncate(fd, nbytes)
    return fd


def say_hello(name: str, token: bytes, rank: int = 1, size: int = 2, nbytes: int = 1 << 20, **fields: Any) -> bytes:
    """Joins as a forged rank; what rank 0 answers, empty when it hangs up."""
    stranger = connect(name)
    fds = fields.get("fds", [memory(fields.get("real_nbytes", nbytes))])
    message = HELLO.pack(
        fields.get("magic", MAGIC), token, rank, size, os.getpid(), 0, start_time(), nbytes, fields.get("status", 0)
    )
    stranger.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    try:
        return stranger.recv(1 << 16)
    except ConnectionResetError:
        return b""


AS_NOBODY = """
import socket, sys
name, message = sys.argv[1], bytes.fromhex(sys.argv[2])
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stranger.settimeout(20)
stranger.connect("\\0" + name)
try:
    stranger.send(message)
    answer = stranger.recv(1 << 16)
except (ConnectionResetError, BrokenPipeError):
    answer = b""
print(len(answer))
"""


def strangers_come_first(rank: int, size: int, port: int) -> str:
    """Rank 1 lets all kinds of strangers try before it joins; rank 0 must refuse them and wait for rank 1."""
    store = meeting(port)
    if rank == 0:
        initialize(store, rank, size, 30)
    else:
        name, token = handle(store)
        assert say_hello(name, bytes(16)) == b""  # does not know the token
        assert say_hello(name, token[:15] + bytes([token[15] ^ 1])) == b""
        assert say_hello(name, token, magic=MAGIC - 1) == b""  # another version
        assert say_hello(name, token, fds=[]) == b""  # has no memory to show
        assert say_hello(name, token, fds=[memory(1), memory(1)]) == b""
        short = connect(name)
        short.send(b"hello")
        assert short.recv(100) == b""
        if os.geteuid() == 0:
            # Another user, who has learned the token.
            hello = HELLO.pack(MAGIC, token, 1, 2, 1, 0, 1, 1 << 20, 0).hex()
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            command += [sys.executable, "-I", "-S", "-c", AS_NOBODY, name, hello]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and done.stdout.strip() == "0", done.stderr
        initialize(store, rank, size, 30)
    tensor = tensor_on(rank, 4)
    dist.all_reduce(tensor)
    return str(tensor.tolist())


def test_strangers_are_refused_and_the_ranks_meet() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, strangers_come_first, server.port, backend="") == ["[2.0, 2.0, 2.0, 2.0]"] * 2


def forged_rank(rank: int, size: int, port: int, fields: dict[str, Any]) -> str:
    """A process that knows the token, but says things of itself that cannot be."""
    store = meeting(port)
    if rank == 0:
        with pytest.raises(dist.DistBackendError) as raised:
            initialize(store, rank, size)
        return str(raised.value)
    answer = say_hello(*handle(store), **fields)
    return ANSWER.unpack_from(answer)[3].rstrip(b"\0").decode() if len(answer) == ANSWER.size else ""


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"rank": 7}, "a process joined as rank 7 of 2, which does not fit a group of 2"),
        ({"rank": 0}, "a process joined as rank 0 of 2"),
        ({"rank": -1}, "a process joined as rank -1 of 2"),
        ({"size": 3}, "a process joined as rank 1 of 3"),
        ({"real_nbytes": 4096}, "rank 1 sent a descriptor that is not an arena of 1048576 bytes"),
        ({"nbytes": 0}, "rank 1 sent a descriptor that is not an arena of 0 bytes"),
        ({"status": 1 << 20}, "rank 1 sent no status block with its arena"),
        ({"status": (1 << 64) - 64}, "rank 1 sent no status block with its arena"),
        ({"status": 8}, "rank 1 sent no status block with its arena"),
        ({"status": 0}, "rank 1 sent no status block with its arena"),  # lies inside, but is none
    ],
)
def test_what_a_joining_rank_says_is_checked(fields: dict[str, Any], error: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = ranks.run(2, forged_rank, server.port, fields, backend="")
    assert error in results[0]


# ---- Forged shared memory --------------------------------------------------------------------------------------------


def arena_of_rank_0(rank: int, size: int) -> mmap.mmap:
    """The memory in which the group's control block lies, as the kernel shows it to processes of the same user."""
    pid = torch.tensor([os.getpid()], device=f"neuron:{rank}")
    dist.broadcast(pid, 0)
    folder = f"/proc/{int(pid.item())}/fd"
    path = next(f"{folder}/{fd}" for fd in os.listdir(folder) if "memfd:trn_dist-hbm" in os.readlink(f"{folder}/{fd}"))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 64 << 20)


def offset_in_arena(tensor: torch.Tensor) -> int:
    """Where a tensor of this process lies in its arena."""
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(part, 16) for part in re.split("[- ]", line, maxsplit=2)[:2])
            if begin <= tensor.data_ptr() < end:
                return tensor.data_ptr() - begin + int(line.split()[2], 16)
    raise AssertionError("the tensor lies nowhere")


def forges_a_post(rank: int, size: int, offset: int, nbytes: int) -> str:
    """Rank 1 posts a collective and then names other memory than its tensor's, before rank 0 comes."""
    tensor = tensor_on(rank, 1_000_003)
    arena = arena_of_rank_0(rank, size)
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
        with pytest.raises(dist.DistBackendError) as raised:
            dist.all_reduce(tensor)
        return str(raised.value)
    work = dist.all_reduce(tensor, async_op=True)
    span = struct.pack("<QQ", offset_in_arena(tensor), tensor.nbytes)
    at = arena.find(span)
    assert at > 0
    arena[at : at + 16] = struct.pack("<QQ", offset, nbytes)
    with pytest.raises(dist.DistBackendError) as raised:
        work.wait()
    return str(raised.value)


@pytest.mark.parametrize(("offset", "nbytes"), [(1 << 60, 4_000_012), (0, 1 << 62), ((1 << 63) - 64, 4_000_012)])
def test_a_post_that_names_memory_outside_of_the_arena(offset: int, nbytes: int) -> None:
    for error in ranks.run(2, forges_a_post, offset, nbytes):
        assert "rank 1 named memory outside its arena" in error


def forges_a_message(rank: int, size: int, offset: int) -> str:
    """The same with a message: rank 1 sends, and changes where its payload lies."""
    tensor = tensor_on(rank, 1_000_003)
    arena = arena_of_rank_0(rank, size)
    dist.barrier()
    if rank == 1:
        work = dist.isend(tensor, 0)
        message = struct.pack("<QQ", offset_in_arena(tensor), tensor.nbytes)
        at = arena.find(message)
        assert at > 0
        arena[at : at + 8] = struct.pack("<Q", offset)
        time.sleep(2)
        assert work is not None
        return ""
    time.sleep(1)
    with pytest.raises(dist.DistBackendError) as raised:
        dist.recv(tensor, 1)
    return str(raised.value)


@pytest.mark.parametrize("offset", [1 << 60, (1 << 64) - 64])
def test_a_message_that_lies_outside_of_the_arena(offset: int) -> None:
    error = ranks.run(2, forges_a_message, offset)[0]
    assert "got a message" in error and "rank 1" in error


def make_group(store: dist.Store, rank: int) -> None:
    options = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = rank, 2
    options.global_ranks_in_group = [0, 1]
    options.timeout = timedelta(seconds=10)
    options.group_id = "forged"
    _C._create_process_group(options)


def forges_a_locator(rank: int, size: int, port: int, offset: int) -> str:
    """Where a group's control block lies comes over the store: rank 1 has a store that lies."""
    store = meeting(port)
    initialize(store, rank, size)
    honest = dist.PrefixStore("honest", store)
    if rank == 0:
        make_group(honest, rank)
        honest.wait(["refused"])
        return ""
    key = "trn/communicator"
    honest.wait([key])
    lies = dist.HashStore()
    lies.set(key, struct.pack("<Q", offset) + bytes(honest.get(key))[8:])  # type: ignore[arg-type]
    with pytest.raises(dist.DistBackendError) as raised:
        make_group(lies, rank)
    honest.set("refused", "")
    return str(raised.value)


@pytest.mark.parametrize("offset", [1 << 60, 3, (1 << 64) - 64, 0])
def test_a_control_block_elsewhere_is_refused(offset: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    error = ranks.run(2, forges_a_locator, server.port, offset, backend="")[1]
    assert "is not the control block of a group of 2 ranks" in error
