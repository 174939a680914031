"""The command line: `driftlens COMMAND`. Results go to stdout, progress and messages to stderr.

Here a command is run, and errors are turned into two lines and an exit code.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from driftlens.cli import calibrating, converting, looking, reporting, running
from driftlens.cli.app import app, manner
from driftlens.errors import Cancelled, DriftLensError, SpecError

_GLOBAL_FLAGS = {"-q", "--quiet", "-v", "--verbose", "--log-json", "--debug"}
_MODULES = (running, converting, calibrating, looking, reporting)
"""Imported for their commands."""
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]
"""Root of wrong usage. Newer versions of typer carry their own click, older ones use the installed one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code (see `driftlens.errors` for the codes)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Flags that concern the whole program are understood behind the command too.
    flags = [part for part in given if part in _GLOBAL_FLAGS]
    rest = [part for part in given if part not in _GLOBAL_FLAGS]
    manner.debug = "--debug" in flags  # also where the rest can't be parsed
    if not os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore", FutureWarning)  # third parties talking to programmers, not to users
    # Files are all that is drawn to; a notebook hands down a backend that may not be here.
    os.environ["MPLBACKEND"] = "agg"
    sys.exit(_code(flags + rest))


def _code(arguments: list[str]) -> int:
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="driftlens", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as leaving:
        return leaving.exit_code
    except _ClickException as error:
        return _misused(error)
    except (typer.Abort, KeyboardInterrupt):
        return _report("cancelled", "", Cancelled.exit_code)
    except DriftLensError as error:
        return _report(error.message, error.hint, error.exit_code)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _report(f"the disk is full: {error}", "Free some space; finished phases are kept.", 4)
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has left; flushing at exit would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)


def _misused(error: Any) -> int:
    """A command line that can't be understood."""
    message = error.format_message()
    if not message:  # no command at all: the help has been shown
        return SpecError.exit_code
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "driftlens"
    return _report(message.rstrip("."), f"`{command} --help` says what there is.", SpecError.exit_code)


def _report(message: str, hint: str, code: int) -> int:
    text = message if code == Cancelled.exit_code else f"error: {message}"
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=typer.colors.RED), err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    if manner.debug:
        traceback.print_exc()
    return code


def _unexpected(error: Exception) -> int:
    hint = "This is a defect of DriftLens. Run it again with --debug and report the traceback."
    return _report(f"{type(error).__name__}: {error}", hint, 1)
