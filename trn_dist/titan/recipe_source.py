"""The files of a recipe: the one that was named and those that it extends, read and laid over each other.

``extends = "other.toml"`` at the top of a recipe takes everything from another one, by its path from the recipe's
folder; what the recipe sets itself wins, key by key. Remembers which file and line each value came from. Imports
neither torch nor torchtitan. Called by :mod:`trn_dist.titan.recipe` and by ``trn recipes``.
"""

import dataclasses
import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

Tree = dict[str, Any]
Keys = tuple[str, ...]

EXTENDS = "extends"


class RecipeError(ValueError):
    """A recipe (or what was added on the command line) is wrong. ``problems`` holds one sentence for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclasses.dataclass(frozen=True)
class RecipeFile:
    """One TOML file, as written: its text and its tree of values, ``extends`` included."""

    path: Path
    text: str
    tree: Tree

    def line(self, keys: Keys) -> int | None:
        """The line of a key or of a table's header. Finds the usual spellings, which is enough for a message."""
        table: Keys = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            header = re.match(r"\s*\[\s*([A-Za-z0-9_.\-\s\"']+?)\s*\]\s*(#.*)?$", line)
            if header:
                table = _dotted(header[1])
                if table == keys:
                    return number
                continue
            assignment = re.match(r"\s*([A-Za-z0-9_.\-\"']+)\s*=", line)
            if assignment and table + _dotted(assignment[1]) == keys:
                return number
        return None

    def sets(self, keys: Keys) -> bool:
        node: Any = self.tree
        for key in keys:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    def head_comment(self) -> str:
        """The comment that the file opens with, as one paragraph."""
        lines = []
        for line in self.text.splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("#").strip())
        return " ".join(lines)


@dataclasses.dataclass
class Source:
    """A recipe's values and where each came from.

    Attributes:
        files: the recipe itself, then what it extends, the nearest first.
        tree: all values, the files laid over each other, the command line on top.
        overridden: keys set on the command line.
    """

    files: list[RecipeFile]
    tree: Tree
    overridden: set[Keys] = dataclasses.field(default_factory=set)

    @property
    def path(self) -> Path:
        return self.files[0].path

    def place(self, keys: Keys) -> str:
        """``file, line 12`` if a file sets these keys, ``command line`` if that does, else the recipe's name."""
        return self.origin(keys) or str(self.path)

    def origin(self, keys: Keys) -> str | None:
        """As :meth:`place`; None for what nobody set."""
        if keys in self.overridden:
            return "command line"
        for file in self.files:
            if file.sets(keys):
                line = file.line(keys)
                return f"{file.path}, line {line}" if line else str(file.path)
        return None

    def folder(self, keys: Keys) -> Path:
        """The folder of the file that sets these keys, where a relative path in their value starts."""
        return next((file.path for file in self.files if file.sets(keys)), self.path).parent

    def override(self, keys: Keys, value: Any) -> None:
        """Sets a value from the command line."""
        table = self.tree
        for key in keys[:-1]:
            table = table.setdefault(key, {})
        table[keys[-1]] = value
        self.overridden.add(keys)


def read_source(path: Path) -> Source:
    """Reads a recipe and what it extends.

    Raises:
        RecipeError: a file is missing or no TOML, ``extends`` is no string, or recipes extend each other in a ring.
    """
    files = [read_file(path)]
    while EXTENDS in files[-1].tree:
        last = files[-1]
        place = f"{last.path}, line {last.line((EXTENDS,))}"
        name = last.tree[EXTENDS]
        if not isinstance(name, str):
            raise RecipeError([f'{place}: extends = {name!r}: expected the path of one recipe, as in "other.toml"'])
        base = Path(os.path.normpath(last.path.parent / name))
        if base.resolve() in [file.path.resolve() for file in files]:
            ring = " -> ".join(str(file.path) for file in files)
            raise RecipeError(
                [f'{place}: extends = "{name}": the recipes extend each other in a ring: {ring} -> {base}']
            )
        try:
            files.append(read_file(base))
        except RecipeError as error:
            raise RecipeError([f'{place}: extends = "{name}": {problem}' for problem in error.problems]) from None
    tree: Tree = {}
    for file in reversed(files):
        tree = _laid_over(tree, {key: value for key, value in file.tree.items() if key != EXTENDS})
    return Source(files, tree)


def read_file(path: Path) -> RecipeFile:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise RecipeError([f"{path}: no such recipe{hint}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([f"{path}: cannot be read as a recipe: {error}"]) from None
    try:
        return RecipeFile(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([f"{path}: not TOML: {error}"]) from None


def _laid_over(below: Tree, above: Tree) -> Tree:
    result = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _laid_over(result[key], value) if both_tables else value
    return result


def _dotted(text: str) -> Keys:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
