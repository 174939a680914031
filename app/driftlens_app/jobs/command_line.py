"""How the command line is called: the program, its environment, a run of it that is waited for, a short question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driftlens.base.errors import DriftLensError, RunError, RunLockedError, SpecError
from driftlens.runs.status import Failure
from driftlens_app.settings import Settings

COMMAND = (sys.executable, "-P", "-m", "driftlens")
"""The program, which looks for no module in the folder of the runs; tests put a stand-in here."""

PATIENCE_SECONDS = 300.0
"""How long a visitor may have to wait for an answer."""

_KINDS = {kind.exit_code: kind for kind in (SpecError, RunLockedError)}
"""What an exit code says about the error; the other codes are shared by several kinds."""

_TURNS = threading.BoundedSemaphore(2)


def environment() -> dict[str, str]:
    """The environment of a job: this server's, without its own settings, and without colours in the log."""
    own = Settings(Path()).environment()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith("STREAMLIT_")
    }
    return {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def answer(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The ended command `driftlens ARGUMENTS`, run in `folder`, with what it said.

    Two run at a time, however many visitors ask; the others wait, and their patience begins with their turn. One that
    takes longer is ended, by a `subprocess.TimeoutExpired`.
    """
    with _TURNS:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment(),
            timeout=PATIENCE_SECONDS,
            check=False,
        )


def ask(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """The document that `driftlens ARGUMENTS` prints, or else the error that it told, raised here."""
    try:
        done = answer(arguments, folder)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"`driftlens {arguments[0]}` did not answer within {PATIENCE_SECONDS:.0f} seconds",
            hint="Ask in a terminal, where it may take its time.",
        ) from None
    try:
        document = json.loads(done.stdout)
    except ValueError:
        failure = told_failure(done.stderr)
        if failure is None:
            said = f"ended with exit code {done.returncode} and said nothing"
            raise RunError(f"`driftlens {arguments[0]}` {said}") from None
        kind = _KINDS.get(done.returncode, DriftLensError)
        raise kind(failure.message, hint=failure.hint) from None
    assert isinstance(document, dict)
    return document


def told_failure(said: str) -> Failure | None:
    """The error that the command line told, from its parts `error: ...` and `hint: ...`, or None."""
    lines = said.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not starts:
        return None
    message, hint = [], []
    for line in lines[starts[-1] :]:
        (hint if hint or line.startswith("hint: ") else message).append(line)
    return Failure(
        "Error", "\n".join(message).removeprefix("error: "), "\n".join(hint).removeprefix("hint: ")
    )
