"""The command that turns pickled checkpoints into safetensors: convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftlens.cli.app import app, note, say


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A suite's folder (zeroshot.pt, TASK/finetuned.pt, head_TASK.pt), or one file.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder, or for one file the .safetensors, to write; beside SOURCE if left out. "
            "Nothing is overwritten."
        ),
    ] = None,
) -> None:
    """Turn pickled checkpoints into safetensors; no code in them is run, imported or needed.

    A task-vector suite becomes a folder: base.safetensors, one file per task, heads.safetensors (class
    embeddings of unit norm), the architecture as the weights tell it, and a run.yaml that lacks only the
    paths of the images. A single file (a pickled module, a state dict, a training checkpoint) becomes
    one file of its tensors.
    """
    from driftlens.suites.conversion import convert as run_conversion

    place = run_conversion(source, out, tell=note)
    spec = place / "run.yaml"
    say(f"wrote {place}" + (f"; fill in the data, then: driftlens validate {spec}" if spec.exists() else ""))
