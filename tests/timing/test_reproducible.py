"""The same program has the same virtual times on every run: under load, on one core or two, traced or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trn_dist import timing

PROGRAM = """
import json, os, threading, time
import torch
from tests.timing.test_steps import train
from trn_dist import timing

if os.environ.get("LOAD"):
    def burn():
        while not done.is_set():
            sum(range(1000))
    done = threading.Event()
    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
if os.environ.get("WATCHED"):
    from trn_dist.neuron.telemetry import figures
    def watch():
        while not done.is_set():
            seen.append(figures()["times"]["end_ps"])
            time.sleep(0.001)
    done, seen = threading.Event(), []
    onlooker = threading.Thread(target=watch)
    onlooker.start()
steps = train(steps=4)
if os.environ.get("WATCHED"):
    done.set()
    onlooker.join()
    assert len(seen) > 10 and seen == sorted(seen) and seen[-1] > 0
if os.environ.get("LOAD"):
    done.set()
print(json.dumps({"steps": [step.as_json(operators=100) for step in steps], "reason": timing.irreproducible_reason()}))
"""


def run(**environment: str) -> dict:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain():
    return run(OMP_NUM_THREADS="1")


def test_an_onlooker_changes_no_time(plain):
    assert plain == run(OMP_NUM_THREADS="1", WATCHED="1")


def test_same_times_under_load_and_traced(plain, tmp_path):
    assert plain["reason"] == ""
    assert plain == run(OMP_NUM_THREADS="2", LOAD="1", TRN_TRACE=str(tmp_path))
    (trace,) = tmp_path.glob("*.json")
    assert trace == timing.trace_file(tmp_path, 0)
    joined = json.loads(timing.join_traces(tmp_path).read_text())
    slices = [entry for entry in joined if entry["ph"] == "X" and entry["tid"] >= 0]
    # Every operator of every step is in the trace, with its time.
    in_steps = sum(operator["count"] for step in plain["steps"] for operator in step["operators"])
    assert len(slices) > in_steps > 100
    assert {"aten::addmm", "aten::mm", "copy to host"} & {entry["name"] for entry in slices}
    counters = [entry["args"]["bytes"] for entry in joined if entry["ph"] == "C"]
    assert max(counters) > 0
    tracks = {entry["args"]["name"] for entry in joined if entry["name"] == "thread_name"}
    assert {"host", "stream 0"} < tracks


def test_another_cluster_has_other_times(plain):
    other = run(TRN_CLUSTER="trn3-gen1-ultraserver")
    assert other["steps"][0]["time_ps"] != plain["steps"][0]["time_ps"]
    assert [o["count"] for o in other["steps"][0]["operators"]] and other["reason"] == ""


def test_a_wrong_cluster_is_named():
    found = subprocess.run(
        [sys.executable, "-c", "import torch; torch.zeros(1, device='neuron').add_(1)"],
        env={**os.environ, "TRN_CLUSTER": "trn9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode != 0
    assert "trn9" in found.stderr
