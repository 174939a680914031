"""Debian's Chromium, or the one that DRIFTLENS_CHROMIUM names, without a window."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_CHROMIUM = Path(os.environ.get("DRIFTLENS_CHROMIUM", "/usr/bin/chromium"))
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def lacking() -> str:
    """Why no browser can be started; empty where one can."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return "" if _CHROMIUM.exists() else f"there is no browser at {_CHROMIUM}"


def launch(playwright: Any) -> Any:
    """A browser; the caller closes it."""
    return playwright.chromium.launch(executable_path=str(_CHROMIUM), args=_ARGUMENTS)
