"""The typer application that commands register with, and what they share."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from driftlens.errors import SpecError
from driftlens.progress import CancelToken, ProgressSink

app = typer.Typer(
    name="driftlens",
    help="Measure, explain and repair the feature drift of merged neural networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "DRIFTLENS", "help_option_names": ["-h", "--help"]},
)


@dataclass
class Manner:
    """How the program talks, as the options before the command say."""

    quiet: bool = False
    verbose: bool = False
    log_json: bool = False
    debug: bool = False


manner = Manner()


@app.callback()
def set_manner(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notices.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what happens.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines and progress as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure, explain and repair the feature drift of merged neural networks."""
    manner.quiet, manner.verbose, manner.log_json, manner.debug = quiet, verbose, log_json, debug
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_json else logging.Formatter("%(message)s"))
    logger = logging.getLogger("driftlens")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(
            {"level": record.levelname.lower(), "message": record.getMessage()}, ensure_ascii=False
        )


JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
Offline = Annotated[
    bool, typer.Option("--offline", envvar=["DRIFTLENS_OFFLINE", "HF_HUB_OFFLINE"], help="Download nothing.")
]
Trust = Annotated[
    # Trust is given on the command line or not at all; no variable may give it.
    bool, typer.Option("--trust-code", allow_from_autoenv=False, help="Run Python code that the spec names.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", envvar="DRIFTLENS_DEVICE", help="auto, cpu or cuda; over the spec's."),
]
ProgressMode = Annotated[
    str, typer.Option("--progress", envvar="DRIFTLENS_PROGRESS", help="auto, rich, jsonl or none.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Override one value of the spec; repeatable."),
]


def chosen_progress(mode: str) -> Any:
    """The progress mode after `--quiet` and `--log-json` had their say."""
    if manner.quiet:
        return "none"
    return "jsonl" if manner.log_json and mode == "auto" else mode


def say(text: str) -> None:
    """A result, on stdout."""
    typer.echo(text)


def note(text: str) -> None:
    """A remark for a person, on stderr; silent with `--quiet`."""
    if not manner.quiet:
        typer.echo(text, err=True)


def say_json(value: object) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def cancelling() -> Iterator[CancelToken]:
    """A token that Ctrl-C and SIGTERM set; a second one ends the process the usual way."""
    token = CancelToken()

    def ask(number: int, _frame: object) -> None:
        token.cancel()
        note("stopping at the next batch; once more stops at once")
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, ask)
        yield token
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched(progress: str) -> Iterator[tuple[ProgressSink, CancelToken]]:
    """What a long job is given: a sink that shows progress as `--progress` says, and a token that Ctrl-C sets."""
    from driftlens.progress_sinks import sink_for

    with cancelling() as cancel, sink_for(chosen_progress(progress)) as sink:
        yield sink, cancel


def assignments(given: list[str] | None) -> dict[str, Any]:
    """The values of `--set name=value`, each read as YAML.

    Raises:
        SpecError: one is not of this form.
    """
    from driftlens.spec.yaml_text import from_yaml

    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise SpecError(f"--set {text}: expected name=value", hint="For example --set scaling=0.4.")
        found[name] = from_yaml(value, f"--set {name}")
    return found
