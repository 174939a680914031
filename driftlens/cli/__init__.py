"""The command line: `driftlens COMMAND`. Results go to stdout, progress and messages to stderr.

Here a command is run, and errors are turned into two lines and an exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import inspect
import itertools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from driftlens.cli import looking, running  # noqa: F401  for their commands
from driftlens.cli.app import app, hearing, manner, spelling_homes_out, stopped
from driftlens.utils.distributed import joined, world_size
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, SpecError, from_library, harmless
from driftlens.utils.files import put_in_order

DISTRIBUTED = ("analyze", "calibrate", "sweep")
"""Commands that distribute tasks over processes."""
_GLOBAL_FLAGS = {"-q", "--quiet", "-v", "--verbose", "--debug", "--offline"}
_GLOBAL_OPTIONS = ("--threads", "--progress")
"""Options of the whole program that take a value."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Start": ("demo", "why", "init", "validate", "ui", "doctor"),
    "Measure": ("analyze", "attach", "compare", "check"),
    "Repair": ("merge", "calibrate", "sweep"),
    "Report": ("show", "view", "report", "export", "ls"),
}
"""All commands, as `--help` and the documentation list them."""


def _take_in_order() -> None:
    """Set every command's group and its place in `--help`."""
    groups = {name: group for group, names in GROUPS.items() for name in names}
    for command in app.registered_commands:
        assert command.callback is not None
        command.name = command.name or command.callback.__name__
        command.rich_help_panel = groups.get(command.name)
        # Whatever the terminal's width, and not as wide as the docstring was.
        parts = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(part.split()) for part in parts)
        command.callback = spelling_homes_out(command.callback)
    app.registered_commands.sort(key=lambda command: [*groups, command.name].index(command.name))


_take_in_order()
MOST_LINES, WIDEST = 60, 2000
"""Of a message: lines, and characters in one."""
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]
"""Base class of usage errors; typer bundles its own click without a public name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code (see `driftlens.utils.errors` for the codes)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Not after every 700 objects: libraries make half a million that stay.
        gc.set_threshold(10_000, *gc.get_threshold()[1:])
    flags, rest = _split_global_options(given)
    manner.debug = "--debug" in flags  # also where the rest can't be parsed
    if not os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore", FutureWarning)  # third parties talking to programmers, not to users
    if not {"-v", "--verbose"} & {*flags}:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else a Hub out of reach is told a dozen times
    if world_size() > 1:
        # Broken connections are reported by us, without torch's stack.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Files are all that is drawn to; a notebook hands down a backend that may not be here.
    os.environ["MPLBACKEND"] = "agg"
    # Another thread than the first hears no signals.
    is_first = threading.current_thread() is threading.main_thread()
    code = Cancelled.exit_code
    heard = hearing(last=arguments is None) if is_first else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), heard:
        code = run(flags + rest)
    put_in_order()  # what was begun where the interrupt fell
    # After a failure threads of torch.distributed may wait for processes that are gone.
    if world_size() == 1 or not code:
        if arguments is not None:
            sys.exit(code)
        atexit._run_exitfuncs()
    # Python's own end would look through all that is there once more, for a second; what `gc.freeze` hides from it,
    # triton 3.9 takes for leaked and tells in 30 lines.
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _split_global_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the global options, which may also follow the command, from all other arguments."""
    flags: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in _GLOBAL_OPTIONS:
            flags += [word, *itertools.islice(words, 1)]
        elif word in _GLOBAL_FLAGS or word.partition("=")[0] in _GLOBAL_OPTIONS:
            flags.append(word)
        else:
            rest.append(word)
    return flags, rest


def run(arguments: list[str]) -> int:
    """Run one command line, whose global flags come first; returns its exit code."""
    try:
        with _teamed(arguments):
            result = typer.main.get_command(app).main(arguments, prog_name="driftlens", standalone_mode=False)
            if result == Cancelled.exit_code:  # what newer versions of typer make of an interrupt
                raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except typer.Exit as leaving:
        return leaving.exit_code
    except _ClickException as error:
        return _misused(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        return _report("cancelled", "", Cancelled.exit_code)
    except DriftLensError as error:
        return _report(error.message, error.hint, error.exit_code)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _report(f"the disk is full: {error}", "Free some space; finished phases are kept.", 4)
        if stopped.since is not None:  # the terminal is gone
            return Cancelled.exit_code
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has left; flushing at exit would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if error.errno is None and (told := from_library(error)) is not None:
            return _report(told.message, told.hint, told.exit_code)
        # A folder in the place of a file, a path too long, a device that can't be read: the file system's answer.
        place = f"{error.filename2 or error.filename}: " if error.filename else ""
        hint = "Check the path, and that you may read and write there."
        return _report(f"{place}{error.strerror or error}", hint, RunError.exit_code)
    except Exception as error:
        if (told := from_library(error)) is not None:
            return _report(told.message, told.hint, told.exit_code)
        hint = "This is a defect of DriftLens. Run it again with --debug and report the traceback."
        return _report(f"{type(error).__name__}: {error}", hint, 1)
    except BaseException as error:
        # What libraries in Rust raise where a file makes them break down.
        if type(error).__name__ != "PanicException":
            raise
        hint = (
            "Tokenizers and weights are read by such; restore theirs from the original, or take the text out."
        )
        return _report(f"a library broke down: {error}", hint, RunError.exit_code)


@contextlib.contextmanager
def _teamed(arguments: Sequence[str]) -> Iterator[None]:
    """Run a command in as many processes as the environment states; all but the main one are silent."""
    if world_size() == 1:
        yield
        return
    manner.silent = os.environ["RANK"] != "0"
    with Path(os.devnull).open("w") as nowhere, contextlib.ExitStack() as silence:
        if manner.silent:
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        names = {name for group in GROUPS.values() for name in group}
        command = next((part for part in arguments if part in names), "this command")
        if command not in DISTRIBUTED:
            raise SpecError(
                f"{command} runs in one process, and this is one of {world_size()}",
                hint=f"Start it without torchrun, which {', '.join(DISTRIBUTED)} can be started with.",
            )
        with joined() as manner.team:
            try:
                yield
            except BaseException as error:
                reported = error
                if isinstance(error, Cancelled) and stopped.is_by_launcher:
                    reported = RunError(
                        "stopped by the launcher: another process was killed or failed, or the job was cancelled",
                        hint=error.hint,
                    )
                manner.silent = not manner.team.fail(reported)
                if reported is error:
                    raise
                raise reported from error


def _misused(error: Any, arguments: Sequence[str]) -> int:
    """Report a command line that cannot be parsed, and return the exit code."""
    message = error.format_message().replace("Value error, ", "")  # pydantic's word before ours
    if not message:  # no command at all: the help has been shown
        return SpecError.exit_code
    context = getattr(error, "ctx", None)  # which some errors lack
    known = getattr(typer.main.get_command(app), "commands", {})
    words = ["driftlens", *(word for word in arguments if word in known)]
    command = " ".join(words[:2]) if context is None else context.command_path
    return _report(message.rstrip("."), f"`{command} --help` says what there is.", SpecError.exit_code)


def _report(message: str, hint: str, code: int) -> int:
    if manner.silent:
        return code
    message, hint = _shortened(message), _shortened(hint)
    text = message if code == Cancelled.exit_code else f"error: {message}"
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=typer.colors.RED), err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    if manner.debug:
        traceback.print_exc()
    return code


def _shortened(text: str) -> str:
    """Shorten a text for a terminal: no control characters, limited line length and number of lines."""
    lines = harmless(text).splitlines()
    shown = [line if len(line) <= WIDEST else f"{line[:WIDEST]}..." for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"... and {len(lines) - MOST_LINES:,} lines more")
    return "\n".join(shown)
