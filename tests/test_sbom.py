"""`make sbom`: what is installed, in the form that it says it has."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from packaging.utils import canonicalize_name

from tests.packaging import floors, project

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_the_bill_of_materials_is_valid_and_names_every_dependency_as_installed(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("cyclonedx_py", reason="the extra sbom is not installed")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(
        ["make", "sbom", f"PYTHON={sys.executable}"], cwd=tmp_path, check=True, capture_output=True
    )
    text = (tmp_path / "build/sbom.json").read_text()
    found = json.loads(text)
    assert JsonStrictValidator(SchemaVersion.from_version(found["specVersion"])).validate_str(text) is None
    listed = {canonicalize_name(part["name"]): part["version"] for part in found["components"]}
    wanted = floors(project())
    assert len(wanted) > 20 and found["metadata"]["component"]["name"] == "driftlens"
    assert {name: listed.get(name) for name in wanted} == {
        name: importlib.metadata.version(name) for name in wanted
    }
