"""The text that a recipe trains on: ordered documents from Python's standard library, text, JSON Lines or Parquet
files.

A corpus knows its files in a fixed order and yields documents (str) one after the other, the same on every rank.
Recipes name one with TorchTitan's own keys ``training.dataset`` (a name in ``CORPORA``) and
``training.dataset_path``. Read by the data loader and by the tokenizer's build script. Imports no torch.
"""

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Folders of the standard library that hold no ordinary source: installed packages, and tests with broken encodings and
# machine-made cases by the megabyte.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Written by the installation, so different on every machine.
_INSTALLED = ("_sysconfigdata", "sitecustomize", "usercustomize")
_FINGERPRINT_BYTES_PER_FILE = 64 * 1024


class CorpusError(ValueError):
    """The text named by a recipe cannot be read; the message says which file, and what was expected."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        name: the corpus's name in ``training.dataset``.
        root: folder that the files' names are relative to; the folder itself may differ between machines.
        files: the files, in the order in which they are read.
        location: the absolute path or pattern that stands for ``training.dataset_path``; None where none is needed.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    location: Path | None = None

    def documents(self) -> Iterator[str]:
        """Yields each document's text. Bytes that are not UTF-8 become U+FFFD."""
        for file in self.files:
            yield file.read_text(encoding="utf-8", errors="replace")

    def fingerprint(self) -> str:
        """A hash (16 hexadecimal digits) of the files' names, sizes and first 64 KiB each."""
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                head = stream.read(_FINGERPRINT_BYTES_PER_FILE)
            name = file.relative_to(self.root).as_posix()
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(head)
        return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class JsonLinesCorpus(Corpus):
    """One JSON object a line; the document is the string under ``text_field``."""

    text_field: str = "text"

    def documents(self) -> Iterator[str]:
        for file in self.files:
            with file.open(encoding="utf-8", errors="replace") as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    try:
                        record = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise CorpusError(f"{file}, line {number}: not JSON: {error}") from error
                    if not isinstance(record, dict):
                        raise CorpusError(
                            f"{file}, line {number}: expected a JSON object, found {type(record).__name__}"
                        )
                    text = record.get(self.text_field)
                    if not isinstance(text, str):
                        raise CorpusError(
                            f"{file}, line {number}: no text under {self.text_field!r}; the keys are "
                            f"{', '.join(map(repr, record))} (set neuron.text_field)"
                        )
                    yield text


@dataclasses.dataclass(frozen=True)
class ParquetCorpus(Corpus):
    """One document a row, from the string column ``text_field``. Read in batches; needs pyarrow."""

    text_field: str = "text"

    def documents(self) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        for file in self.files:
            try:
                table = pyarrow.parquet.ParquetFile(file)
            except pyarrow.ArrowInvalid as error:
                raise CorpusError(f"{file}: not a Parquet file: {error}") from error
            with table:
                columns = table.schema_arrow.names
                if self.text_field not in columns:
                    raise CorpusError(
                        f"{file}: no column {self.text_field!r}; the columns are {', '.join(map(repr, columns))} "
                        "(set neuron.text_field)"
                    )
                row = 0
                for batch in table.iter_batches(batch_size=256, columns=[self.text_field]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str):
                            raise CorpusError(
                                f"{file}, row {row}: {self.text_field!r} holds {type(text).__name__}, expected text"
                            )
                        yield text
                        row += 1


def python_standard_library() -> Corpus:
    """The source files of the running Python's standard library, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(_INSTALLED)]
    if not files:
        raise CorpusError(
            f"this Python has no source files of its standard library in {root}; name another text in the recipe: "
            "training.dataset = 'text' and training.dataset_path = '...'"
        )
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return Corpus("python_stdlib", root, tuple(files))


class Location(NamedTuple):
    """What ``training.dataset_path`` names: the absolute path or pattern, the folder of the files, the files in
    order.
    """

    path: Path
    root: Path
    files: tuple[Path, ...]


def _files_at(name: str, path: str, suffix: str, base: Path | None, section: str) -> Location:
    """The files that ``path`` names: a file, a folder (every file in it that ends in ``suffix``) or a glob pattern.

    A relative path is looked up from the working directory, then from ``base`` (the recipe's folder).
    """
    places = list(dict.fromkeys(start / Path(path).expanduser() for start in (Path.cwd(), base) if start is not None))
    for place in places:
        if place.is_file():
            return Location(place, place.parent, (place,))
        if place.is_dir():
            files = sorted((file for file in place.rglob(f"*{suffix}") if file.is_file()), key=lambda f: f.as_posix())
            if not files:
                raise CorpusError(f"{section}.dataset_path = {path!r}: no {suffix} file in the folder {place}")
            return Location(place, place, tuple(files))
        found = sorted(Path(match) for match in glob.glob(str(place), recursive=True) if Path(match).is_file())
        if found:
            return Location(place, Path(os.path.commonpath([file.parent for file in found])), tuple(found))
    raise CorpusError(
        f"{section}.dataset_path = {path!r} (for {section}.dataset = {name!r}): no such file, folder or pattern; "
        f"looked at {' and '.join(map(str, places))}"
    )


# Name in ``training.dataset`` -> ending of the files looked for in a folder; None: no path is needed.
CORPORA: dict[str, str | None] = {"python_stdlib": None, "text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}


def open_corpus(
    name: str,
    path: str | None = None,
    text_field: str = "text",
    base: Path | None = None,
    section: str = "training",
) -> Corpus:
    """The corpus that a recipe names.

    Args:
        name: one of ``CORPORA``.
        path: ``training.dataset_path``.
        text_field: key (JSON Lines) or column (Parquet) that holds the text.
        base: the recipe's folder, where a relative path is looked up if it does not exist from the working directory.
        section: the recipe's table that names the text, for messages.

    Raises:
        CorpusError: unknown name, missing or superfluous path, no files.
    """
    if name not in CORPORA:
        raise CorpusError(f"{section}.dataset = {name!r}: expected one of {', '.join(map(repr, CORPORA))}")
    suffix = CORPORA[name]
    if suffix is None:
        if path is not None:
            raise CorpusError(f"{section}.dataset_path = {path!r}: {section}.dataset = {name!r} takes no path")
        return python_standard_library()
    if not path:
        raise CorpusError(f"{section}.dataset = {name!r} needs {section}.dataset_path: a file, a folder or a pattern")
    location, root, files = _files_at(name, path, suffix, base, section)
    if name == "jsonl":
        return JsonLinesCorpus(name, root, files, location, text_field)
    if name == "parquet":
        return ParquetCorpus(name, root, files, location, text_field)
    return Corpus(name, root, files, location)
