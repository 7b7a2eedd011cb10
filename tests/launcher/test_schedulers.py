"""launch/slurm.sbatch and launch/kubernetes: what a machine without Slurm and Kubernetes can say about them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher.runs import write

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = [LAUNCH / "torchrun.sh", LAUNCH / "slurm.sbatch", LAUNCH / "kubernetes" / "jobset.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 0 and not done.stderr
    assert os.access(script, os.X_OK)


def fake_slurm(folder: Path, hosts: str) -> dict[str, str]:
    """``srun`` starts its command once a node, at the same time, with what Slurm sets; ``scontrol`` names the nodes."""
    programs = folder / "bin"
    programs.mkdir()
    write(programs / "scontrol", f"#!/bin/sh\n[ \"$*\" = 'show hostnames {hosts}' ] && printf 'first\\nsecond\\n'\n")
    write(
        programs / "srun",
        """\
        #!/bin/bash
        while [[ $1 == --* ]]; do
          [[ $1 == --nodes ]] && nodes=$2
          shift 2
        done
        for ((node = 0; node < nodes; node++)); do
          SLURM_NODEID=$node SLURM_PROCID=$node "$@" > "node$node.log" 2>&1 &
          started+=($!)
        done
        for pid in "${started[@]}"; do
          wait "$pid" || code=$?
        done
        exit "${code:-0}"
        """,
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    variables = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": hosts, "SLURM_JOB_NUM_NODES": "2", "VENV": ""}
    return {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}", "LAUNCH_FOLDER": str(LAUNCH)}


def sbatch(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", LAUNCH / "slurm.sbatch", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    environment = fake_slurm(tmp_path, "trn[1-2]") | {"TORCHRUN": "echo", "NPROC_PER_NODE": "4"}
    done = sbatch(tmp_path, environment, "train.py", "--text", "two words")
    assert done.returncode == 0, done.stderr
    for node, is_host in enumerate((1, 0)):
        line = (tmp_path / f"node{node}.log").read_text()
        assert line.startswith("--nproc-per-node 4 --max-restarts 0 ")
        assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id 4711" in line
        assert line.endswith(f"--rdzv-conf is_host={is_host} train.py --text two words\n")


def test_slurm_mistakes(tmp_path: Path) -> None:
    environment = fake_slurm(tmp_path, "trn[1-2]")
    assert "usage: sbatch" in sbatch(tmp_path, environment).stderr
    assert "set LAUNCH_FOLDER" in sbatch(tmp_path, environment | {"LAUNCH_FOLDER": "/nowhere"}, "a.py").stderr
    done = sbatch(tmp_path, {key: value for key, value in environment.items() if key != "SLURM_JOB_ID"}, "a.py")
    assert done.returncode == 2 and "this is no Slurm job" in done.stderr


@pytest.mark.slow
def test_slurm_job_of_two_nodes_reduces(tmp_path: Path) -> None:
    """The nodes are both this machine; torchrun is the true one."""
    write(
        tmp_path / "meet.py",
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group()
        total = torch.tensor([float(dist.get_rank())], device="neuron")
        dist.all_reduce(total)
        print("total", total.item(), "node", os.environ["GROUP_RANK"])
        dist.destroy_process_group()
        """,
    )
    environment = fake_slurm(tmp_path, "trn[1-2]")
    write(tmp_path / "bin" / "scontrol", "#!/bin/sh\necho 127.0.0.1\n")
    torchrun = tmp_path / "bin" / "torchrun"
    write(torchrun, f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n').chmod(0o755)
    environment |= {"NPROC_PER_NODE": "2", "RDZV_PORT": "29613", "LOCAL_ADDR": "127.0.0.1"}
    done = sbatch(tmp_path, environment, "meet.py")
    assert done.returncode == 0, done.stderr + (tmp_path / "node0.log").read_text()
    seen = "".join((tmp_path / f"node{node}.log").read_text() for node in range(2))
    assert sorted(re.findall(r"total 6\.0 node (\d)", seen)) == ["0", "1"]


# Fields of the objects that the manifest may use: name -> type, or the fields of an object or of a list's elements.
STRINGS = [str]
ENV = {"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}
QUANTITIES = {"cpu": str, "memory": str}
CONTAINER = {
    "name": str,
    "image": str,
    "workingDir": str,
    "command": STRINGS,
    "args": STRINGS,
    "env": [ENV],
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
}
POD = {"spec": {"restartPolicy": str, "containers": [CONTAINER]}}
JOB = {"parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int, "template": POD}
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, where: str = "") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), f"{where}: {value!r}"
        assert value.keys() <= schema.keys(), f"{where}: {value.keys() - schema.keys()}"
        for key, inner in value.items():
            check(inner, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, f"{where}: {value!r}"
        for index, inner in enumerate(value):
            check(inner, schema[0], f"{where}[{index}]")
    else:
        assert type(value) is schema, f"{where}: {value!r} is no {schema.__name__}"


def jobset(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IMAGE": "registry.example/trn_dist:1", **variables}
    command = [LAUNCH / "kubernetes" / "jobset.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=False)


def test_jobset(tmp_path: Path) -> None:
    arguments = ["train.py", "--text", 'a "quoted" \\ word: #1\nand a line', "--yes", "true"]
    done = jobset(*arguments, NODES="4", NPROC_PER_NODE="2", NAME="llama")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    check(manifest, JOBSET)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 4
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == arguments
    settings = {entry["name"]: entry.get("value") for entry in container["env"]}
    # JobSet names a pod <jobset>-<job>-<number of the job>-<number of the pod>, in the subdomain.
    assert settings["RDZV_ENDPOINT"] == "llama-node-0-0.llama:29500"
    # The command of a container, carried out here, with torchrun replaced by echo.
    for index, is_host in (("0", 1), ("2", 0)):
        environment = {**os.environ, **{key: value for key, value in settings.items() if value is not None}}
        environment |= {"JOB_COMPLETION_INDEX": index, "LOCAL_ADDR": "10.0.0.7", "TORCHRUN": "echo"}
        started = subprocess.run(
            [*container["command"], "train.py"],
            cwd=LAUNCH.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        assert "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint llama-node-0-0.llama:29500" in started.stdout
        assert started.stdout.endswith(f"--rdzv-conf is_host={is_host} --local-addr 10.0.0.7 train.py\n")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"IMAGE": ""}, "set IMAGE"),
        ({"NAME": "Llama"}, "NAME=Llama: lower-case"),
        ({"NAME": "a" * 43}, "42 at most"),
        ({"NODES": "two"}, "NODES=two: must be a whole number above 0"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1"),
    ],
)
def test_jobset_mistakes(variables: dict[str, str], words: str) -> None:
    done = jobset("train.py", **variables)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""
    assert "usage:" in jobset().stderr
