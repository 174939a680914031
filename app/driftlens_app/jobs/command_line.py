"""How a job's process is called: the program, and the environment it gets."""

from __future__ import annotations

import os
import sys

from driftlens_app.settings import Settings

COMMAND = (sys.executable, "-m", "driftlens")
"""The program; tests put a stand-in here."""


def environment() -> dict[str, str]:
    """The environment of a job: this server's, without its own settings, and without colours in the log."""
    own = Settings.variables()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
