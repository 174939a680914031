"""Saved runs for tests of figures: with sweeps of every coefficient, and what their points were made from."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from tests.records.full_run import write_full_run

OWN = {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "n": 256}
"""Settings of the calibration that the sweeps vary around."""

POINTS = {
    "lam": (0.005, 0.05, 0.5, 5.0),
    "alpha": (0.0, 0.15, 0.45, 1.0),
    "rho": (1.0, 1.5, 2.0, 3.0),
    "n": (8, 32, 128),
}
"""What each sweep visits; the one of alpha misses the calibration's own setting."""

HOSTILE = ("$x_1$", "<script>alert(1)</script>", "a_b^{c}\n\x1b[31mred", r"\frac{1}{2} & 50 %")
"""Names that would be formulas, markup, several lines or colours wherever they were not shown literally."""


def figure_run(path: pathlib.Path, *, seeds: tuple[int, ...] = (1, 2, 3), **made: Any) -> DriftRun:
    """A full run with a calibration on record and sweeps; `made` goes to `write_full_run`."""
    write_full_run(path, **made)
    with RunWriter.resume(path) as writer:
        run = open_run(path)
        samples = dict.fromkeys(run.tasks, OWN["n"])
        settings = {key: OWN[key] for key in ("lam", "rho", "alpha")}
        info = CalibrationInfo("featcal", settings, "baseline:featcal-anchor", 12.5, samples)
        writer.describe(calibrations={"featcal": info})
        writer.append("sweeps", sweep_rows(run.tasks, seeds))
    return open_run(path)


def sweep_rows(tasks: tuple[str, ...], seeds: tuple[int, ...]) -> pd.DataFrame:
    """One row per point, seed and task; accuracies differ between all of them."""
    rng = np.random.default_rng(7)
    rows = []
    for factor, values in POINTS.items():
        for (point, value), seed, task in itertools.product(enumerate(values), seeds, tasks):
            row = {"sweep": factor, "point": point, "seed": seed, "task": task, **OWN, factor: value}
            rows.append(row | {"accuracy": rng.uniform(0.6, 0.9), "n_test": 400, "seconds": 2.0})
    return pd.DataFrame(rows)
