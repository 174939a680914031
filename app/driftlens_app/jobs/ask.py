"""Short questions to the command line that end in one JSON document: a preflight, an estimate."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driftlens.errors import DriftLensError, RunError, RunLockedError, SpecError
from driftlens_app.jobs import command_line
from driftlens_app.jobs.log import told_failure

_PATIENCE_SECONDS = 300.0
_KINDS = {kind.exit_code: kind for kind in (SpecError, RunLockedError)}
"""What an exit code says about the error; the other codes are shared by several kinds."""


def ask(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """The document that `driftlens ARGUMENTS` prints.

    Raises:
        DriftLensError: the command failed without one; its own message and hint.
        RunError: it took too long.
    """
    try:
        done = command_line.answer(arguments, folder, _PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"`driftlens {arguments[0]}` did not answer within {_PATIENCE_SECONDS:.0f} seconds",
            hint="Ask in a terminal, where it may take its time.",
        ) from None
    try:
        document = json.loads(done.stdout)
    except ValueError:
        raise _failure(arguments[0], done.returncode, done.stderr) from None
    assert isinstance(document, dict)
    return document


def _failure(command: str, code: int, said: str) -> DriftLensError:
    failure = told_failure(said)
    if failure is None:
        return RunError(f"`driftlens {command}` ended with exit code {code} and said nothing")
    return _KINDS.get(code, DriftLensError)(failure.message, hint=failure.hint)
