"""The command line: `driftlens COMMAND`. Results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import gc
import inspect
import itertools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from driftlens.cli import looking, running  # noqa: F401  for their commands
from driftlens.cli.app import (
    REQUEST_COMMANDS,
    app,
    expand_home_in_paths,
    interrupt_on_signals,
    manner,
    print_note,
    stopped,
)
from driftlens.config.renamed import RENAMED
from driftlens.utils.distributed import join_process_group, world_size
from driftlens.utils.errors import Cancelled, DriftLensError, RunError, SpecError, sanitize_text, wrap_library_error
from driftlens.utils.files import undo_unfinished_steps

# Commands that `torchrun` may start: they distribute tasks over processes.
DISTRIBUTED = ("analyze", "calibrate", "sweep")
_GLOBAL_FLAGS = {"-q", "--quiet", "-v", "--verbose", "--debug", "--offline"}
# Global options that take a value.
_GLOBAL_OPTIONS = ("--threads", "--progress")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Start": ("demo", "why", "init", "validate", "ui", "doctor"),
    "Measure": ("analyze", "attach", "compare", "check"),
    "Repair": ("merge", "calibrate", "sweep"),
    "Report": ("show", "view", "report", "export", "ls"),
}
"""All commands, as `--help` and the documentation list them."""


class _Command(typer.core.TyperCommand):
    """Typer command whose `--help` omits the environment variables of its options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            vars(parameter)["show_envvar"] = False


def build_app(words: Collection[str] | None = None) -> typer.Typer:
    """Return the command line: every command in its group and its place in `--help`, with flags.

    Args:
        words: only commands among these words get flags, which take long to derive. None stands for all commands.
    """
    groups = {name: group for group, names in GROUPS.items() for name in names}
    commands = []
    for registered in app.registered_commands:
        command, callback = copy.copy(registered), registered.callback
        assert callback is not None
        command.name = command.name or callback.__name__.removeprefix("_")
        command.rich_help_panel = groups.get(command.name)
        command.cls = _Command
        # Lines are joined, so that the help fills the terminal independent of the docstring's width.
        parts = (inspect.getdoc(callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(part.split()) for part in parts)
        command.callback = _do_nothing
        if words is None or command.name in words:
            if callback in REQUEST_COMMANDS:
                from driftlens.cli.flags import add_request_flags

                callback = add_request_flags(callback)
            command.callback = expand_home_in_paths(callback)
        commands.append(command)
    built = copy.copy(app)
    built.registered_commands = sorted(commands, key=lambda command: [*groups, command.name].index(command.name))
    return built


def _do_nothing() -> None:
    """Stand in for a command that is only listed."""


# Longest message printed: libraries may quote a whole file in an error.
MAX_LINES, MAX_COLUMNS = 60, 2000
# The base class of usage errors: typer bundles its own click, without a public name for it.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code (see `driftlens.utils.errors`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # Importing libraries creates half a million lasting objects; the default of 700 would scan them often.
        gc.set_threshold(10_000, *gc.get_threshold()[1:])
    flags, rest = _split_global_options(words)
    manner.quiet = not {"-q", "--quiet"}.isdisjoint(flags)
    rest = [_current_option(word) for word in rest]
    # Set before parsing, so that errors of parsing are shown with a traceback too.
    manner.debug = "--debug" in flags
    if not os.environ.get("PYTHONWARNINGS"):
        # These address programmers who use a library, not users of the command line.
        warnings.simplefilter("ignore", FutureWarning)
    if not {"-v", "--verbose"} & {*flags}:
        # An unreachable Hub would be logged a dozen times.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    is_distributed = "RANK" in os.environ and world_size() > 1
    if is_distributed:
        # DriftLens reports broken connections itself, without the stack of torch.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Figures go to files only; a notebook passes on a backend that may not be installed.
    os.environ["MPLBACKEND"] = "agg"
    # Python delivers signals to the main thread only.
    is_first = threading.current_thread() is threading.main_thread()
    code = Cancelled.exit_code
    signals = interrupt_on_signals(last=arguments is None) if is_first else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), signals:
        code = run_command_line(flags + rest)
    # Finishes or removes files that an interrupt left half-written.
    undo_unfinished_steps()
    # After an error, threads of torch.distributed may block on processes that no longer exist.
    if not (is_distributed and code):
        if arguments is not None:
            sys.exit(code)
        atexit._run_exitfuncs()
    # A normal exit would run the garbage collector over all objects for a second. `gc.freeze` would avoid that, but
    # triton 3.9 then reports leaks in 30 lines.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _current_option(word: str) -> str:
    """Return an option under its current name, with a note if it was an earlier one."""
    name, equals, value = word.partition("=")
    new = RENAMED.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
    if new is None:
        return word
    print_note(f"note: {name} is now called --{new}")
    return f"--{new}{equals}{value}"


def _split_global_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the global options, which may also follow the command, from all other arguments."""
    flags: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    # click accepts options of the group before the command only.
    for word in words:
        if word in _GLOBAL_OPTIONS:
            flags += [word, *itertools.islice(words, 1)]
        elif word in _GLOBAL_FLAGS or word.partition("=")[0] in _GLOBAL_OPTIONS:
            flags.append(word)
        else:
            rest.append(word)
    return flags, rest


def run_command_line(arguments: list[str]) -> int:
    """Run one command line and return its exit code; global flags come first."""
    try:
        with _join_distributed_run(arguments):
            # A shell that completes passes the words in a variable.
            built = build_app(None if "_DRIFTLENS_COMPLETE" in os.environ else arguments)
            result = typer.main.get_command(built).main(arguments, prog_name="driftlens", standalone_mode=False)
            # Newer versions of typer return this code after an interrupt instead of raising.
            if result == Cancelled.exit_code:
                raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except typer.Exit as leaving:
        return leaving.exit_code
    except _ClickException as error:
        return _report_usage_error(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        return _print_error("cancelled", "", Cancelled.exit_code)
    except DriftLensError as error:
        return _print_error(error.message, error.hint, error.exit_code)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _print_error(f"the disk is full: {error}", "Free some space; finished phases are kept.", 4)
        # After a signal, writing to a closed terminal fails.
        if stopped.since is not None:
            return Cancelled.exit_code
        if isinstance(error, BrokenPipeError):
            # The reader of a pipe, such as `head`, has ended; flushing at exit would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if error.errno is None and (known := wrap_library_error(error)) is not None:
            return _print_error(known.message, known.hint, known.exit_code)
        # The file system refused, for example a folder where a file is expected, or a path that is too long.
        place = f"{error.filename2 or error.filename}: " if error.filename else ""
        hint = "Check the path and its permissions."
        return _print_error(f"{place}{error.strerror or error}", hint, RunError.exit_code)
    except Exception as error:
        if (known := wrap_library_error(error)) is not None:
            return _print_error(known.message, known.hint, known.exit_code)
        hint = "This is a bug in DriftLens. Run it again with --debug and report the traceback."
        return _print_error(f"{type(error).__name__}: {error}", hint, 1)
    except BaseException as error:
        # Libraries in Rust raise this BaseException when they panic on a damaged file.
        if type(error).__name__ != "PanicException":
            raise
        hint = "A tokenizer or weights file may be damaged; restore it from the original."
        return _print_error(f"a library crashed: {error}", hint, RunError.exit_code)


@contextlib.contextmanager
def _join_distributed_run(arguments: Sequence[str]) -> Iterator[None]:
    """Run a command under torchrun; only the main process prints."""
    if "RANK" not in os.environ or world_size() == 1:
        yield
        return
    manner.silent = os.environ["RANK"] != "0"
    with Path(os.devnull).open("w") as nowhere, contextlib.ExitStack() as silence:
        if manner.silent:
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        command = _find_command(arguments) or "this command"
        if command not in DISTRIBUTED:
            raise SpecError(
                f"{command} runs in one process, and this is one of {world_size()}",
                hint=f"Start it without torchrun; only {', '.join(DISTRIBUTED)} support it.",
            )
        with join_process_group() as manner.team:
            try:
                yield
            except BaseException as error:
                reported = error
                if isinstance(error, Cancelled) and stopped.is_by_launcher:
                    reported = RunError(
                        "stopped by the launcher: another process was killed or failed, or the job was cancelled",
                        hint=error.hint,
                    )
                manner.silent = not manner.team.broadcast_error(reported)
                if reported is error:
                    raise
                raise reported from error


def _report_usage_error(error: Any, arguments: Sequence[str]) -> int:
    """Report a command line that cannot be parsed, and return the exit code."""
    # pydantic puts this prefix before messages of validators.
    message = error.format_message().replace("Value error, ", "")
    # Without any command typer has printed the help already.
    if not message:
        return SpecError.exit_code
    command = " ".join(filter(None, ("driftlens", _find_command(arguments))))
    return _print_error(message.rstrip("."), f"See `{command} --help`.", SpecError.exit_code)


def _find_command(arguments: Sequence[str]) -> str:
    """Return the first argument that names a command; empty without one."""
    return next((word for word in arguments if any(word in names for names in GROUPS.values())), "")


def _print_error(message: str, hint: str, code: int) -> int:
    if manner.silent:
        return code
    message, hint = _shorten_for_terminal(message), _shorten_for_terminal(hint)
    text = message if code == Cancelled.exit_code else f"error: {message}"
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=typer.colors.RED), err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    if manner.debug:
        traceback.print_exc()
    return code


def _shorten_for_terminal(text: str) -> str:
    """Limit a text to the terminal: remove control characters, limit line length and number of lines."""
    lines = sanitize_text(text).splitlines()
    shown = [line if len(line) <= MAX_COLUMNS else f"{line[:MAX_COLUMNS]}..." for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"... and {len(lines) - MAX_LINES:,} more lines")
    return "\n".join(shown)
