"""A new recipe from a few answers: what ``trn recipe new`` writes.

The file is written only if it is a right recipe. Called by :mod:`trn_dist.cli.recipe`.
"""

from pathlib import Path
from typing import Any

from trn_dist.titan.recipe import CONFIG_MODULE, Recipe, resolve, toml_value

# Name of an answer -> the question and what holds without an answer.
DEFAULTS: dict[str, tuple[str, Any]] = {
    "model": ("Model (llama3, llama4, qwen3, deepseek_v3)", "llama3"),
    "flavor": ("Flavor, the model's size", "debugmodel"),
    "layout": ("Layout, such as fsdp=4,tp=2", "fsdp=8"),
    "global_batch": ("Samples a step", 8),
    "seq_len": ("Tokens a sample", 256),
    "steps": ("Steps", 20),
    "lr": ("Learning rate", 3e-3),
    "text": ("Text: a file or folder, or python_stdlib", "python_stdlib"),
}
_SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}


class TextPathError(ValueError):
    """It is not clear what kind of text a path names."""


def text_settings(text: str) -> dict[str, str]:
    """The keys of ``[training]`` that name a text.

    Args:
        text: ``python_stdlib``, or a file or folder whose files end in .txt, .jsonl or .parquet.
    """
    if text == "python_stdlib":
        return {"dataset": text}
    path = Path(text).expanduser()
    files = path.rglob("*") if path.is_dir() else (path,)
    kinds = {_SUFFIXES[file.suffix] for file in files if file.suffix in _SUFFIXES}
    if not path.exists() or len(kinds) != 1:
        found = "no such file or folder" if not path.exists() else f"found {', '.join(sorted(kinds)) or 'none'}"
        raise TextPathError(f"text {text!r}: expected files of one kind, .txt, .jsonl or .parquet; {found}")
    return {"dataset": kinds.pop(), "dataset_path": str(path.resolve())}


def write_recipe(
    file: Path,
    *,
    model: str,
    flavor: str,
    text: dict[str, str],
    seq_len: int,
    steps: int,
    lr: float,
    layout: list[str],
) -> Recipe:
    """Writes a recipe and returns it resolved.

    Args:
        layout: overrides that give the degrees and the batch, in TorchTitan's syntax.

    Raises:
        RecipeError: the answers make no right recipe; nothing is left behind.
    """
    tables: dict[str, dict[str, Any]] = {
        "job": {"custom_config_module": CONFIG_MODULE, "description": f"{model} {flavor}"},
        "model": {"name": model, "flavor": flavor},
        "optimizer": {"name": "AdamW", "lr": lr},
        "lr_scheduler": {"warmup_steps": max(1, steps // 10)},
        "training": {**text, "seq_len": seq_len, "steps": steps, "mixed_precision_param": "float32"},
        "parallelism": {},
        "activation_checkpoint": {"mode": "none"},
        "debug": {"seed": 42},
        "neuron": {"norm_accumulation": "float64"},
    }
    for option, value in zip(layout[::2], layout[1::2], strict=True):
        section, key = option.removeprefix("--").split(".")
        # Degrees of one are what a recipe has without them, save the one that stands for all remaining ranks.
        if value != "1" or key in ("data_parallel_shard_degree", "ranks") or section == "training":
            tables[section][key] = int(value) if value.isdigit() else value
    lines = [f"# {model} {flavor} on {tables['neuron'].get('ranks', 1)} ranks. Written by `trn recipe new`."]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        resolve(part, [])
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return resolve(file, [])
