"""Cores that a job names are its own until it ends."""

import os
import subprocess
import sys

HOLD = "import torch; torch.ones(1, device='neuron'); print('ready', flush=True); input()"
USE = "import torch; print(torch.ones(1, device='neuron').item())"


def start(folder, program, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(folder), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def use(folder, **environment):
    out, error = start(folder, USE, **environment).communicate(timeout=120)
    return out + error


def test_an_occupied_core_is_not_available(tmp_path):
    holder = start(tmp_path, HOLD, NEURON_RT_VISIBLE_CORES="4-5")
    try:
        assert holder.stdout.readline() == "ready\n"
        message = use(tmp_path, NEURON_RT_VISIBLE_CORES="5-7")
        assert "NeuronCore(s) not available - Requested:nc5-nc7 Available:2: " in message
        assert f"nc5 is in use by process {holder.pid}" in message
        # Other cores, a rank whose own core is free, another simulated node, and a job that names none.
        assert use(tmp_path, NEURON_RT_VISIBLE_CORES="6-7") == "1.0\n"
        assert use(tmp_path, NEURON_RT_VISIBLE_CORES="5-7", LOCAL_RANK="1") == "1.0\n"
        assert use(tmp_path, NEURON_RT_VISIBLE_CORES="5-7", GROUP_RANK="1") == "1.0\n"
        assert use(tmp_path) == "1.0\n"
    finally:
        holder.kill()
        holder.wait()
    # Whatever way it ended, the core is free again.
    assert use(tmp_path, NEURON_RT_VISIBLE_CORES="5-7") == "1.0\n"
