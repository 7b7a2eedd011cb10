"""Recipes: a TOML file in TorchTitan's own sections plus the table ``[neuron]``, read, checked and resolved.

Everything that can be said about a recipe before ranks are started is said here, all mistakes at once, each with
file, line, key, value and what would be right. TorchTitan's dataclasses decide which keys exist and which values they
take; the rules on sizes and degrees are those that TorchTitan or PyTorch would raise later, on every rank. Called by
:mod:`trn_dist.titan.train`; starts nothing and writes nothing but what :func:`to_toml` returns.
"""

import dataclasses
import difflib
import importlib
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from trn_dist.faults import FaultError, parse_fault
from trn_dist.titan.recipe_source import RecipeError as RecipeError
from trn_dist.titan.recipe_source import Source, Tree, read_source

CONFIG_MODULE = "trn_dist.titan.config"

_LISTENER = "/pymp-xxxxxxxx/listener-xxxxxxxx"
"""What Python's multiprocessing adds to the temporary folder for the socket of a manager."""
_LONGEST_SOCKET_BYTES = 107
"""sun_path without its closing zero, unix(7)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the ranks are arranged; the product of all but ``ep`` is the number of ranks."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, each of which reads its own samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        parts = []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"HSDP {self.dp_replicate} x {self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"DDP {self.dp_replicate}")
        elif self.dp_shard > 1:
            parts.append(f"FSDP2 {self.dp_shard}")
        names = (("CP", self.cp), ("TP", self.tp), ("PP", self.pp), ("EP", self.ep))
        parts += [f"{name} {degree}" for name, degree in names if degree > 1]
        return " x ".join(parts) or "one rank"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe whose keys, values and sizes have been checked.

    Attributes:
        source: the TOML files and the command line, with the place of each value.
        config: TorchTitan's ``JobConfig`` with the table ``neuron``, defaults filled in, paths absolute.
        layout: the degrees, with TorchTitan's -1 worked out.
        global_batch_size: samples a step.
        accumulation_steps: microbatches of a rank and step.
    """

    source: Source
    config: Any
    layout: Layout
    global_batch_size: int
    accumulation_steps: int

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def ranks(self) -> int:
        return self.config.neuron.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.config.training.seq_len


def resolve(path: Path, overrides: list[str]) -> Recipe:
    """Reads a recipe, applies the command line and checks the result.

    Args:
        path: the TOML file.
        overrides: TorchTitan's own syntax: ``--section.key value``, ``--section.key=value``, for booleans
            ``--section.key`` and ``--section.no-key``; dashes and underscores are the same.

    Raises:
        RecipeError: with all mistakes that were found.
    """
    source = read_source(path)
    config_class = _config_class(source)
    problems = list(_check_tree(source, config_class, config_class, source.tree, ()))
    added, override_problems = _parse_overrides(overrides, config_class)
    problems += override_problems
    if problems:
        raise RecipeError(problems)
    for keys, value in added:
        source.override(keys, value)
    try:
        config = _build(config_class, source.tree)
    except AssertionError as error:  # TorchTitan's dataclasses check a few values when they are made
        raise RecipeError([f"{path}: {error}"]) from error
    return _Check(source, config).recipe()


def to_toml(config: Any) -> str:
    """A configuration as TOML: every key that has a value, section by section."""
    lines: list[str] = []
    _write_table(lines, (), dataclasses.asdict(config))
    return "\n".join(lines).lstrip("\n") + "\n"


def to_annotated_toml(recipe: Recipe, defaults: bool = False) -> str:
    """A recipe as TOML that TorchTitan reads by itself, with the place that each value comes from behind it.

    Args:
        recipe: as :func:`resolve` returns it.
        defaults: also the keys that neither a file nor the command line sets.
    """
    source = recipe.source
    lines = [f"# {recipe.config.model.name} {recipe.config.model.flavor}, {recipe.layout}: {recipe.ranks} ranks"]
    lines += [f"# {recipe.global_batch_size} x {recipe.config.training.seq_len} tokens a step"]
    omitted = 0

    def write(above: tuple[str, ...], table: Mapping[str, Any]) -> None:
        nonlocal omitted
        rows = []
        for key, value in table.items():
            keys = (*above, key)
            if isinstance(value, dict) or value is None:
                continue
            # TorchTitan finds our data and our table by this key.
            origin = source.origin(keys) or ("trn_dist" if keys == ("job", "custom_config_module") else None)
            omitted += origin is None
            if origin or defaults:
                rows.append((f"{key} = {toml_value(value)}", origin or "default"))
        if rows:
            width = min(60, max(len(row) for row, _ in rows))
            lines.extend(["", f"[{'.'.join(above)}]", *(f"{row:<{width}}  # {origin}" for row, origin in rows)])
        for key, value in table.items():
            if isinstance(value, dict):
                write((*above, key), value)

    write((), dataclasses.asdict(recipe.config))
    if omitted and not defaults:
        lines += ["", f"# {omitted} more keys have their default"]
    return "\n".join(lines) + "\n"


def settings(recipe: Recipe, defaults: bool = False) -> list[dict[str, str]]:
    """Each key of a recipe as ``key``, ``value`` (as TOML) and ``origin``: a file and line, the command line, default.

    Args:
        recipe: as :func:`resolve` returns it.
        defaults: also the keys that neither a file nor the command line sets.
    """
    rows = []

    def walk(above: tuple[str, ...], table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            keys = (*above, key)
            if isinstance(value, dict):
                walk(keys, value)
            elif value is not None and (defaults or recipe.source.origin(keys)):
                origin = recipe.source.origin(keys) or "default"
                rows.append({"key": ".".join(keys), "value": toml_value(value), "origin": origin})

    walk((), dataclasses.asdict(recipe.config))
    return rows


# --- Reading


def _config_class(source: Source) -> type:
    """TorchTitan's ``JobConfig`` merged with the one that the recipe names; ours if it names none."""
    from torchtitan.config import ConfigManager, JobConfig

    job = source.tree.setdefault("job", {})
    if not isinstance(job, dict):
        raise RecipeError([f"{source.place(('job',))}: job is not a table; write [job]"])
    name = job.setdefault("custom_config_module", CONFIG_MODULE) or CONFIG_MODULE
    place = source.place(("job", "custom_config_module"))
    try:
        custom = importlib.import_module(name).JobConfig
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError([f"{place}: job.custom_config_module = {name!r}: {error}"]) from error
    if "neuron" not in {field.name for field in dataclasses.fields(custom)}:
        raise RecipeError(
            [
                f"{place}: job.custom_config_module = {name!r}: its JobConfig has no table `neuron`; derive it from "
                f"{CONFIG_MODULE}.JobConfig"
            ]
        )
    return ConfigManager._merge_configs(JobConfig, custom)


def _build(config_class: type, tree: Tree) -> Any:
    values = {}
    for field in dataclasses.fields(config_class):
        if field.name in tree:
            value = tree[field.name]
            values[field.name] = _build(_type(field), value) if dataclasses.is_dataclass(_type(field)) else value
    return config_class(**values)


# --- Keys and values


def _type(field: "dataclasses.Field[Any]") -> Any:
    return field.type


def _leaves(config_class: type, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All keys of a configuration with their annotations."""
    for field in dataclasses.fields(config_class):
        keys = (*above, field.name)
        if dataclasses.is_dataclass(_type(field)):
            yield from _leaves(_type(field), keys)
        else:
            yield keys, _type(field)


def _nearest(keys: tuple[str, ...], config_class: type) -> str:
    """A hint at the key that was meant, or nothing."""
    known = {".".join(leaf): leaf for leaf, _ in _leaves(config_class)}
    tables = {".".join(leaf[:depth]) for leaf in known.values() for depth in range(1, len(leaf))}
    wanted = ".".join(keys)
    # The same last part elsewhere is the likeliest: lr under [training] instead of [optimizer].
    elsewhere = [name for name, leaf in known.items() if leaf[-1] == keys[-1]]
    near = elsewhere if len(elsewhere) == 1 else difflib.get_close_matches(wanted, [*known, *tables], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _check_tree(
    source: Source, root: type, config_class: type, tree: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[str]:
    fields = {field.name: _type(field) for field in dataclasses.fields(config_class)}
    for key, value in tree.items():
        keys = (*above, key)
        name = ".".join(keys)
        if key not in fields:
            what = "table" if isinstance(value, dict) else "key"
            yield f"{source.place(keys)}: {name}: no such {what}{_nearest(keys, root)}"
        elif dataclasses.is_dataclass(fields[key]):
            if isinstance(value, dict):
                yield from _check_tree(source, root, fields[key], value, keys)
            else:
                yield f"{source.place(keys)}: {name} = {value!r}: expected a table"
        else:
            problem = _check_value(fields[key], value)
            if problem:
                yield f"{source.place(keys)}: {name} = {_show(value)}: {problem}"


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _check_value(annotation: Any, value: Any) -> str | None:
    """What is wrong with a value, or None."""
    if any(_fits(alternative, value) for alternative in _alternatives(annotation)):
        return None
    choices = [c for a in _alternatives(annotation) if typing.get_origin(a) is Literal for c in typing.get_args(a)]
    if choices and isinstance(value, str):
        near = difflib.get_close_matches(value, [c for c in choices if isinstance(c, str)], n=1)
        hint = f"; did you mean {_show(near[0])}?" if near else ""
        return f"expected one of {', '.join(map(_show, choices))}{hint}"
    return f"expected {_describe(annotation)}"


def _fits(annotation: Any, value: Any) -> bool:
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return True
    if annotation in (None, types.NoneType):
        return value is None
    if origin is Literal:
        return value in typing.get_args(annotation)
    if origin is list:
        (item,) = typing.get_args(annotation)
        return isinstance(value, list) and all(_fits(item, element) for element in value)
    if isinstance(value, bool):
        return annotation is bool
    if annotation is float:
        return isinstance(value, (int, float))
    return isinstance(annotation, type) and isinstance(value, annotation)


def _describe(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    described = []
    for alternative in _alternatives(annotation):
        if alternative in (None, types.NoneType):
            continue
        if typing.get_origin(alternative) is Literal:
            described.append("one of " + ", ".join(map(_show, typing.get_args(alternative))))
        elif typing.get_origin(alternative) is list:
            described.append("a list of strings" if typing.get_args(alternative)[0] is str else "a list of lists")
        else:
            described.append(names.get(alternative, str(alternative)))
    if set(described) == {"a number", "a whole number"}:
        return "a number"
    return " or ".join(described)


# --- The command line


def _parse_overrides(overrides: list[str], config_class: type) -> tuple[list[tuple[tuple[str, ...], Any]], list[str]]:
    """Values given on the command line, and what is wrong there."""
    leaves = dict(_leaves(config_class))
    found: list[tuple[tuple[str, ...], Any]] = []
    problems: list[str] = []
    waiting = list(overrides)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or len(word) == 2:
            problems.append(f"command line: {word!r}: expected --section.key value")
            continue
        name, equals, text = word[2:].partition("=")
        keys = tuple(name.replace("-", "_").split("."))
        positive = (*keys[:-1], keys[-1].removeprefix("no_"))
        if keys not in leaves and keys != positive and leaves.get(positive) is bool and not equals:
            found.append((positive, False))
            continue
        if keys not in leaves:
            problems.append(f"command line: --{name}: no such key{_nearest(keys, config_class)}")
            if not equals and waiting and not waiting[0].startswith("--"):
                waiting.pop(0)
            continue
        if not equals:
            if waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            elif leaves[keys] is bool:
                text = "true"
            else:
                problems.append(f"command line: --{name}: no value; expected {_describe(leaves[keys])}")
                continue
        value = _parse_text(leaves[keys], text)
        problem = _check_value(leaves[keys], value)
        if problem:
            problems.append(f"command line: --{name} {text}: {problem}")
        else:
            found.append((keys, value))
    return found, problems


def _parse_text(annotation: Any, text: str) -> Any:
    """A word of the command line as the type that its key has; the text itself if it is none of them."""
    # Whole numbers before others: a key that takes both keeps 1 as 1.
    for alternative in sorted(_alternatives(annotation), key=lambda alternative: alternative is float):
        if alternative in (None, types.NoneType) and text == "None":
            return None
        if alternative is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if alternative in (int, float):
            try:
                return alternative(text)
            except ValueError:
                continue
        if typing.get_origin(alternative) is list:
            if typing.get_args(alternative)[0] is str:
                return [part for part in text.split(",") if part]
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                continue
    return text


# --- Sizes and degrees


class _Check:
    """The rules that span several keys. Collects problems; each names the numbers that do not go together."""

    def __init__(self, source: Source, config: Any) -> None:
        self.source = source
        self.config = config
        self.problems: list[str] = []

    def problem(self, key: str, text: str) -> None:
        keys = tuple(key.split("."))
        value: Any = self.config
        for part in keys:
            value = getattr(value, part)
        self.problems.append(f"{self.source.place(keys)}: {key} = {_show(value)}: {text}")

    def recipe(self) -> Recipe:
        self.positive()
        if self.problems:  # what follows divides by these
            raise RecipeError(self.problems)
        layout = self.layout()
        model_args = self.model()
        global_batch_size, accumulation_steps = self.batch(layout)
        self.sequence(layout)
        if model_args is not None:
            self.model_degrees(layout, model_args)
        self.data(model_args)
        self.checkpoint()
        self.exact_sums(layout)
        self.unsupported()
        if self.problems:
            raise RecipeError(self.problems)
        return Recipe(self.source, self.config, layout, global_batch_size, accumulation_steps)

    def positive(self) -> None:
        keys = [
            "training.steps",
            "training.local_batch_size",
            "training.seq_len",
            "metrics.log_freq",
            "neuron.ranks",
            "parallelism.data_parallel_replicate_degree",
            "parallelism.context_parallel_degree",
            "parallelism.tensor_parallel_degree",
            "parallelism.pipeline_parallel_degree",
            "parallelism.expert_parallel_degree",
            "parallelism.expert_tensor_parallel_degree",
            "parallelism.pipeline_parallel_microbatch_size",
        ]
        for key in keys:
            section, name = key.split(".")
            if getattr(getattr(self.config, section), name) < 1:
                self.problem(key, "expected 1 or more")
        shard = self.config.parallelism.data_parallel_shard_degree
        if shard < 1 and shard != -1:
            self.problem("parallelism.data_parallel_shard_degree", "expected 1 or more, or -1 for all remaining ranks")
        if self.config.training.global_batch_size == 0 or self.config.training.global_batch_size < -1:
            self.problem("training.global_batch_size", "expected 1 or more, or -1 for one microbatch a rank")
        for text in self.config.neuron.faults:
            try:
                parse_fault(text)
            except FaultError as error:
                self.problem("neuron.faults", str(error).split("\n")[0])
        if self.config.neuron.shuffle_block < 0:
            self.problem("neuron.shuffle_block", "expected 0 (read in order) or more")
        if not self.config.training.max_norm > 0:
            self.problem("training.max_norm", "expected a positive number; inf switches clipping off")

    def layout(self) -> Layout:
        p = self.config.parallelism
        ranks = self.config.neuron.ranks
        fixed = {
            "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
            "context_parallel_degree": p.context_parallel_degree,
            "tensor_parallel_degree": p.tensor_parallel_degree,
            "pipeline_parallel_degree": p.pipeline_parallel_degree,
        }
        product = math.prod(fixed.values())
        shard = p.data_parallel_shard_degree
        named = " x ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1) or "all degrees 1"
        if shard == -1:
            shard = max(1, ranks // product)
            if product * shard != ranks:
                self.problem(
                    "neuron.ranks",
                    f"the degrees in [parallelism] give {product} ({named}), and {ranks} ranks are no multiple of it, "
                    "so data_parallel_shard_degree = -1 cannot take the rest",
                )
        elif product * shard != ranks:
            named = " x ".join(f"{n} {d}" for n, d in {**fixed, "data_parallel_shard_degree": shard}.items() if d > 1)
            self.problem(
                "neuron.ranks",
                f"the degrees in [parallelism] give {product * shard} ranks ({named or 'all degrees 1'}); set "
                "neuron.ranks "
                f"to {product * shard}, change a degree, or let data_parallel_shard_degree = -1 take the rest",
            )
        layout = Layout(
            fixed["data_parallel_replicate_degree"],
            shard,
            fixed["context_parallel_degree"],
            fixed["tensor_parallel_degree"],
            fixed["pipeline_parallel_degree"],
            p.expert_parallel_degree,
        )
        beside = {"cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
        if layout.dp_replicate > 1 and shard == 1 and max(beside.values()) > 1:
            self.problem(
                "parallelism.data_parallel_replicate_degree",
                "TorchTitan's DDP cannot be combined with context, tensor or pipeline parallel "
                f"({', '.join(f'{name} {degree}' for name, degree in beside.items() if degree > 1)}); shard the "
                "parameters instead (data_parallel_shard_degree)",
            )
        if layout.ep > 1:
            etp = p.expert_tensor_parallel_degree
            if etp not in (1, layout.tp):
                self.problem(
                    "parallelism.expert_tensor_parallel_degree",
                    f"expected 1 or the tensor_parallel_degree, {layout.tp}",
                )
            elif (layout.dp_shard * layout.cp * layout.tp) % (layout.ep * etp):
                self.problem(
                    "parallelism.expert_parallel_degree",
                    f"experts are spread over data_parallel_shard_degree {layout.dp_shard} x context_parallel_degree "
                    f"{layout.cp} x tensor_parallel_degree {layout.tp} = {layout.dp_shard * layout.cp * layout.tp} "
                    "ranks, "
                    f"which {layout.ep} x expert_tensor_parallel_degree {etp} does not divide",
                )
        return layout

    def batch(self, layout: Layout) -> tuple[int, int]:
        training = self.config.training
        one_round = training.local_batch_size * layout.dp
        if training.global_batch_size == -1:
            accumulation_steps = 1
        else:
            accumulation_steps = training.global_batch_size // one_round
            if training.global_batch_size % one_round:
                self.problem(
                    "training.global_batch_size",
                    f"not a multiple of local_batch_size {training.local_batch_size} x {layout.dp} data-parallel "
                    "ranks = "
                    f"{one_round}",
                )
        microbatch = self.config.parallelism.pipeline_parallel_microbatch_size
        if layout.pp > 1 and training.local_batch_size % microbatch:
            self.problem(
                "training.local_batch_size",
                f"not a multiple of parallelism.pipeline_parallel_microbatch_size {microbatch}",
            )
        return one_round * accumulation_steps, accumulation_steps

    def sequence(self, layout: Layout) -> None:
        seq_len = self.config.training.seq_len
        # TorchTitan asks for both factors together, parallel_dims.seq_len_divisor.
        if layout.tp * layout.cp > 1 and seq_len % (layout.tp * layout.cp * 2):
            self.problem(
                "training.seq_len",
                f"not a multiple of {layout.tp * layout.cp * 2} = 2 x tensor_parallel_degree {layout.tp} x "
                f"context_parallel_degree {layout.cp}, as sequence and context parallel need",
            )

    def model(self) -> Any:
        """The model's arguments, or None when the recipe names no model."""
        from torchtitan.protocols.train_spec import get_train_spec

        from trn_dist.titan.train_spec import LANGUAGE_MODELS

        model = self.config.model
        if self.config.experimental.custom_import:
            module = self.config.experimental.custom_import
            try:
                importlib.import_module(module)
            except ImportError as error:
                self.problem("experimental.custom_import", f"{error}; the folder it lies in belongs on PYTHONPATH")
                return None
        try:
            spec = get_train_spec(model.name)
        except (ValueError, ImportError) as error:
            near = difflib.get_close_matches(model.name, LANGUAGE_MODELS, n=1)
            hint = f"; did you mean {_show(near[0])}?" if near else ""
            known = ", ".join(map(_show, LANGUAGE_MODELS))
            reason = f" ({error})" if isinstance(error, ImportError) else ""
            self.problem("model.name", f"no such model{reason}; TorchTitan's language models are {known}{hint}")
            return None
        if model.flavor not in spec.model_args:
            near = difflib.get_close_matches(model.flavor, list(spec.model_args), n=1)
            hint = f"; did you mean {_show(near[0])}?" if near else ""
            self.problem("model.flavor", f"{model.name} has {', '.join(map(_show, sorted(spec.model_args)))}{hint}")
            return None
        return spec.model_args[model.flavor]

    def model_degrees(self, layout: Layout, model_args: Any) -> None:
        heads = getattr(model_args, "n_heads", None)
        kv_heads = getattr(model_args, "n_kv_heads", None) or heads
        for what, count in (("attention heads", heads), ("key/value heads", kv_heads)):
            if count and count % layout.tp:
                self.problem(
                    "parallelism.tensor_parallel_degree",
                    f"{self.config.model.name} {self.config.model.flavor} has {count} {what}, which {layout.tp} ranks "
                    "cannot share evenly",
                )
                break
        layers = getattr(model_args, "n_layers", None)
        if layers and layout.pp > layers + 2:
            self.problem(
                "parallelism.pipeline_parallel_degree",
                f"{self.config.model.name} {self.config.model.flavor} has {layers} layers, too few for {layout.pp} "
                "stages",
            )

    def data(self, model_args: Any) -> None:
        folder = self._folder("model.hf_assets_path", self.config.model.hf_assets_path)
        if folder is not None:
            self.config.model.hf_assets_path = str(folder)
            self._vocabulary(folder, model_args)
        self._text("training")
        validation = self.config.validation
        if validation.enable:
            from trn_dist.titan.corpus import CORPORA

            self._text("validation")
            if validation.dataset in CORPORA and validation.steps == -1:
                self.problem("validation.steps", "this text has no end; expected a number of steps")
            if validation.freq < 1:
                self.problem("validation.freq", "expected 1 or more")

    def _text(self, section: str) -> None:
        """The text of training or of validation."""
        from trn_dist.titan.corpus import CORPORA, CorpusError, open_corpus

        settings = getattr(self.config, section)
        if settings.dataset in CORPORA:
            try:
                corpus = open_corpus(
                    settings.dataset,
                    settings.dataset_path,
                    self.config.neuron.text_field,
                    self.source.folder((section, "dataset_path")),
                    section,
                )
            except CorpusError as error:
                key = "dataset_path" if settings.dataset_path else "dataset"
                self.problems.append(f"{self.source.place((section, key))}: {error}")
            else:
                settings.dataset_path = None if corpus.location is None else str(corpus.location)
            if settings.dataloader.num_workers:
                self.problem(
                    f"{section}.dataloader.num_workers",
                    f"{section}.dataset = {settings.dataset!r} is read in the rank's own process; leave it at 0",
                )
        else:
            from torchtitan.hf_datasets.text_datasets import DATASETS

            if settings.dataset.lower() not in DATASETS:
                known = [*CORPORA, *DATASETS]
                near = difflib.get_close_matches(settings.dataset, known, n=1)
                hint = f"; did you mean {_show(near[0])}?" if near else ""
                self.problem(f"{section}.dataset", f"expected one of {', '.join(map(_show, known))}{hint}")

    def _folder(self, key: str, path: str) -> Path | None:
        for start in (Path.cwd(), self.source.folder(tuple(key.split("."))).resolve()):
            if (start / path).is_dir():
                return start / path
        self.problem(key, "no such folder; leave the key out for the package's own tokenizer")
        return None

    def _vocabulary(self, folder: Path, model_args: Any) -> None:
        from torchtitan.components.tokenizer import HuggingFaceTokenizer

        try:
            tokens = HuggingFaceTokenizer(str(folder)).get_vocab_size()
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
            self.problem("model.hf_assets_path", f"no usable tokenizer there: {error}")
            return
        rows = getattr(model_args, "vocab_size", tokens)
        if tokens > rows:
            self.problem(
                "model.hf_assets_path",
                f"its tokenizer has {tokens} tokens, but {self.config.model.name} {self.config.model.flavor} has a "
                f"vocabulary of {rows}; take a larger flavor or a smaller tokenizer",
            )

    def checkpoint(self) -> None:
        checkpoint = self.config.checkpoint
        if checkpoint.create_seed_checkpoint and self.config.neuron.ranks != 1:
            self.problem("neuron.ranks", "a seed checkpoint holds the whole model and is made by 1 rank")
        if checkpoint.create_seed_checkpoint and not checkpoint.enable:
            self.problem("checkpoint.enable", "a seed checkpoint needs checkpoint.enable = true")
        if checkpoint.enable and checkpoint.async_mode == "async_with_pinned_mem":
            folder = tempfile.gettempdir()
            if len(os.fsencode(folder)) + len(_LISTENER) > _LONGEST_SOCKET_BYTES:
                self.problem(
                    "checkpoint.async_mode",
                    f"async_with_pinned_mem listens on a socket in the temporary folder, and {folder} is too long for "
                    f"its name; set TMPDIR to a folder of at most {_LONGEST_SOCKET_BYTES - len(_LISTENER)} characters",
                )
        if checkpoint.enable and checkpoint.initial_load_path:
            folder = Path.cwd() / checkpoint.initial_load_path
            if folder.is_dir():
                checkpoint.initial_load_path = str(folder)
            else:
                self.problem(
                    "checkpoint.initial_load_path", "no such folder; name one step's, such as checkpoint/step-0"
                )

    def exact_sums(self, layout: Layout) -> None:
        if not self.config.neuron.exact_sums:
            return
        others = {"tensor": layout.tp, "context": layout.cp, "pipeline": layout.pp, "expert": layout.ep}
        named = [f"{name} parallel {degree}" for name, degree in others.items() if degree > 1]
        if layout.dp_replicate > 1 and layout.dp_shard > 1:
            named.append(f"HSDP {layout.dp_replicate} x {layout.dp_shard}")
        if named:
            self.problem(
                "neuron.exact_sums", f"works with DDP and FSDP2 alone, and this layout has {' and '.join(named)}"
            )
        training = self.config.training
        if layout.dp_shard > 1 and {training.mixed_precision_param, training.mixed_precision_reduce} != {"float32"}:
            self.problem("neuron.exact_sums", 'needs training.mixed_precision_param and _reduce = "float32"')

    def unsupported(self) -> None:
        if self.config.compile.enable:
            from torch._dynamo import list_backends

            backends = list_backends(exclude_tags=())
            if self.config.compile.backend not in backends:
                near = difflib.get_close_matches(self.config.compile.backend, backends, n=1)
                hint = f"; did you mean {_show(near[0])}?" if near else ""
                self.problem(
                    "compile.backend",
                    'no such backend; "neuron" (or "inductor", which makes way for it), "eager" and "aot_eager" '
                    f"work{hint}",
                )
        if self.config.comm.mode != "default":
            self.problem("comm.mode", 'trn train starts real ranks; expected "default"')


# --- Writing


def _write_table(lines: list[str], above: tuple[str, ...], table: Mapping[str, Any]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, dict) and value is not None}
    if values and above:
        lines += ["", f"[{'.'.join(above)}]"]
    lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _write_table(lines, (*above, key), value)


def toml_value(value: Any) -> str:
    """A value of a recipe as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, save that JSON leaves DEL as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)
