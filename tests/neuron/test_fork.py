"""Forked children: they may drop the tensors they inherit, without harm to the parent, and use none of them."""

import os
import subprocess
import sys

import pytest
import torch

SENTENCE = (
    "Cannot re-initialize neuron in forked subprocess. To use neuron with multiprocessing, you must use the 'spawn'"
)


class Captured(torch.utils.data.Dataset):
    """Holds a tensor of the device and drops or uses it in the worker."""

    def __init__(self, use: str):
        self.tensor = torch.arange(1024.0, device="neuron")
        self.use = use

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.use == "drop":
            self.tensor = None
        elif self.use == "write":
            self.tensor.fill_(-1)
        elif self.use == "read":
            return self.tensor[index].cpu()
        elif self.use == "allocate":
            torch.empty(4, device="neuron")
        elif self.use == "resize":
            self.tensor.untyped_storage().resize_(0)
        return index


def load(use: str) -> tuple[list, torch.Tensor]:
    data = Captured(use)
    tensor = data.tensor
    return list(torch.utils.data.DataLoader(data, num_workers=1, batch_size=2)), tensor


def test_worker_that_drops_a_captured_tensor_does_no_harm():
    batches, tensor = load("drop")
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]
    assert torch.equal(tensor.cpu(), torch.arange(1024.0))
    again = torch.empty(1024, device="neuron").fill_(5)
    assert torch.equal(tensor.cpu(), torch.arange(1024.0)) and again.sum().item() == 5 * 1024


@pytest.mark.parametrize("use", ["write", "read", "allocate"])
def test_worker_that_uses_the_device_gets_the_well_known_sentence(use):
    with pytest.raises(RuntimeError, match=SENTENCE):
        load(use)


def test_child_that_writes_leaves_the_parents_data_alone():
    t = torch.arange(256.0, device="neuron")
    child = os.fork()
    if child == 0:
        try:
            t.fill_(-1)
        except RuntimeError as error:
            os._exit(0 if SENTENCE in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(t.cpu(), torch.arange(256.0))


def test_every_use_in_a_child_is_refused():
    uses = [
        "t.copy_(torch.ones(4))",
        "t.zero_()",
        "t.uniform_()",
        "torch.ones(4).copy_(t)",
        "t[0].item()",
        "t.view(2, 2).tolist()",
        "torch.neuron.init()",
        "torch.neuron.synchronize()",
        "torch.neuron.set_device(0)",
        "torch.neuron.memory_allocated()",
    ]
    program = f"""
import os, torch
t = torch.ones(4, device="neuron")
for use in {uses!r}:
    child = os.fork()
    if child == 0:
        assert torch.neuron._is_in_bad_fork()
        try:
            exec(use)
        except RuntimeError as error:
            os._exit(0 if {SENTENCE!r} in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["0"] * len(uses), (dict(zip(uses, run.stdout.split(), strict=False)), run.stderr)


def test_child_forked_before_the_first_use_has_a_device_of_its_own():
    program = """
import os, torch
child = os.fork()
if child == 0:
    os._exit(0 if torch.ones(4, device="neuron").sum().item() == 4 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.ones(2, device="neuron").sum().item())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.stdout == "0 2.0\n", run.stderr
