"""Curves and scores of a run for TensorBoard, Weights & Biases and trackio.

from driftlens.integrations import tracking

tracking.to_tensorboard("runs/ta8", "logs/ta8")
tracking.to_run("runs/ta8", "merges")                      # Weights & Biases
tracking.to_run("runs/ta8", "merges", library="trackio")
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from driftlens.results.measures import findings_frame
from driftlens.runs.notes import read_notes
from driftlens.runs.run import DriftRun, open_run

# Columns of the layer table that are plotted over layers.
CURVES = ("drift_l2_mean", "drift_rel", "mismatch_l2_mean", "propagation_l2_mean", "cos_mean", "final_share")


class Scalar(NamedTuple):
    """One logged value: a point of a curve over layers (step = layer), or a number of the whole run (step 0)."""

    tag: str
    step: int
    value: float


def scalars(run: DriftRun) -> Iterator[Scalar]:
    """Yield the values to log: curves over layers (`layers/COLUMN/TASK/VARIANT`) and run-level measures."""
    rows = run.layers()
    for column in (name for name in CURVES if name in rows):
        for task, variant, layer, value in rows[["task", "variant", "layer", column]].itertuples(index=False):
            if not math.isnan(value):
                yield Scalar(f"layers/{column}/{task}/{variant}", int(layer), float(value))
    table = findings_frame(run)
    # Rows with a reference are changes, which follow from these levels.
    for row in table[table["against"] == ""].to_dict("records"):
        if not math.isnan(row["value"]):
            parts = [row["measure"], row["task"] or "mean", row["variant"]]
            yield Scalar("/".join(parts), 0, float(row["value"]))


def to_tensorboard(run: str | Path, folder: str | Path) -> int:
    """Write all scalars of a run as TensorBoard events to `folder`; return their number."""
    # Imported by name, because trackers are optional and have no types.
    tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(folder))
    points = [*scalars(open_run(run))]
    for point in points:
        writer.add_scalar(point.tag, point.value, point.step)
    writer.close()
    return len(points)


def to_run(run: str | Path, project: str, *, library: str = "wandb") -> int:
    """Log all scalars of a run to Weights & Biases or trackio; return their number.

    A step holds every curve's value at that layer; levels belong to the last step.

    Args:
        run: the run directory.
        project: the project of the tracker.
        library: "wandb" or "trackio".
    """
    opened = open_run(run)
    tracker: Any = importlib.import_module(library)
    points = [*scalars(opened)]
    steps: dict[int, dict[str, float]] = {}
    last = max((point.step for point in points), default=0)
    for point in points:
        steps.setdefault(point.step or last, {})[point.tag] = point.value
    config = {"run": opened.name, "tasks": [*opened.tasks], **asdict(read_notes(opened.path))}
    tracker.init(project=project, name=opened.id, config=config)
    # Trackers drop a step that is lower than the one before.
    for step in sorted(steps):
        tracker.log(steps[step], step=step)
    tracker.finish()
    return len(points)
