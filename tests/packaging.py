"""What pyproject.toml says."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = pathlib.Path(__file__).parent


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
