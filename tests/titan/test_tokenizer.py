"""The committed tokenizer: any text survives it, TorchTitan reads it, and the build script makes the same file "
"again."""

import json
from pathlib import Path

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import llama3_args

from trn_dist.titan.build_tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, TOKENIZER_FOLDER, build_tokenizer, save_tokenizer
from trn_dist.titan.corpus import open_corpus, python_standard_library


def test_any_text_comes_back_unchanged():
    tokenizer = HuggingFaceTokenizer(str(TOKENIZER_FOLDER))
    for text in ("", "def f(x):\n\n        return  x\t\r\n", "ünïcode 漢字 🙂 \u0000\x7f", "  leading and trailing  "):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text


def test_torchtitan_marks_begin_and_end():
    tokenizer = HuggingFaceTokenizer(str(TOKENIZER_FOLDER))
    assert (
        tokenizer.decode([tokenizer.bos_id, tokenizer.eos_id], skip_special_tokens=False) == BEGIN_OF_TEXT + END_OF_TEXT
    )
    ids = tokenizer.encode("import os", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id and ids.count(tokenizer.eos_id) == 1


def test_it_fits_the_debug_model_and_compresses_source_code():
    tokenizer = HuggingFaceTokenizer(str(TOKENIZER_FOLDER))
    assert tokenizer.get_vocab_size() == llama3_args["debugmodel"].vocab_size
    text = Path(json.__file__).read_text()
    assert len(text) / len(tokenizer.encode(text)) > 2.5


def test_building_is_deterministic(tmp_path: Path):
    for file in python_standard_library().files[:40]:
        (tmp_path / file.name).with_suffix(".txt").write_text(file.read_text(errors="replace"))
    corpus = open_corpus("text", str(tmp_path))
    for folder in ("one", "two"):
        save_tokenizer(build_tokenizer(corpus), tmp_path / folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    built = json.loads((tmp_path / "one" / "tokenizer_config.json").read_text())
    assert built == json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
