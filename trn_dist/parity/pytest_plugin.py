"""The pytest fixture ``parity``: a project's own test that its layouts train the same model.

    def test_layouts(parity):
        parity("recipe.toml", ["fsdp=8", "fsdp=4,tp=2"])

Loaded by pytest through the entry point ``pytest11``; imports torch and the rest of this package when it is called.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "trn_dist: loss-curve parity of layouts")
    group.addoption(
        "--parity-cache", metavar="FOLDER", help="Folder of finished runs.  [default: ~/.cache/trn_dist/parity]"
    )
    group.addoption("--parity-report", metavar="FOLDER", help="Write each comparison's table, curves and JSON there.")


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that trains layouts of a recipe and fails the test unless every one passes.

    ``parity(recipe, layouts, *overrides, steps=5, clipping="off", members=4)``: ``recipe`` is a path, relative to the
    test's file or to the working folder; ``layouts`` as for ``trn parity``, one rank is the reference if none of them
    comes first; ``overrides`` in TorchTitan's syntax; ``clipping`` is "off", "on" or "both". Returns the
    :class:`trn_dist.parity.comparison.Comparison`.
    """

    def parity(
        recipe: str | Path,
        layouts: Sequence[str] | str,
        *overrides: str,
        steps: int = 5,
        clipping: str = "off",
        members: int = 4,
    ) -> Any:
        # A failing layout is shown by its verdict, not by this frame.
        __tracebackhide__ = True
        from rich.console import Console

        from trn_dist.parity.comparison import compare
        from trn_dist.parity.layout import parse_layouts
        from trn_dist.parity.report import print_table, write_report
        from trn_dist.parity.run_queue import RunQueue
        from trn_dist.parity.training import default_cache

        modes = {"off": (False,), "on": (True,), "both": (False, True)}
        if clipping not in modes:
            raise ValueError(f"clipping = {clipping!r}: expected one of {', '.join(map(repr, modes))}")
        beside = request.path.parent / recipe
        path = beside if beside.exists() else Path(recipe)
        text = layouts if isinstance(layouts, str) else "; ".join(layouts)
        cache = request.config.getoption("--parity-cache")
        queue = RunQueue(Path(cache) if cache else default_cache(), quiet=True)
        comparison = compare(
            path,
            parse_layouts(text),
            overrides,
            queue=queue,
            steps=steps,
            clipping=modes[clipping],
            members=members,
        )
        report = request.config.getoption("--parity-report")
        if report:
            write_report(comparison, Path(report) / request.node.name)
        if not comparison.passes:
            console = Console(width=120, record=True, file=io.StringIO())
            print_table(comparison, console)
            pytest.fail(console.export_text(), pytrace=False)
        return comparison

    return parity
