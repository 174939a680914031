"""The command that lays features out on a plane: project."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlens.cli.app import JsonFlag, ProgressMode, app, note, say, say_json, watched

if TYPE_CHECKING:
    from driftlens.projection import Projection


@app.command()
def project(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Only this task; repeatable. All if left out.")
    ] = None,
    layer: Annotated[str, typer.Option(help="Layer index, final, or module path.")] = "final",
    method: Annotated[str, typer.Option(help="pca, umap, tsne; several separated by commas.")] = "pca",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the method's random numbers.")] = 0,
    fit_on: Annotated[
        str, typer.Option(help="all, or expert for a layout that variants added later don't move.")
    ] = "all",
    max_points: Annotated[int, typer.Option(help="Most points of one layout, all variants together.")] = 2000,
    progress: ProgressMode = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Lay the final features of expert and variants out on a plane, and keep the layout in the run."""
    from driftlens.projection import project as lay_out
    from driftlens.records.run import open_run
    from driftlens_reports.columns import printable
    from driftlens_reports.verdicts import projections_text

    opened = open_run(run)
    methods = dict.fromkeys(part.strip() for part in method.split(","))
    found = []
    with watched(progress) as (sink, cancel):
        for name, chosen in itertools.product(task or opened.tasks, methods):
            note(printable(f"{name}: {chosen}"))
            found.append(
                lay_out(
                    opened,
                    name,
                    layer=int(layer) if layer.isdecimal() else layer,
                    method=chosen,
                    seed=seed,
                    fit_on=fit_on,
                    max_points=max_points,
                    on_progress=sink,
                    cancel=cancel,
                )
            )
    say_json([_document(entry) for entry in found]) if as_json else say(projections_text(found))


def _document(projection: Projection) -> dict[str, Any]:
    from driftlens.records.tables import plain_rows

    return {
        **projection.settings.as_dict(),
        "used": projection.method,
        "digest": projection.digest,
        "file": f"projections/{projection.digest}.parquet",
        "points": len(projection.frame),
        "explained_variance": projection.explained_variance,
        "parameters": dict(projection.parameters),
        "quality": plain_rows(projection.quality),
        "notes": list(projection.notes),
    }
