"""Sparse tensors: COO and compressed ones live on the device, and their operators are the CPU's."""

import pytest
import torch

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


def matrix():
    torch.manual_seed(0)
    return torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)


def dense(tensor):
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout):
    host = matrix().to_sparse(layout=layout)
    moved = host.to("neuron")
    assert moved.device == torch.device("neuron:0") and moved.layout == layout and moved.values().is_neuron
    assert torch.equal(dense(moved), matrix()) and torch.equal(dense(moved.cpu()), matrix())
    made = matrix().to("neuron").to_sparse(layout=layout)
    assert made.device.type == "neuron" and torch.equal(dense(made), matrix())


def test_construction():
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device="neuron")
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, 5.0], device="neuron"), (2, 3))
    assert tensor.is_neuron and not tensor.is_coalesced()
    merged = torch.sparse_coo_tensor(indices[:, [0, 0, 1]], torch.ones(3, device="neuron"), (2, 3)).coalesce()
    assert merged.is_coalesced() and merged.values().tolist() == [2, 1] and merged.is_neuron
    csr = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], device="neuron"), torch.tensor([1, 0], device="neuron"), torch.ones(2, device="neuron")
    )
    assert csr.device.type == "neuron" and dense(csr).tolist() == [[0, 1], [1, 0]]
    empty = torch.empty(2, 3, layout=torch.sparse_coo, device="neuron")
    assert empty.is_neuron and empty._nnz() == 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_products(layout):
    other = torch.randn(6, 3)
    host = matrix().to_sparse(layout=layout)
    assert torch.equal((host.to("neuron") @ other.to("neuron")).cpu(), host @ other)


def test_arithmetic_in_place_and_out():
    def run(device):
        a = matrix().to(device).to_sparse()
        b = (matrix() * 2).to(device).to_sparse()
        added = a + b
        a.add_(b)
        scaled = a * 3
        a.mul_(0.5)
        a.zero_()
        return [dense(t) for t in (added, scaled, torch.sparse.sum(added, 0), added.t(), a)]

    for expected, actual in zip(run("cpu"), run("neuron"), strict=True):
        assert torch.equal(expected, actual)


def test_gradients():
    def run(device):
        a = matrix().to(device).to_sparse().requires_grad_()
        b = torch.ones(6, 2, device=device, requires_grad=True)
        torch.sparse.mm(a, b).square().sum().backward()
        return dense(a.grad), b.grad.cpu()

    for expected, actual in zip(run("cpu"), run("neuron"), strict=True):
        assert torch.equal(expected, actual)


def test_sparse_embedding_gradient():
    def run(device):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(10, 4, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        embedding(torch.tensor([1, 3, 1], device=device)).square().sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
        return embedding.weight.detach().cpu()

    assert torch.equal(run("cpu"), run("neuron"))


def test_memory_is_counted():
    before = torch.neuron.memory_allocated()
    tensor = matrix().to("neuron").to_sparse()
    assert torch.neuron.memory_allocated() > before
    del tensor
    assert torch.neuron.memory_allocated() == before


def test_what_the_device_does_not_hold_says_so():
    with pytest.raises((NotImplementedError, RuntimeError), match=r"neuron|mkldnn|Mkldnn"):
        torch.ones(2, 2, device="neuron").to_mkldnn()
    with pytest.raises((NotImplementedError, RuntimeError), match="neuron"):
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="neuron").sin()
