"""The typer application, flags derived from the fields of requests, and functions that commands share."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import driftlens
from driftlens.utils.distributed import ALONE, JobContext, Permissions, ProcessGroup
from driftlens.utils.errors import Cancelled, sanitize_text
from driftlens.utils.files import expand_home
from driftlens.utils.progress import CancelToken

if TYPE_CHECKING:
    from driftlens.runs.run import DriftRun

app = typer.Typer(
    name="driftlens",
    help="Measure, explain and repair the feature drift of merged neural networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "DRIFTLENS", "help_option_names": ["-h", "--help"]},
)


@dataclass
class _GlobalOptions:
    """The global command-line options; `silent` for all but the main process."""

    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    silent: bool = False
    offline: bool = False
    threads: int | None = None
    progress: str = "auto"
    team: ProcessGroup = ALONE


manner = _GlobalOptions()


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"driftlens {driftlens.__version__}")
        raise typer.Exit


# The variables of global options are named in the documentation; `--help` would repeat them for each.
_global_option = functools.partial(typer.Option, show_envvar=False)


@app.callback()
def _set_global_options(
    quiet: Annotated[bool, _global_option("--quiet", "-q", help="No progress, no notices.")] = False,
    verbose: Annotated[bool, _global_option("--verbose", "-v", help="Print more details.")] = False,
    debug: Annotated[bool, _global_option("--debug", help="Show tracebacks of errors.")] = False,
    offline: Annotated[
        bool, _global_option("--offline", envvar=["DRIFTLENS_OFFLINE", "HF_HUB_OFFLINE"], help="Download nothing.")
    ] = False,
    threads: Annotated[
        int | None,
        _global_option(
            "--threads", envvar="DRIFTLENS_THREADS", min=1, help="Number of CPU threads; all cores by default."
        ),
    ] = None,
    progress: Annotated[
        str, _global_option("--progress", envvar="DRIFTLENS_PROGRESS", help="auto, rich, jsonl or none.")
    ] = "auto",
    version: Annotated[
        # Scripts may set DRIFTLENS_VERSION to record a version; it must not trigger this option.
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, allow_from_autoenv=False, help="Print the version."
        ),
    ] = False,
) -> None:
    """Measure, explain and repair the feature drift of merged neural networks."""
    manner.quiet, manner.verbose, manner.debug = quiet, verbose, debug
    manner.offline, manner.threads, manner.progress = offline, threads, progress
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    # A program that parses JSON lines of progress cannot parse plain log lines between them.
    handler.setFormatter(_JsonLogFormatter() if progress == "jsonl" and not quiet else _PlainLogFormatter())
    logger = logging.getLogger("driftlens")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)


class _PlainLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return sanitize_text(record.getMessage())


class _JsonLogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": "log", "level": record.levelname.lower(), "message": record.getMessage()})


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Trust = Annotated[
    # No environment variable may grant trust: it would apply to every spec.
    bool, typer.Option("--trust-code", allow_from_autoenv=False, help="Run Python code named in the spec.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", envvar="DRIFTLENS_DEVICE", help="auto, cpu, cuda, cuda:1, mps or xpu; overrides the spec."
    ),
]


@dataclass(frozen=True)
class JobOptions:
    """Command-line options of commands that compute: device and permission to run code."""

    device: Device = None
    trust: Trust = False

    @property
    def access(self) -> Permissions:
        """Device and permissions of the job, from the options."""
        return Permissions(self.device, manner.offline, self.trust, manner.team)

    @contextmanager
    def context(self) -> Iterator[JobContext]:
        """Yield the job context with progress display, a cancel token that Ctrl-C sets, and the thread limit."""
        from driftlens.utils.progress import open_progress_sink

        mode: Any = "none" if manner.quiet or not manner.team.is_main_process else manner.progress
        with limit_threads(manner.threads), cancel_on_signals() as cancel, open_progress_sink(mode) as sink:
            yield JobContext(self.access, sink, cancel)


# Commands with parameters whose class is a `Request` or `JobOptions`; `driftlens.cli.flags` replaces those by flags.
REQUEST_COMMANDS: list[Callable[..., None]] = []


def takes_requests(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command to list it in `REQUEST_COMMANDS`."""
    REQUEST_COMMANDS.append(command)
    return command


def expand_home_in_paths(command: Any) -> Callable[..., Any]:
    """Decorate a command to expand `~` in its paths, which shells do not do in quotes or after `=`."""

    def expand_paths(value: Any) -> Any:
        if isinstance(value, list):
            return [expand_paths(entry) for entry in value]
        return expand_home(value) if isinstance(value, Path) else value

    @functools.wraps(command)
    def call_with_expanded_paths(**values: Any) -> Any:
        return command(**{name: expand_paths(value) for name, value in values.items()})

    return call_with_expanded_paths


def limit_threads(number: int | None) -> AbstractContextManager[None]:
    """Limit torch's CPU threads inside the block; without a number torch is not imported."""
    # Without a number, commands such as `ls` start in a fraction of the time that torch needs.
    if number is None:
        return nullcontext()
    from driftlens.utils.devices import use_num_threads

    return use_num_threads(number)


def print_result(text: str) -> None:
    """Print a result to stdout."""
    from driftlens.results.formatting import strip_control_chars
    from driftlens_reports.terminal import has_unicode_terminal

    shown = "\n".join(map(strip_control_chars, text.split("\n")))
    typer.echo(shown.replace(" +- ", " ± ") if " +- " in shown and has_unicode_terminal() else shown)


def print_note(text: str) -> None:
    """Print a remark to stderr unless `--quiet` is set."""
    if not manner.quiet:
        # A closed terminal raises here before its SIGHUP arrives.
        with suppress(OSError):
            typer.echo(sanitize_text(text), err=True)


def print_json(value: object) -> None:
    """Print a JSON document to stdout; tables become lists of rows, NaN and infinity null."""
    from pydantic_core import to_json

    from driftlens.runs.tables import json_rows, json_value

    def convert_other_type(other: Any) -> Any:
        return json_rows(other) if hasattr(other, "columns") else json_value(other)

    text = to_json(value, indent=2, inf_nan_mode="null", fallback=convert_other_type).decode()
    typer.echo(sanitize_text(text, is_json=True))


# Signals of Ctrl-C, a scheduler and a closed terminal; all are handled alike. Windows has no SIGHUP.
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# Further signals in this time do not interrupt the cleanup that the first one started.
GRACE_SECONDS = 5.0


@dataclass
class _StopState:
    """The times at which this process began to stop (signal or error), and the cancel token of the running job."""

    since: float | None = None
    failed: float | None = None
    is_over: bool = False
    is_by_launcher: bool = False
    """torchrun ends all processes once one is gone."""
    token: CancelToken | None = None

    @property
    def is_cleaning_up(self) -> bool:
        """True while cleanup after an interrupt or an error may still be running."""
        # A grace period and not a permanent flag, since some libraries swallow an interrupt.
        last = max((time for time in (self.since, self.failed) if time is not None), default=float("-inf"))
        return self.is_over or time.monotonic() - last < GRACE_SECONDS


stopped = _StopState()


@contextmanager
def interrupt_on_signals(*, last: bool) -> Iterator[None]:
    """Let SIGINT, SIGTERM or SIGHUP interrupt the block; restore the handlers afterwards unless `last`."""
    before = {number: signal.getsignal(number) for number in ENDING}
    # Signals ignored by the parent, as under nohup, stay ignored; a calling program keeps its own handlers.
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    usual = [number for number, handler in before.items() if handler in defaults]
    vars(stopped).update(vars(_StopState()))
    try:
        for number in usual:
            signal.signal(number, handle_stop_signal)
        yield
    finally:
        stopped.is_over = last
        for number in () if last else usual:
            signal.signal(number, before[number])


def handle_stop_signal(number: int, frame: FrameType | None) -> None:
    """Cancel the running job at its next batch; without a job, or on a second signal, raise KeyboardInterrupt.

    Many libraries swallow an interrupt during import or crash, so there it is raised a moment later.
    """
    _redirect_closed_terminal()
    token = stopped.token
    if stopped.is_cleaning_up or (token is not None and token.is_heard):
        return
    if token is not None and not token.is_set:
        token.cancel()
        stopped.is_by_launcher = manner.team.size > 1 and number == signal.SIGTERM
        # The signal may arrive in the middle of a write to the same stream, which is not reentrant.
        with suppress(OSError, RuntimeError):
            print_note("stopping at the next batch; repeat to stop at once")
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            again = threading.Timer(0.05, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    stopped.since = time.monotonic()
    raise KeyboardInterrupt


def _redirect_closed_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if the terminal was closed."""
    # Otherwise the message about the interrupt would itself raise an error.
    for stream in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


@contextmanager
def cancel_on_signals() -> Iterator[CancelToken]:
    """Yield a cancel token that the first Ctrl-C or SIGTERM sets; a second one stops the process at once."""
    stopped.token = CancelToken()
    try:
        yield stopped.token
    except Exception as error:
        # torchrun kills all processes once one fails; the error of this one is still reported.
        stopped.failed = None if isinstance(error, Cancelled) else time.monotonic()
        raise
    finally:
        stopped.token = None


def show_run(
    run: DriftRun, *, as_json: bool = False, everyone: bool = False, checklist: Mapping[str, Any] | None = None
) -> None:
    """Print the summary of a run (of all models with `everyone`), or its final rows as JSON, after a checklist."""
    from driftlens.results.measures import findings_frame
    from driftlens.results.verdict import verdict
    from driftlens_reports.facts import layer_advice
    from driftlens_reports.terminal import run_summary_text

    if not as_json:
        print_result(run_summary_text(run, verbose=manner.verbose, everyone=everyone))
        return
    document: dict[str, Any] = {"checklist": checklist} if checklist else {}
    document |= {name: getattr(run, name) for name in ("id", "name", "path", "tasks", "variants")}
    document |= {name: getattr(run.manifest, name) for name in ("synthetic", "warnings", "notices")}
    document |= {"verdict": verdict(run), "findings": findings_frame(run), "accuracy": run.accuracy()}
    advice = layer_advice(run) if "merged" in run.variants else None
    print_json({**document, "final": run.layers(layer="final"), "advice": advice})
