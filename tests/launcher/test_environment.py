"""The environment contract, compared with torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launcher.runs import trn, write
from trn_dist.launcher.environment import rank_environment

SHOW = """
    import json, os, sys
    with open(f"seen{os.environ['RANK']}.json", "w") as file:
        json.dump({
            "environment": dict(os.environ), "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path,
            "name": __name__, "file": __file__, "cwd": os.getcwd(), "executable": sys.executable,
            "session_leader": os.getsid(0) == os.getpid(), "package": __package__, "spec": str(__spec__),
        }, file)
"""

# Different in each run of either launcher.
OF_THE_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TMPDIR", "TRN_TEST_RUN"}


def read(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"seen{rank}.json").read_text())


def test_ranks_see_what_torchrun_shows_them(tmp_path: Path) -> None:
    write(tmp_path / "show.py", SHOW)
    # The user's own values must survive: those that the launcher sets for itself while it imports, and empty ones.
    own = {"OPENBLAS_NUM_THREADS": "7", "EMPTY": "", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    own |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "show.py", "--steps", "3"],
        cwd=tmp_path,
        env={**os.environ, **own, "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=True,
        timeout=90,
    )
    theirs = [read(tmp_path, rank) for rank in range(2)]
    result = trn("run", "-n", 2, "show.py", "--steps", 3, cwd=tmp_path, environment=own)
    assert result.code == 0, result.stderr
    for rank in range(2):
        ours = read(tmp_path, rank)
        for name in OF_THE_RUN:
            present = [name in side["environment"] for side in (ours, theirs[rank])]
            assert present[0] == present[1] or name == "TRN_TEST_RUN"
            ours["environment"].pop(name, None)
            theirs[rank]["environment"].pop(name, None)
        assert ours == theirs[rank]


def test_nodes_are_numbered_as_torchrun_numbers_them() -> None:
    environment = rank_environment(rank=70, world_size=256, local_world_size=64, master_port=1234, error_file="")
    expected = {"RANK": "70", "LOCAL_RANK": "6", "GROUP_RANK": "1", "ROLE_RANK": "70"}
    expected |= {"WORLD_SIZE": "256", "LOCAL_WORLD_SIZE": "64", "GROUP_WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "256"}
    assert expected.items() <= environment.items()
