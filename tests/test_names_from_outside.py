"""Names: those that plug-ins import by are the very modules of today, and tests share through helpers alone."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import driftlens as dl

NAMES = {
    "driftlens.api": "driftlens.front.api",
    "driftlens.diagnostic": "driftlens.base.diagnostic",
    "driftlens.errors": "driftlens.base.errors",
    "driftlens.estimators": "driftlens.front.estimators",
    "driftlens.records.checks": "driftlens.findings.checks",
    "driftlens.records.compare": "driftlens.findings.compare",
    "driftlens.records.run": "driftlens.runs.run",
    "driftlens.settings": "driftlens.base.settings",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_before_is_the_module_of_today(name: str) -> None:
    assert importlib.import_module(name) is importlib.import_module(NAMES[name])


def test_every_public_name_is_there() -> None:
    assert {name: getattr(dl, name) for name in dl.__all__}.keys() == set(dir(dl))
    assert dl.errors is importlib.import_module("driftlens.base.errors")


def test_no_test_module_imports_from_another() -> None:
    tests = Path(__file__).parent
    between = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", re.MULTILINE)
    assert not [path for path in tests.rglob("*.py") if between.search(path.read_text(encoding="utf-8"))]


def test_the_page_on_architecture_and_the_contracts_know_every_room() -> None:
    root = Path(__file__).parent.parent
    rooms = {path.parent.name for path in (root / "driftlens").glob("*/__init__.py")} - {"records"}
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page.split("## To change")[0], re.MULTILINE)
    assert {room for row in told for room in re.findall(r"\w+", row)} == rooms | {"reports", "app"}
    contracts = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.importlinter]")[2]
    assert all(
        re.search(rf'"driftlens\.{room}"|"{room}"|\b{room} \||\| {room}\b', contracts) for room in rooms
    )
