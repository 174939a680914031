"""How the command line is called: the program, the environment it gets, and a run of it that is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from driftlens_app.settings import Settings

COMMAND = (sys.executable, "-m", "driftlens")
"""The program; tests put a stand-in here."""

_TURNS = threading.BoundedSemaphore(2)


def environment() -> dict[str, str]:
    """The environment of a job: this server's, without its own settings, and without colours in the log."""
    own = Settings.variables()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def answer(arguments: Sequence[str], folder: Path, patience: float) -> subprocess.CompletedProcess[str]:
    """The ended command `driftlens ARGUMENTS`, run in `folder`, with what it said.

    Two run at a time, however many visitors ask; the others wait, and their patience begins with their turn.

    Raises:
        subprocess.TimeoutExpired: it took longer than `patience` seconds, and was ended.
    """
    with _TURNS:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment(),
            timeout=patience,
            check=False,
        )
