"""No floor of a dependency, and no installed version, has a hole that `advisories.toml` knows of."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent


def floors(project: dict[str, Any]) -> dict[str, Version]:
    """The lowest version that each dependency may have, of those that state one."""
    found = {}
    for text in project["project"]["dependencies"]:
        wanted = Requirement(text)
        lowest = [Version(at.version) for at in wanted.specifier if at.operator in (">=", "==", "~=")]
        if lowest:
            found[canonicalize_name(wanted.name)] = max(lowest)
    return found


def project() -> dict[str, Any]:
    return tomllib.loads((HERE.parent / "pyproject.toml").read_text())


ADVISORIES: list[dict[str, str]] = tomllib.loads((HERE / "advisories.toml").read_text())["advisory"]


def open_holes(floors: dict[str, Version]) -> set[str]:
    """The advisories that a floor lets in, which nothing avoids."""
    return {
        at["id"]
        for at in ADVISORIES
        if "avoided" not in at and floors.get(at["package"], Version("0")) < Version(at["fixed"])
    }


def test_no_floor_has_a_known_hole() -> None:
    assert not open_holes(floors(project()))


def test_a_floor_that_has_one_is_found() -> None:
    assert open_holes(floors(project()) | {"pillow": Version("12.2")}) == {"CVE-2026-59197"}
    assert "CVE-2025-27516" in open_holes({})


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda at: at["id"])
def test_what_is_installed_has_no_known_hole(advisory: dict[str, str]) -> None:
    assert {"id", "package", "fixed", "source"} <= advisory.keys() and advisory["source"].startswith("https://")
    installed = Version(importlib.metadata.version(advisory["package"]))
    assert installed >= Version(advisory["fixed"]) or "avoided" in advisory


ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.every
def test_the_bill_of_materials_is_valid_and_names_every_dependency_as_installed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("cyclonedx_py", reason="the extra sbom is not installed")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["make", "sbom", f"PYTHON={sys.executable}"], cwd=tmp_path, check=True, capture_output=True)
    text = (tmp_path / "build/sbom.json").read_text()
    found = json.loads(text)
    assert JsonStrictValidator(SchemaVersion.from_version(found["specVersion"])).validate_str(text) is None
    listed = {canonicalize_name(part["name"]): part["version"] for part in found["components"]}
    wanted = floors(project())
    assert len(wanted) > 20 and found["metadata"]["component"]["name"] == project()["project"]["name"]
    assert {name: listed.get(name) for name in wanted} == {name: importlib.metadata.version(name) for name in wanted}
