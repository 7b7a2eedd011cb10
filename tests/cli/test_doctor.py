"""What the doctor says about machines that lack something."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from trn_dist.cli import doctor
from trn_dist.cli.doctor import Verdict


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_compiler()
    assert finding.verdict is Verdict.ERROR
    assert finding.advice == "install g++ 11 or newer"


def test_a_compiler_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert doctor.check_compiler().found == f"{old} does not compile C++20"


@pytest.mark.parametrize(
    ("package", "version", "verdict", "words"),
    [
        ("torch", None, Verdict.ERROR, "not installed"),
        ("torch", "2.12.1+cpu", Verdict.ERROR, "2.12.1+cpu, built for 2.13.0"),
        ("torch", "2.13.0+cpu", Verdict.OK, "2.13.0+cpu"),
        ("torchtitan", None, Verdict.ERROR, "`trn train` needs it"),
        ("torchtitan", "0.2.0", Verdict.ERROR, "at least 0.2.1 and below 0.3"),
        ("torchtitan", "0.2.2", Verdict.OK, "0.2.2"),
        ("torchtitan", "0.3.0", Verdict.ERROR, "at least 0.2.1 and below 0.3"),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, verdict: Verdict, words: str
) -> None:
    monkeypatch.setattr(doctor, "_version", {package: version}.get)
    finding = {"torch": doctor.check_torch, "torchtitan": doctor.check_torchtitan}[package]()
    assert finding.verdict is verdict
    assert words in finding.found
    assert verdict is Verdict.OK or finding.advice.startswith("pip install ")


def test_low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, no_limit))
    findings = {finding.subject: finding for finding in doctor.check_limits()}
    assert findings["open files"].verdict is Verdict.WARNING
    assert findings["open files"].advice.endswith("ulimit -n 1024")
    assert findings["processes"].verdict is Verdict.OK
    assert findings["address space"].verdict is Verdict.ERROR


def test_shared_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(27, os.strerror(27))

    monkeypatch.setattr(os, "ftruncate", refuse)
    finding = doctor.check_shared_memory()
    assert finding.verdict is Verdict.ERROR
    assert "File too large (EFBIG)" in finding.found


def test_a_device_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    finding = doctor.check_extension()
    assert finding.verdict is Verdict.ERROR
    assert finding.advice.startswith("unset TORCH_DEVICE_BACKEND_AUTOLOAD")
