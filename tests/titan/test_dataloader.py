"""One global order of samples on every layout, and resuming on another one."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from trn_dist.titan.build_tokenizer import TOKENIZER_FOLDER
from trn_dist.titan.corpus import Corpus, CorpusError, open_corpus
from trn_dist.titan.dataloader import GlobalOrderDataLoader, PackedSamples

SEQ_LEN = 16
GLOBAL_BATCH = 8
STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for number in range(7):
        (folder / f"{number}.txt").write_text(
            " ".join(f"word{number}_{position}" for position in range(60 + 31 * number))
        )
    return open_corpus("text", str(folder))


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(TOKENIZER_FOLDER))


def loader(corpus, tokenizer, dp_rank=0, dp_world_size=1, local_batch_size=1, shuffle_block=0, seq_len=SEQ_LEN):
    return GlobalOrderDataLoader(corpus, tokenizer, seq_len, local_batch_size, dp_rank, dp_world_size, shuffle_block)


def steps_of_layout(corpus, tokenizer, dp: int, local: int, shuffle_block: int) -> list[torch.Tensor]:
    """The samples of each step, put together over ranks and accumulation steps in the documented order."""
    accumulation = GLOBAL_BATCH // (dp * local)
    iterators = [iter(loader(corpus, tokenizer, rank, dp, local, shuffle_block)) for rank in range(dp)]
    steps = []
    for _ in range(STEPS):
        microbatches = [next(iterator) for _ in range(accumulation) for iterator in iterators]
        steps.append(torch.cat([torch.cat([inputs["input"], labels], 1) for inputs, labels in microbatches]))
    return steps


@pytest.mark.parametrize("shuffle_block", [0, 5, 64])
@pytest.mark.parametrize(("dp", "local"), [(8, 1), (4, 1), (4, 2), (2, 1), (2, 4), (1, 8)])
def test_every_layout_sees_the_same_samples_in_the_same_order(corpus, tokenizer, dp, local, shuffle_block):
    reference = steps_of_layout(corpus, tokenizer, 1, 1, shuffle_block)
    for step, expected in zip(steps_of_layout(corpus, tokenizer, dp, local, shuffle_block), reference, strict=True):
        assert torch.equal(step, expected)


def test_kth_microbatch_is_the_same_on_1x8_2x4_4x2_8x1(corpus, tokenizer):
    def microbatches(dp: int) -> list[torch.Tensor]:
        iterators = [iter(loader(corpus, tokenizer, rank, dp)) for rank in range(dp)]
        return [next(iterators[k % dp])[0]["input"] for k in range(GLOBAL_BATCH)]

    for dp in (2, 4, 8):
        for one, other in zip(microbatches(1), microbatches(dp), strict=True):
            assert torch.equal(one, other)


def test_samples_are_the_text_without_a_gap(corpus, tokenizer):
    text = [
        token for document in corpus.documents() for token in tokenizer.encode(document, add_bos=True, add_eos=True)
    ]
    count = len(text) // (SEQ_LEN + 1)
    samples = list(itertools.islice(PackedSamples(corpus, tokenizer, SEQ_LEN), count))
    assert [token for sample in samples for token in sample] == text[: count * (SEQ_LEN + 1)]
    batch, labels = next(iter(loader(corpus, tokenizer, local_batch_size=2)))
    assert batch["input"].tolist() == [samples[0][:-1], samples[1][:-1]]
    assert labels.tolist() == [samples[0][1:], samples[1][1:]]
    assert batch["input"].dtype == labels.dtype == torch.int64


def test_shuffling_reorders_within_a_block_and_loses_nothing(corpus, tokenizer):
    in_order = list(itertools.islice(PackedSamples(corpus, tokenizer, SEQ_LEN), 12))
    shuffled = list(itertools.islice(PackedSamples(corpus, tokenizer, SEQ_LEN, shuffle_block=6), 12))
    assert shuffled != in_order
    assert sorted(shuffled[:6]) == sorted(in_order[:6])
    assert sorted(shuffled[6:]) == sorted(in_order[6:])


def test_the_text_starts_again_at_its_end(corpus, tokenizer):
    tokens = sum(len(tokenizer.encode(document, add_bos=True, add_eos=True)) for document in corpus.documents())
    count = 3 * tokens // (SEQ_LEN + 1)
    samples = list(itertools.islice(PackedSamples(corpus, tokenizer, SEQ_LEN), count))
    joined = [token for sample in samples for token in sample]
    assert joined[tokens : 2 * tokens] == joined[:tokens]


@pytest.mark.parametrize(("dp_before", "dp_after"), [(1, 1), (8, 4), (2, 8), (4, 1)])
def test_a_checkpoint_resumes_on_another_data_parallel_degree(corpus, tokenizer, tmp_path, dp_before, dp_after):
    expected = steps_of_layout(corpus, tokenizer, 1, 1, shuffle_block=5)
    before = [loader(corpus, tokenizer, rank, dp_before, shuffle_block=5) for rank in range(dp_before)]
    for one in before:
        for _ in zip(range(GLOBAL_BATCH // dp_before), one, strict=False):
            pass
    states = [one.state_dict() for one in before]
    assert all(state == states[0] for state in states)
    assert states[0]["samples_dealt"] == GLOBAL_BATCH
    dcp.save({"dataloader": before[-1]}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    after = [loader(corpus, tokenizer, rank, dp_after, shuffle_block=5) for rank in range(dp_after)]
    for one in after:
        dcp.load({"dataloader": one}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    iterators = [iter(one) for one in after]
    rest = [next(iterator)[0]["input"] for _ in range(GLOBAL_BATCH // dp_after) for iterator in iterators]
    assert torch.equal(torch.cat(rest), expected[1][:, :SEQ_LEN])


def test_a_checkpoint_holds_the_generators_offset(corpus, tokenizer, tmp_path):
    torch.neuron.manual_seed(3)
    torch.rand(7, device="neuron")
    dcp.save({"dataloader": loader(corpus, tokenizer)}, checkpoint_id=tmp_path, no_dist=True)
    expected = torch.nn.functional.dropout(torch.ones(64, device="neuron"))

    torch.neuron.manual_seed(3)  # as a new process does, from debug.seed
    torch.rand(100, device="neuron")  # initial weights that the checkpoint replaces
    dcp.load({"dataloader": loader(corpus, tokenizer)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="neuron")), expected)


def test_a_checkpoint_of_another_text_or_length_is_refused(corpus, tokenizer, tmp_path):
    (tmp_path / "other.txt").write_text("another text altogether")
    other = open_corpus("text", str(tmp_path))
    state = loader(corpus, tokenizer).state_dict()
    with pytest.raises(
        ValueError, match=r"its text \(its fingerprint\) is .* --checkpoint.exclude_from_loading dataloader"
    ):
        loader(other, tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match=r"its training.seq_len is 16, this run's is 32"):
        loader(corpus, tokenizer, seq_len=32).load_state_dict(state)
    with pytest.raises(ValueError, match=r"its neuron.shuffle_block is 0, this run's is 4"):
        loader(corpus, tokenizer, shuffle_block=4).load_state_dict(state)


def test_a_text_without_tokens_ends_in_an_error(tmp_path: Path):
    class NoTokens:
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            return []

    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(CorpusError, match=r"the text text \(1 files\) holds no token"):
        next(iter(loader(open_corpus("text", str(tmp_path)), NoTokens())))
