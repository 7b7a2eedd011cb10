"""The data loader of the recipes: the same samples in the same order, whatever the layout.

TorchTitan's own loader gives each data-parallel rank another part of the data set, so a run on 8 ranks and a run on 4
see other batches and their losses cannot be compared. This one reads a single stream of samples and deals it out.

[Note: Global order]

Text is tokenised document by document and cut into samples of ``seq_len + 1`` tokens, which are shuffled within fixed
blocks (``neuron.shuffle_block``); sample g is the same everywhere. With D data-parallel ranks and L samples a rank
and microbatch (``training.local_batch_size``), microbatch n of the run takes the next D x L samples, and rank r takes
samples [(n D + r) L, (n D + r + 1) L) of them. So

* the union over ranks and accumulation steps of one optimizer step is always the next ``training.global_batch_size``
  samples, for every D, L and number of accumulation steps;
* with equal L, the k-th block of L samples is one microbatch in every layout: 1 rank with 8 accumulation steps, 2 with
  4, 4 with 2 and 8 with 1 run the same forward passes, and differ only in the order in which gradients are summed;
* ranks that differ only in tensor, context or pipeline position get the same samples, as TorchTitan asks by (dp_rank,
  dp_world_size) alone;
* the whole state is the number of samples dealt out so far, equal on all ranks, so a checkpoint resumes with any D.

Every rank tokenises the whole stream (about a million tokens a second), and only keeps its own samples.

Called by :mod:`trn_dist.titan.train_spec`.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from trn_dist.titan.corpus import Corpus, CorpusError


class PackedSamples:
    """The endless stream of samples: documents tokenised (begin and end marked), joined and cut into equal pieces.

    No token is dropped: a sample may begin in the middle of a document, and the corpus starts again at its end. Each
    ``shuffle_block`` successive samples (0 or 1: none) come in an order drawn from the block's number, so that a
    batch holds pieces of many documents instead of one document's run of pieces.
    """

    def __init__(self, corpus: Corpus, tokenizer: BaseTokenizer, seq_len: int, shuffle_block: int = 0) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.shuffle_block = shuffle_block

    def __iter__(self) -> Iterator[list[int]]:
        """Yields samples of ``seq_len + 1`` token ids."""
        in_order = self._in_order()
        if self.shuffle_block <= 1:
            yield from in_order
            return
        for number in itertools.count():
            block = list(itertools.islice(in_order, self.shuffle_block))
            random.Random(number).shuffle(block)
            yield from block

    def _in_order(self) -> Iterator[list[int]]:
        length = self.seq_len + 1
        pending: list[int] = []
        for epoch in itertools.count():
            if epoch > 0:
                logger.info(f"The text {self.corpus.name} is read again (pass {epoch + 1})")
            tokens_in_epoch = 0
            for document in self.corpus.documents():
                tokens = self.tokenizer.encode(document, add_bos=True, add_eos=True)
                tokens_in_epoch += len(tokens)
                pending.extend(tokens)
                end = len(pending) - len(pending) % length
                for start in range(0, end, length):
                    yield pending[start : start + length]
                del pending[:end]
            if tokens_in_epoch == 0:
                raise CorpusError(f"the text {self.corpus.name} ({len(self.corpus.files)} files) holds no token")


class GlobalOrderDataLoader(BaseDataLoader):
    """Deals the stream of samples out to data-parallel ranks; see [Note: Global order] at the top of this file.

    Iterating yields, for each microbatch, what TorchTitan's trainer expects: ``({"input": tokens}, labels)``, both
    int64 of shape (local_batch_size, seq_len) on the CPU, labels one token ahead of the input.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        shuffle_block: int = 0,
    ) -> None:
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank = {dp_rank}: expected 0 to {dp_world_size - 1}")
        self.samples = PackedSamples(corpus, tokenizer, seq_len, shuffle_block)
        self.local_batch_size = local_batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.samples_dealt = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        window = self.dp_world_size * self.local_batch_size
        before = self.dp_rank * self.local_batch_size
        samples = iter(self.samples)
        skip = self.samples_dealt + before
        while True:
            mine = list(itertools.islice(samples, skip, skip + self.local_batch_size))
            skip = window - self.local_batch_size
            # Counted before the batch is out: a checkpoint taken after this step must not deal it again.
            self.samples_dealt += window
            tokens = torch.tensor(mine, dtype=torch.int64)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """The number of samples dealt out, what they were cut from, and how many random numbers the device has drawn.

        The same on every rank; of pipeline stages that draw unequally often (dropout in some of them), the checkpoint
        holds one rank's number. The generator's seed is not here: a rank sets it from ``debug.seed`` when it starts.
        """
        return {
            "samples_dealt": self.samples_dealt,
            "generator_offset": _generator().get_offset() if hasattr(torch, "neuron") else 0,
            "seq_len": self.samples.seq_len,
            "shuffle_block": self.samples.shuffle_block,
            "corpus": self.samples.corpus.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the samples that the checkpoint's run has seen, on any number of data-parallel ranks.

        Raises:
            ValueError: the checkpoint's run read another text or another sequence length, so its position means
            nothing.
        """
        if not state_dict:
            return
        own = self.state_dict()
        for key, what in (
            ("corpus", "text (its fingerprint)"),
            ("seq_len", "training.seq_len"),
            ("shuffle_block", "neuron.shuffle_block"),
        ):
            if state_dict[key] != own[key]:
                raise ValueError(
                    f"the checkpoint's position in the data cannot be used: its {what} is {state_dict[key]!r}, this "
                    "run's "
                    f"is {own[key]!r}; restore both, or start the data anew with --checkpoint.exclude_from_loading "
                    "dataloader"
                )
        self.samples_dealt = state_dict["samples_dealt"]
        if hasattr(torch, "neuron"):
            _generator().set_offset(state_dict["generator_offset"])


def _generator() -> torch.Generator:
    return torch.neuron._get_generator()  # type: ignore[attr-defined]
