"""Features of a saved run on a plane: expert, merged and calibrated in one layout, with what the layout loses.

A layout is fitted once per task on all of them together, so that distances between panels mean the same, and stored in
the run: the coordinates are what is kept, not the seed that a library may one day treat otherwise. Distances on the
plane are indicative only; every quality number comes from the features themselves.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from driftlens.base.files import PathLike
from driftlens.base.progress import CancelToken, ProgressSink, Reporter
from driftlens.findings.projection import store
from driftlens.findings.projection.layouts import Array, Points, lay_out, load_points, quality
from driftlens.findings.projection.store import (
    METHODS,
    FitOn,
    Method,
    Projection,
    Settings,
    content_key,
    feature_digests,
    library_versions,
    settings_of,
)
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.tables import conform
from driftlens.spec.requests import ProjectionRequest

__all__ = ["METHODS", "FitOn", "Method", "Projection", "project", "stored_projection"]

_STEPS = ("reading features", "laying out", "comparing neighbours")


def project(
    run: DriftRun | PathLike,
    task: str,
    request: ProjectionRequest = ProjectionRequest(),
    *,
    store_it: bool = True,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> Projection:
    """One joint layout of the expert's and the variants' features; coordinates that the run has are read, not redone.

    Features are brought to norm 1; for UMAP and t-SNE they are then reduced to 50 dimensions by PCA. Equal features
    share their place. With fewer than 15 distinct points, or without umap-learn, PCA is drawn instead and a note
    says so.

    Args:
        run: a run, or its folder.
        task: the task.
        request: what is laid out, and how.
        store_it: whether to keep a new layout in the run; a viewer that may not write says no.
        on_progress: told of every step; most time goes into one of them, which can't say how far it has come.
        cancel: polled between the steps.

    Raises:
        Cancelled: somebody asked to stop.
        SpecError: no such method, or settings that contradict each other.
        DataError: no such task or variant, or its features of this layer are not stored.
        LayerNotFoundError: no such layer.
        NumericsError: features hold NaN or infinity; they are named.
        RunError: the run is damaged or can't be written to.
        RunLockedError: a new layout can't be kept, for another process is writing to the run.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = settings_of(opened, task, request)
    features, versions = feature_digests(opened, settings), library_versions(settings.method)
    digest = content_key(settings, features, versions)
    reporter = Reporter(on_progress, cancel)

    def enter(number: int) -> None:
        doing = f": {_STEPS[number]}" if number < len(_STEPS) else ""
        reporter.step("layout", number, len(_STEPS), f"{settings.method} of {task}{doing}")

    found = store.read(opened, digest)
    if found is None:
        enter(0)
        points = load_points(opened, settings)
        rows = np.concatenate([points.directions[role] for role in settings.roles])
        is_fitted = np.full(len(rows), True)
        if settings.fit_on == "expert":
            is_fitted[len(points.sample_ids) :] = False
        enter(1)
        layout = lay_out(rows, is_fitted, settings.method, settings.seed)
        enter(2)
        places = dict(zip(settings.roles, np.split(layout.coordinates, len(settings.roles)), strict=True))
        found = Projection(
            settings=settings,
            method=layout.method,
            frame=_frame(points, settings, layout.coordinates),
            quality=quality(points, places),
            explained_variance=layout.explained_variance,
            parameters=layout.parameters,
            versions=versions,
            notes=(*points.notes, *layout.notes),
            digest=digest,
        )
        if store_it:
            store.write(opened, found, features)
    enter(len(_STEPS))
    return found


def stored_projection(
    run: DriftRun | PathLike, task: str, request: ProjectionRequest = ProjectionRequest()
) -> Projection | None:
    """The layout that `project` stored, for viewers that must not compute; None where there is none.

    One made by other versions of the libraries is as good: its coordinates are what was stored. Arguments and errors as
    for `project`; nothing is computed, imported for computing, or written.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = settings_of(opened, task, request)
    features = feature_digests(opened, settings)
    digest = content_key(settings, features, library_versions(settings.method))
    return store.read(opened, digest) or store.read_like(opened, settings, features)


def _frame(points: Points, settings: Settings, coordinates: Array) -> pd.DataFrame:
    columns = {
        "task": settings.task,
        "variant": np.repeat(settings.roles, len(points.sample_ids)),
        "sample_id": [*points.sample_ids] * len(settings.roles),
        "label": [*points.labels] * len(settings.roles),
        "x": coordinates[:, 0],
        "y": coordinates[:, 1],
    }
    return conform(pd.DataFrame(columns), store.POINTS)
