"""What ends up in a wheel, and that it is found there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trn_dist import shipped

ROOT = Path(__file__).resolve().parent.parent


def test_a_wheel_holds_the_packages_and_the_data(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    package = tmp_path / "lib" / "trn_dist"
    for folder, suffix in (("configs", ".toml"), ("recipes", ".toml"), ("recipes", ".py")):
        expected = {path.relative_to(ROOT) for path in (ROOT / folder).rglob(f"*{suffix}")}
        assert expected
        assert {path.relative_to(package) for path in (package / folder).rglob(f"*{suffix}")} == expected
    modules = {path.relative_to(ROOT / "trn_dist") for path in (ROOT / "trn_dist").rglob("*.py")}
    recipes = set((package / "recipes").rglob("*"))
    assert {path.relative_to(package) for path in set(package.rglob("*.py")) - recipes} == modules
    assert (package / "titan" / "assets" / "tokenizer" / "tokenizer.json").exists()
    templates = {path.name for path in (ROOT / "trn_dist" / "report" / "templates").iterdir()}
    assert {path.name for path in (package / "report" / "templates").iterdir()} == templates
    assert not list(package.rglob("*.cpp"))


def test_data_is_found_in_a_checkout_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages" / "trn_dist"
    monkeypatch.setattr(shipped, "_PACKAGE", installed)
    with pytest.raises(FileNotFoundError, match="folder recipes of trn_dist is missing, neither"):
        shipped.shipped_folder("recipes")
    checkout = tmp_path / "site-packages" / "recipes"
    checkout.mkdir(parents=True)
    assert shipped.shipped_folder("recipes") == checkout
    (installed / "recipes").mkdir(parents=True)
    assert shipped.shipped_folder("recipes") == installed / "recipes"
