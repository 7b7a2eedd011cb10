"""The environment that torchrun gives to a rank, variable by variable.

The contract is that of ``torch/distributed/elastic/agent/server/local_elastic_agent.py`` (``_start_workers``), of
``torch/distributed/run.py`` (threads) and of ``torch/distributed/launcher/api.py`` (signals) in torch 2.13; a test runs
both launchers and compares. Pure functions, called by ``supervisor``.
"""

from __future__ import annotations

from collections.abc import Mapping

FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that the launcher passes on to the ranks; torchrun's default list."""

MASTER_ADDR = "localhost"


def run_environment(base: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The part that all ranks share: the launcher's own environment plus what torchrun adds to it.

    Unlike torchrun, one intra-op thread is the default for a single rank too: results depend on the number of threads,
    and a run of one rank is compared with runs of many.
    """
    environment = dict(base)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(FORWARDED_SIGNALS)
    environment["TORCHELASTIC_RUN_ID"] = run_id
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return environment


def rank_environment(
    rank: int, world_size: int, local_world_size: int, master_port: int, error_file: str
) -> dict[str, str]:
    """The part that differs from rank to rank, or that needs the rendezvous.

    Args:
        rank: global rank, 0 to ``world_size - 1``; consecutive ranks share a node.
        local_world_size: ranks on each node.
        master_port: TCP port of the store on the loopback interface.
        error_file: where ``@torch.distributed.elastic.multiprocessing.errors.record`` writes, "" for nowhere.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
