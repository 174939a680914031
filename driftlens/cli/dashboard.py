"""The command that opens the dashboard: ui."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from driftlens.cli.app import app, note


@app.command()
def ui(
    root: Annotated[
        Path, typer.Argument(metavar="[RUN or FOLDER]", help="A run, or a folder of runs.", show_default=".")
    ] = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to listen on; the first free one from 8501 if left out."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only start the server.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Look only: start no jobs.")] = False,
    allow_remote_jobs: Annotated[
        bool,
        typer.Option(
            "--allow-remote-jobs",
            allow_from_autoenv=False,
            help="With another --host: whoever reaches it may start jobs.",
        ),
    ] = False,
) -> None:
    """Open the dashboard on a run or a folder of runs, for this machine only."""
    from driftlens.errors import RunError
    from driftlens_app import launch
    from driftlens_app.settings import Settings

    if not root.is_dir():
        raise RunError(
            f"{root} is not a folder", hint="Give a run, or a folder of runs; `driftlens demo` makes one."
        )
    is_remote = not launch.is_local(host)
    if is_remote:
        note(
            f"warning: the dashboard has no login; whoever reaches {host} sees every run in {root.resolve()}"
        )
    if is_remote and not allow_remote_jobs:
        note("jobs can't be started from other machines (--allow-remote-jobs lets them)")
        read_only = True
    settings = Settings(root=root.resolve(), read_only=read_only)
    arguments = launch.command(host=host, port=port, browser=not no_browser)
    sys.stdout.flush()
    # The server takes this process's place: signals reach it, and its exit code is the command's.
    os.execve(arguments[0], arguments, launch.environment(settings))
