"""Hugging Face's models as others' code: tiny random Llama and BERT train and generate as on the CPU.

transformers comes with the extra `dev`; nothing is downloaded.
"""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'trn_dist[dev]'")
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def batches(steps=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 16), generator=generator) for _ in range(steps)]


def train_by_hand(model, device):
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches():
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("make", [llama, bert])
def test_training_has_the_cpus_bits(make):
    losses, reference = train_by_hand(make(), "cpu")
    ours, model = train_by_hand(make(), "neuron")
    assert ours == losses
    for (name, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert actual.device.type == "neuron" and torch.equal(expected, actual.cpu()), name


def test_accelerate_takes_the_device_by_itself(tmp_path):
    losses, _ = train_by_hand(llama(), "cpu")
    accelerator = Accelerator()
    assert accelerator.device.type == "neuron"
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = accelerator.prepare(torch.utils.data.DataLoader(torch.cat(batches()), batch_size=2))
    ours = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ours.append(loss.item())
    assert ours == losses
    accelerator.save_state(str(tmp_path))
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(b, p.cpu()) for b, p in zip(before, model.parameters(), strict=True))


def test_safetensors_load_on_the_device(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0).view(2, 3)}, file)
    for device in ("neuron", "neuron:1", torch.device("neuron", 1)):
        weight = load_file(file, device=device)["weight"]
        assert weight.device.type == "neuron" and torch.equal(weight.cpu(), torch.arange(6.0).view(2, 3))
    assert weight.device.index == 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_generation_gives_the_cpus_tokens(compiled):
    prompt = batches(1)[0]
    model = llama().eval()
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    model = model.to("neuron")
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="neuron")
    tokens = model.generate(prompt.to("neuron"), max_new_tokens=8, do_sample=False)
    assert tokens.device.type == "neuron" and torch.equal(tokens.cpu(), expected)
