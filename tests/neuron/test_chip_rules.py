"""Strict mode: what the real stack would do differently, said once with the line of the program, and the report."""

import os
import subprocess
import sys
import warnings

import pytest
import torch


@pytest.fixture
def strict():
    with torch.neuron.strict_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def findings(rule):
    return [finding for finding in torch.neuron.chip_report().findings if finding.rule == rule]


def test_int64_values_that_do_not_fit(strict):
    small = torch.tensor([2**31 - 1, -(2**31)], device="neuron")
    assert findings("int64") == []
    for _ in range(3):
        small * 2  # narrowed
    (finding,) = findings("int64")
    assert finding.operator == "aten::mul" and finding.count == 3
    assert finding.detail == "the value -4294967296 does not fit the chip's 32-bit integers"
    assert "test_chip_rules.py" in finding.line and "in test_int64_values" in finding.line
    assert [str(w.message) for w in strict if "int64" in str(w.message)] == [
        f"torch.neuron.strict_mode: aten::mul (int64): {finding.detail}; at {finding.line}"
    ]


def test_values_that_come_from_the_host_are_looked_at(strict):
    torch.tensor([2**40]).to("neuron")
    assert [finding.operator for finding in findings("int64")] == ["copy from host"]


def test_float64(strict):
    x = torch.ones(4, dtype=torch.float64).to("neuron")
    x + 1
    torch.ones(4, device="neuron") + 1
    assert [(f.operator, f.count) for f in findings("float64")] == [("copy from host", 1), ("aten::add", 1)]
    assert findings("float64")[0].detail == "float64 is narrowed to float32"


def test_new_shapes_are_compilations(strict):
    for size in (4, 8, 8, 16):
        torch.ones(size, device="neuron").exp()
    report = torch.neuron.chip_report()
    # fill_ and exp, three shapes each.
    assert report.operators_compiled == 6 and report.graphs_compiled == 0
    assert report.compile_s == 12.0
    exp = next(finding for finding in findings("new shape") if finding.operator == "aten::exp")
    assert exp.count == 2 and exp.detail.startswith("compiled again for float32[8]")
    assert "6 operators and 0 graphs compiled: about 12 s" in str(report)


def test_operators_on_the_host(strict):
    x = torch.randn(8, device="neuron")
    x.nonzero()
    reasons = {finding.operator: finding.detail for finding in findings("cpu operator")}
    assert set(reasons) == {"aten::random_", "aten::nonzero"}
    assert "random numbers are drawn on the host" in reasons["aten::random_"]
    assert "depends on the data" in reasons["aten::nonzero"]


def test_a_compiled_graph_is_one_compilation(strict):
    torch._dynamo.reset()
    x = torch.ones(8, device="neuron")
    before = torch.neuron.chip_report().operators_compiled
    torch.compile(lambda t: (t * 2).exp().sum(), backend="neuron", fullgraph=True)(x)
    report = torch.neuron.chip_report()
    assert report.graphs_compiled == 1 and report.operators_compiled == before


def test_backward_has_a_line(strict):
    x = torch.ones(4, 4, dtype=torch.float64, device="neuron", requires_grad=True)
    (x @ x).sum().backward()
    lines = {finding.line for finding in findings("float64")}
    assert all("test_chip_rules.py" in line for line in lines)
    assert any(line.endswith("(backward)") for line in lines)


def test_numbers_and_virtual_time_stay_the_same():
    def step():
        start, end = (torch.neuron.Event(enable_timing=True) for _ in range(2))
        torch.neuron.synchronize()
        start.record()
        torch.manual_seed(0)
        total = torch.randn(64, 64, device="neuron").matmul(torch.ones(64, 64, device="neuron")).sum()
        end.record()
        torch.neuron.synchronize()
        return total.item(), start.elapsed_time(end)

    step()
    without = step()
    with torch.neuron.strict_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert step() == without
    assert step() == without


def test_off_there_is_no_report_and_a_new_context_begins_a_new_one():
    with torch.neuron.strict_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ones(4, dtype=torch.float64, device="neuron")
        assert torch.neuron.chip_report().findings
    with torch.neuron.strict_mode():
        assert not torch.neuron.chip_report().findings
        with torch.neuron.strict_mode(False):
            torch.ones(4, device="neuron")
        assert torch.neuron.chip_report().operators_compiled == 0
        torch.ones(4, device="neuron")
    torch.ones(5, device="neuron")
    assert torch.neuron.chip_report().operators_compiled == 1


def test_the_variable_prints_the_report():
    program = "import torch\ntorch.ones(4, dtype=torch.float64, device='neuron')\n"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRN_STRICT": "1"}, capture_output=True, text=True
    )
    assert "torch.neuron.strict_mode: 1 operators and 0 graphs compiled" in result.stderr
    assert "1 x aten::fill_ (float64): float64 is narrowed to float32; at <string>:2 in <module>" in result.stderr
