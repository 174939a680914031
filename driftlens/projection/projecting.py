"""Projecting: read what is stored, else compute and store it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np
import pandas as pd

from driftlens.files import PathLike
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.projection import store
from driftlens.projection.layouts import lay_out
from driftlens.projection.points import Points, load_points, quality
from driftlens.projection.settings import (
    Choices,
    Settings,
    content_key,
    feature_digests,
    library_versions,
    settings_of,
)
from driftlens.projection.store import Projection
from driftlens.records.run import DriftRun, open_run
from driftlens.records.tables import conform

_STEPS = ("reading features", "laying out", "comparing neighbours")

Enter = Callable[[int], None]
"""Told the number of the step that begins, or that of all steps when they are over."""


def project(
    run: DriftRun | PathLike,
    task: str,
    *,
    store_it: bool = True,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
    **choices: Unpack[Choices],
) -> Projection:
    """One joint layout of the expert's and the variants' features; coordinates that the run has are read, not redone.

    Features are brought to norm 1; for UMAP and t-SNE they are then reduced to 50 dimensions by PCA. Equal features
    share their place. With fewer than 15 distinct points, or without umap-learn, PCA is drawn instead and a note
    says so.

    Args:
        run: a run, or its folder.
        task: the task.
        store_it: whether to keep a new layout in the run; a viewer that may not write says no.
        on_progress: told of every step; most time goes into one of them, which can't say how far it has come.
        cancel: polled between the steps.
        **choices: layer="final", method="pca", seed=0, variants=None, fit_on="all" and max_points=2000; see `Choices`.

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
    settings = settings_of(opened, task, **choices)
    features, versions = feature_digests(opened, settings), library_versions(settings.method)
    digest = content_key(settings, features, versions)
    enter = _steps(Reporter(on_progress, cancel), settings)
    found = store.read(opened, digest)
    if found is None:
        enter(0)
        found = _computed(load_points(opened, settings), settings, versions, digest, enter)
        if store_it:
            store.write(opened, found, features)
    enter(len(_STEPS))
    return found


def stored_projection(run: DriftRun | PathLike, task: str, **choices: Unpack[Choices]) -> Projection | None:
    """The layout that `project` stored, for viewers that must not compute; None where there is none.

    One made by other versions of the libraries is as good: its coordinates are what was stored. Arguments and errors as
    for `project`; nothing is computed, imported for computing, or written.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    settings = settings_of(opened, task, **choices)
    features = feature_digests(opened, settings)
    digest = content_key(settings, features, library_versions(settings.method))
    return store.read(opened, digest) or store.read_like(opened, settings, features)


def _steps(reporter: Reporter, settings: Settings) -> Enter:
    def enter(number: int) -> None:
        doing = f": {_STEPS[number]}" if number < len(_STEPS) else ""
        reporter.step("layout", number, len(_STEPS), f"{settings.method} of {settings.task}{doing}")

    return enter


def _computed(
    points: Points, settings: Settings, versions: dict[str, str | None], digest: str, enter: Enter
) -> Projection:
    rows = np.concatenate([points.directions[role] for role in settings.roles])
    is_fitted = np.full(len(rows), True)
    if settings.fit_on == "expert":
        is_fitted[len(points.sample_ids) :] = False
    enter(1)
    layout = lay_out(rows, is_fitted, settings.method, settings.seed)
    places = dict(zip(settings.roles, np.split(layout.coordinates, len(settings.roles)), strict=True))
    enter(2)
    measured = quality(points, places)
    return Projection(
        settings=settings,
        method=layout.method,
        frame=conform(
            pd.DataFrame(
                {
                    "task": settings.task,
                    "variant": np.repeat(settings.roles, len(points.sample_ids)),
                    "sample_id": [*points.sample_ids] * len(settings.roles),
                    "label": [*points.labels] * len(settings.roles),
                    "x": layout.coordinates[:, 0],
                    "y": layout.coordinates[:, 1],
                }
            ),
            store.POINTS,
        ),
        quality=measured,
        explained_variance=layout.explained_variance,
        parameters=layout.parameters,
        versions=versions,
        notes=(*points.notes, *layout.notes),
        digest=digest,
    )
