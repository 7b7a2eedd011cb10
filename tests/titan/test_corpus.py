"""The texts a recipe can name: which files, in which order, and what is said when they cannot be read."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trn_dist.titan.corpus import CorpusError, open_corpus, python_standard_library


def test_standard_library_is_the_same_list_of_source_files_each_time():
    corpus = python_standard_library()
    names = [file.relative_to(corpus.root).as_posix() for file in corpus.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [
        name for name in names if "site-packages" in name or name.startswith("test/") or "_sysconfigdata" in name
    ]
    assert python_standard_library() == corpus
    assert python_standard_library().fingerprint() == corpus.fingerprint()
    assert sum(len(text) for text in corpus.documents()) > 5_000_000


def test_bytes_that_are_not_utf8_do_not_stop_a_run(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad\r\nend")
    corpus = open_corpus("text", str(tmp_path))
    assert list(corpus.documents()) == ["good \ufffd bad\nend"]


def test_text_files_by_file_folder_and_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert list(open_corpus("text", str(tmp_path / "b.txt")).documents()) == ["b.txt"]
    assert list(open_corpus("text", str(tmp_path)).documents()) == ["a.txt", "b.txt", "sub/c.txt"]
    assert list(open_corpus("text", str(tmp_path / "*.md")).documents()) == ["notes.md"]
    # A relative path is looked up from the working directory, then from the recipe's folder.
    monkeypatch.chdir(tmp_path / "sub")
    assert list(open_corpus("text", "c.txt", base=tmp_path).documents()) == ["sub/c.txt"]
    assert list(open_corpus("text", "a.txt", base=tmp_path).documents()) == ["a.txt"]
    with pytest.raises(
        CorpusError, match=r"nowhere.txt.*no such file, folder or pattern; looked at .*sub/nowhere.txt and"
    ):
        open_corpus("text", "nowhere.txt", base=tmp_path)
    with pytest.raises(CorpusError, match=r"no .jsonl file in the folder"):
        open_corpus("jsonl", str(tmp_path))


def test_json_lines(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "zwei ü"}) + "\n")
    assert list(open_corpus("jsonl", str(file)).documents()) == ["one", "zwei ü"]
    file.write_text('{"body": "one"}\n')
    assert list(open_corpus("jsonl", str(file), text_field="body").documents()) == ["one"]
    with pytest.raises(
        CorpusError, match=r"a.jsonl, line 1: no text under 'text'; the keys are 'body' \(set neuron.text_field\)"
    ):
        list(open_corpus("jsonl", str(file)).documents())
    file.write_text('{"text": "one"}\nnot json\n')
    with pytest.raises(CorpusError, match=r"a.jsonl, line 2: not JSON"):
        list(open_corpus("jsonl", str(file)).documents())
    file.write_text("[1]\n")
    with pytest.raises(CorpusError, match=r"line 1: expected a JSON object, found list"):
        list(open_corpus("jsonl", str(file)).documents())


def test_parquet(tmp_path: Path):
    file = tmp_path / "a.parquet"
    texts = [f"row {number}" for number in range(600)]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(600)), "text": texts}), file)
    assert list(open_corpus("parquet", str(tmp_path)).documents()) == texts
    with pytest.raises(CorpusError, match=r"a.parquet: no column 'body'; the columns are 'id', 'text'"):
        list(open_corpus("parquet", str(file), text_field="body").documents())
    with pytest.raises(CorpusError, match=r"a.parquet, row 0: 'id' holds int, expected text"):
        list(open_corpus("parquet", str(file), text_field="id").documents())
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(CorpusError, match=r"a.parquet: not a Parquet file"):
        list(open_corpus("parquet", str(file)).documents())


def test_names_and_paths_that_do_not_go_together():
    with pytest.raises(
        CorpusError, match=r"training.dataset = 'csv': expected one of 'python_stdlib', 'text', 'jsonl'"
    ):
        open_corpus("csv", "x")
    with pytest.raises(CorpusError, match=r"training.dataset = 'text' needs training.dataset_path"):
        open_corpus("text")
    with pytest.raises(CorpusError, match=r"'python_stdlib' takes no path"):
        open_corpus("python_stdlib", "/tmp")


def test_fingerprint_follows_names_and_content_but_not_the_place(tmp_path: Path):
    def fingerprint(folder: str, files: dict[str, str]) -> str:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        return open_corpus("text", str(tmp_path / folder)).fingerprint()

    first = fingerprint("one", {"a.txt": "x", "b.txt": "y"})
    assert fingerprint("two", {"a.txt": "x", "b.txt": "y"}) == first
    assert fingerprint("three", {"a.txt": "x", "b.txt": "z"}) != first
    assert fingerprint("four", {"a.txt": "x", "c.txt": "y"}) != first
