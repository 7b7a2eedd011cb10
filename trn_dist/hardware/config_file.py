"""Reading hardware files: where they live, inheritance, and turning a TOML table into a frozen dataclass.

Only the standard library. Called by ``chip.py`` and ``cluster.py``, which hold the dataclasses; whatever is wrong in a
file ends here in a :class:`ConfigError` that names the file, the key, the value and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from trn_dist.shipped import shipped_folder

# Every key of a physical quantity ends in one of these. Bandwidth is in bytes, as nccom-test prints it; network cards
# are sold in bits, so their key says so in full.
UNITS = {
    "bytes": "bytes",
    "gbps": "GB/s, 10^9 bytes per second",
    "gbit_per_s": "Gbit/s, 10^9 bits per second",
    "us": "microseconds",
    "ghz": "GHz",
    "tflops": "10^12 floating-point operations per second",
}
_UNIT_SUFFIX = re.compile(
    r"_(gbit_per_s|[a-z]?b?i?bytes?|[kmgt]i?b|[kmgt]bps|[kmgt]?bit_per_s|[munp]?s|[kmg]hz|[mgtp]flops)$"
)


class ConfigError(ValueError):
    """A hardware file, or an argument that selects from one, is wrong."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The legal range of a figure; ``open_low`` excludes the lower bound itself."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            (self.low < value if self.open_low else self.low <= value) and value <= self.high and math.isfinite(value)
        )

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Names:
    """The names that a string, or the keys of a table, may take."""

    names: tuple[str, ...]


# The types of figures in the dataclasses of chip.py and cluster.py.
PositiveInt = Annotated[int, Range(0, open_low=True)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, open_low=True)]  # an efficiency
Share = Annotated[float, Range(0, 1)]  # what is left of something, 0 meaning nothing


def configs_directory() -> Path:
    """The directory that holds ``chips/`` and ``clusters/``."""
    return shipped_folder("configs")


def list_configs(kind: str) -> list[str]:
    """Names of the shipped files of a kind (``"chips"`` or ``"clusters"``), sorted."""
    return sorted(path.stem for path in (configs_directory() / kind).glob("*.toml"))


def find_config(kind: str, name: str | Path, near: Path | None = None) -> Path:
    """The file that ``name`` means: a path ending in ``.toml`` (relative to ``near``), or a shipped file's name."""
    text = str(name)
    if text.endswith(".toml"):
        path = Path(text).expanduser()
        if not path.is_absolute() and near is not None:
            path = near / path
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        return path
    path = configs_directory() / kind / f"{text}.toml"
    if not path.is_file():
        raise ConfigError(
            f"no file of {kind} is named {text!r}{_nearest(text, list_configs(kind))}; "
            f"shipped are {', '.join(list_configs(kind))}; a file of your own is named by its path, ending in .toml"
        )
    return path


def read_config(kind: str, name: str | Path, near: Path | None = None) -> tuple[dict[str, Any], Path]:
    """The table of a file, with what it ``extends`` underneath, and the path of the file itself.

    Tables merge key by key; any other value replaces the inherited one; keys listed in ``without`` are not inherited.
    """
    return _read(kind, find_config(kind, name, near), ())


def _read(kind: str, path: Path, below: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    path = path.resolve()
    if path in below:
        raise ConfigError(f"{below[0]}: key 'extends' runs in a circle: {' -> '.join(p.name for p in (*below, path))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    parent = table.pop("extends", None)
    dropped = table.pop("without", [])
    if parent is None:
        if dropped:
            raise ConfigError(
                f"{path}: key 'without' = {dropped!r}: only a file that extends another can do without its keys"
            )
        return table, path
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: key 'extends' = {parent!r}: must be the name or the path of a file")
    inherited, _ = _read(kind, find_config(kind, parent, path.parent), (*below, path))
    for key in dropped if isinstance(dropped, list) else [dropped]:
        if key not in inherited:
            there = ", ".join(inherited)
            raise ConfigError(f"{path}: key 'without' names {key!r}, which {parent!r} does not have; it has {there}")
        del inherited[key]
    return merge(inherited, table), path


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``under``; tables merge, other values replace."""
    merged = dict(under)
    for key, value in over.items():
        inherited = merged.get(key)
        merged[key] = merge(inherited, value) if isinstance(inherited, dict) and isinstance(value, dict) else value
    return merged


def build(cls: type[Any], table: Any, path: Path | str, where: str = "") -> Any:
    """A frozen dataclass ``cls`` from a TOML table; ``where`` is the table's name in the file, for messages."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {_key(where)} = {table!r}: must be a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise ConfigError(f"{path}: {_key(where, key)}: unknown key{_unknown_key_hint(key, list(fields))}")
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for name, field in fields.items():
        full = f"{where}.{name}" if where else name
        if name in table:
            values[name] = _convert(hints[name], table[name], path, full)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}: {_key(full)}: missing; must be {_legal(hints[name], full)}")
    return cls(**values)


def _convert(hint: Any, value: Any, path: Path | str, where: str) -> Any:
    """``value`` as ``hint`` asks for, or a ConfigError."""
    plain, rule = _unwrap(hint)
    if dataclasses.is_dataclass(plain):
        return build(plain, value, path, where)  # type: ignore[arg-type]
    wrong = ConfigError(f"{path}: {_key(where)} = {value!r}: must be {_legal(hint, where)}")
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong
        return tuple(_convert(arguments[0], item, path, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        for key in value:
            if isinstance(rule, Names) and key not in rule.names:
                hint_text = _unknown_key_hint(key, list(rule.names))
                raise ConfigError(f"{path}: {_key(where, key)}: unknown key{hint_text}")
        return {key: _convert(arguments[1], item, path, f"{where}.{key}") for key, item in value.items()}
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise wrong
    if (isinstance(rule, Names) and value not in rule.names) or (isinstance(rule, Range) and value not in rule):
        raise wrong
    return value


def _unwrap(hint: Any) -> tuple[Any, Range | Names | None]:
    """A type without its ``| None`` and its rule, and the rule."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(argument for argument in typing.get_args(hint) if argument is not type(None))
    if typing.get_origin(hint) is Annotated:
        plain, rule = typing.get_args(hint)[:2]
        return plain, rule
    return hint, None


def _legal(hint: Any, where: str) -> str:
    """What a key takes, in words."""
    plain, rule = _unwrap(hint)
    if dataclasses.is_dataclass(plain):
        return "a table"
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is tuple:
        return f"a list, each element {_legal(arguments[0], where)}"
    if origin is dict:
        return f"a table with keys from {', '.join(rule.names)}" if isinstance(rule, Names) else "a table"
    if isinstance(rule, Names):
        return f"one of {', '.join(repr(name) for name in rule.names)}"
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[plain]
    if isinstance(rule, Range):
        words += f" {rule}"
    if plain in (int, float):
        words += next(
            (f", in {unit}" for suffix, unit in UNITS.items() if re.search(rf"_{suffix}(\.|\[|$)", where)), ""
        )
    return words


def _unknown_key_hint(key: str, legal: list[str]) -> str:
    """Says whether only the unit is wrong, else the nearest key, then all of them."""
    stem = _UNIT_SUFFIX.sub("", key)
    for name in legal:
        match = _UNIT_SUFFIX.search(name)
        if match and stem == name[: match.start()]:
            unit = UNITS.get(match.group(1), match.group(1))
            return f": wrong unit, the key is {name!r} ({unit})"
    return f"{_nearest(key, legal)}; legal keys are {', '.join(legal)}"


def _nearest(name: str, legal: list[str]) -> str:
    close = difflib.get_close_matches(name, legal, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _key(where: str, key: str = "") -> str:
    """A key as it reads in the file: ``key 'bandwidth_gbps' in [hbm]``."""
    table, _, name = f"{where}.{key}".strip(".").rpartition(".")
    return f"key {name!r} in [{table}]" if table else f"key {name!r}"
