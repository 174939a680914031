"""Earlier names of keywords, options and settings of methods, which scripts and saved commands may have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = {"shrink": "interpolate"}


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords under their current names, with a warning for each earlier name."""
    for old in RENAMED.keys() & values.keys():
        warnings.warn(f"{old} is now called {RENAMED[old]}", FutureWarning, stacklevel=3)
    return {RENAMED.get(name, name): value for name, value in values.items()}
