"""What the real stack would do differently with this program: strict mode and its report.

While it is on, every operator's tensors are looked at on the host, which takes time; virtual time and numbers stay the
same. Each kind of finding warns once for an operator, with the line of the program, and is counted after that:

* ``int64``: the chip has no 64-bit integers; a value was written that does not fit 32 bits.
* ``float64``: the chip has no float64; it would be narrowed to float32.
* ``new shape``: an operator met new shapes or dtypes after its first, and each set of them is a compilation. Constants
  among the arguments are not seen, so the count is a lower bound.
* ``cpu operator``: an operator that the real stack is known to run on the host.

What is known and what is assumed stands in ``configs/rules/torch_neuron.toml``.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import tomllib
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from trn_dist import _C
from trn_dist.neuron.user_line import find_user_line
from trn_dist.shipped import shipped_folder

VARIABLE = "TRN_STRICT"
INT32 = torch.iinfo(torch.int32)
_WIDE_FLOATS = (torch.float64, torch.complex128)
_TRANSFERS = ("copy to host", "copy from host")


@dataclass
class Finding:
    """One rule that one operator met.

    Attributes:
        rule: ``"int64"``, ``"float64"``, ``"new shape"`` or ``"cpu operator"``.
        operator: such as ``aten::mm``.
        detail: what was seen first, and what the chip does with it.
        line: of the program, where it was seen first.
        count: how often.
    """

    rule: str
    operator: str
    detail: str
    line: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.operator} ({self.rule}): {self.detail}; at {self.line or 'an unknown line'}"


@dataclass
class ChipReport:
    """What strict mode saw.

    Attributes:
        findings: in the order in which they were met.
        operators_compiled: sets of shapes and dtypes of eager operators, each a compilation.
        graphs_compiled: graphs of ``torch.compile``.
        compile_s: how long these would take one after the other, in seconds; assumed, see the rules' file.
    """

    findings: list[Finding] = field(default_factory=list)
    operators_compiled: int = 0
    graphs_compiled: int = 0
    compile_s: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.operators_compiled} operators and {self.graphs_compiled} graphs compiled: "
            f"about {self.compile_s:,.0f} s one after the other (assumed, not measured)"
        ]
        lines += [f"{finding.count:6} x {finding}" for finding in self.findings]
        return "\n".join(lines)


def _load_rules() -> dict[str, Any]:
    return tomllib.loads((shipped_folder("configs") / "rules" / "torch_neuron.toml").read_text())


class _ChipRules:
    """Looks at operators while strict mode is on."""

    def __init__(self) -> None:
        rules = _load_rules()
        self.operator_s: float = rules["compilation"]["operator_s"]
        self.graph_s: float = rules["compilation"]["graph_s"]
        self.on_cpu = {name: group["reason"] for group in rules["cpu_operators"] for name in group["names"]}
        self.findings: dict[tuple[str, str], Finding] = {}
        self.shapes: dict[str, set[tuple[Any, ...]]] = {}
        self.graphs_before = _graphs()

    def report(self) -> ChipReport:
        operators = sum(len(shapes) for shapes in self.shapes.values())
        graphs = _graphs() - self.graphs_before
        seconds = operators * self.operator_s + graphs * self.graph_s
        findings = [dataclasses.replace(finding) for finding in self.findings.values()]
        return ChipReport(findings, operators, graphs, seconds)

    def observe(self, operator: str, touched: list[tuple[torch.Tensor, bool]]) -> None:
        line, compiled = find_user_line()
        for tensor, written in touched:
            if written and tensor.dtype in _WIDE_FLOATS:
                narrow = "float32" if tensor.dtype == torch.float64 else "complex64"
                self.found("float64", operator, f"{_name(tensor.dtype)} is narrowed to {narrow}", line)
            if written and tensor.dtype == torch.int64 and tensor.numel() > 0:
                low, high = (value.item() for value in torch.aminmax(tensor))
                if low < INT32.min or high > INT32.max:
                    value = low if low < INT32.min else high
                    self.found("int64", operator, f"the value {value} does not fit the chip's 32-bit integers", line)
        if operator in self.on_cpu:
            self.found("cpu operator", operator, f"the real stack runs it on the host: {self.on_cpu[operator]}", line)
        elif operator not in _TRANSFERS and not compiled:
            signature = tuple((tuple(tensor.shape), tensor.dtype) for tensor, _ in touched)
            shapes = self.shapes.setdefault(operator, set())
            if signature not in shapes:
                shapes.add(signature)
                if len(shapes) > 1:
                    seen = ", ".join(f"{_name(dtype)}{list(shape)}" for shape, dtype in signature)
                    self.found("new shape", operator, f"compiled again for {seen}", line)

    def found(self, rule: str, operator: str, detail: str, line: str) -> None:
        finding = self.findings.get((rule, operator))
        if finding is not None:
            finding.count += 1
            return
        finding = self.findings[rule, operator] = Finding(rule, operator, detail, line)
        warnings.warn(f"torch.neuron.strict_mode: {finding}", stacklevel=2)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _graphs() -> int:
    compile_backend = sys.modules.get("trn_dist.neuron.compile")
    return compile_backend.get_dynamo_metrics()["graphs"] if compile_backend and "torch._dynamo" in sys.modules else 0


_rules: _ChipRules | None = None
_on = False


class strict_mode:
    """Turns strict mode on or off: as a call from then on, as a context until it is left.

    Args:
        enabled: whether the chip's rules are looked at. Turning it on begins a new report.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _rules
        self._former = _on
        if enabled and not _on:
            _rules = _ChipRules()
        _switch(enabled)

    def __enter__(self) -> strict_mode:
        return self

    def __exit__(self, *error: Any) -> None:
        _switch(self._former)


def _switch(on: bool) -> None:
    global _on
    _on = on
    _C._set_operator_observer(_rules.observe if on and _rules is not None else None)


def chip_report() -> ChipReport:
    """What strict mode has seen since it was last turned on; empty if it never was."""
    return _rules.report() if _rules is not None else ChipReport()


def enable_from_environment() -> None:
    """``TRN_STRICT=1``: strict mode for the whole process, and at its end the report of rank 0 on standard error."""
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: must be 0 or 1")
    if value == "1":
        strict_mode()
        if os.environ.get("RANK", "0") == "0":
            atexit.register(lambda: print(f"torch.neuron.strict_mode: {chip_report()}", file=sys.stderr))
