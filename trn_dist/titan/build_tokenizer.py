"""Builds the tokenizer that the recipes use: ``python -m trn_dist.titan.build_tokenizer [folder]``.

A byte-level BPE of 2,048 tokens, trained on the source files of Python's standard library. 2,048 is the vocabulary of
TorchTitan's own ``debugmodel`` flavours, so these run as they are. The result is committed under ``assets/tokenizer``
and used from there, because the standard library differs between Python versions; the same Python builds the same
file.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trn_dist.titan.corpus import Corpus, python_standard_library

TOKENIZER_FOLDER = Path(__file__).parent / "assets" / "tokenizer"
VOCABULARY_SIZE = 2048
BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"


def build_tokenizer(corpus: Corpus) -> Tokenizer:
    """Trains the tokenizer on ``corpus``. Any text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (BEGIN_OF_TEXT, END_OF_TEXT)],
        # All 256 bytes, whether they occur in the text or not.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, the two files that TorchTitan's tokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "bos_token": BEGIN_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,
        "add_eos_token": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_FOLDER
    corpus = python_standard_library()
    tokenizer = build_tokenizer(corpus)
    save_tokenizer(tokenizer, folder)
    print(f"{tokenizer.get_vocab_size()} tokens from {len(corpus.files)} files of {corpus.root} -> {folder}")


if __name__ == "__main__":
    main()
