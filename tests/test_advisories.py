"""No floor of a dependency, and no installed version, has a hole that `advisories.toml` knows of."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.version import Version

from tests.packaging import HERE, floors, project

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
    assert {"id", "package", "fixed", "source"} <= advisory.keys() and advisory["source"].startswith(
        "https://"
    )
    installed = Version(importlib.metadata.version(advisory["package"]))
    assert installed >= Version(advisory["fixed"]) or "avoided" in advisory


def test_what_is_avoided_is_avoided_in_code() -> None:
    """torch's own reader, which had the hole, is not let at any file."""
    (torch,) = (at for at in ADVISORIES if "avoided" in at)
    assert torch["package"] == "torch"
    product = [
        path for room in ("driftlens", "app", "reports") for path in (HERE.parent / room).rglob("*.py")
    ]
    texts = [path.read_text(encoding="utf-8") for path in product]
    advice = re.compile(r"x = torch\.(jit\.)?load\(")  # for whoever trusts a file
    assert len(texts) > 100 and not [text for text in texts if "torch.load(" in advice.sub("", text)]
