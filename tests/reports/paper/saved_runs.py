"""Saved runs for tests of exhibits: with a merge method, calibrations and their costs, sweeps, and hostile names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from driftlens.runs.manifest import CalibrationInfo
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from tests.runs.full_run import VARIANTS, Size, layer_list, write_full_run

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

TOY = ("cars", "mnist", "dtd")
EIGHT = ("cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn")
"""The paper's eight tasks, in an order of our own."""

SMALL = Size(blocks=2, samples=6)
SETTINGS = {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "update": ["linear", "bias", "norm"]}
GIB = 2**30


def figure_run(path: Path, *, seeds: tuple[int, ...] = (1, 2, 3), **made: Any) -> DriftRun:
    """A full run with a calibration on record and sweeps; `made` goes to `write_full_run`."""
    write_full_run(path, **made)
    with RunWriter.resume(path) as writer:
        run = open_run(path)
        samples = dict.fromkeys(run.tasks, OWN["n"])
        settings = {key: OWN[key] for key in ("lam", "rho", "alpha")}
        info = CalibrationInfo("featcal", settings, "baseline:featcal-anchor", 12.5, samples)
        writer.update_manifest(calibrations={"featcal": info})
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


def table_run(path: Path, *, name: str = "toy run", tasks: Sequence[str] = TOY) -> DriftRun:
    """A run with everything: a merge method, a calibration with its costs, and a sweep of samples with three seeds."""
    write_full_run(path, name=name, tasks=tasks, size=SMALL)
    _write_spec(path, name, "task_arithmetic")
    with RunWriter.resume(path) as writer:
        writer.update_manifest(calibrations={"featcal": _calibration(tasks)})
        writer.append("resources", _resources())
        writer.append("sweeps", _sweep(tasks))
    return open_run(path)


def scores_run(
    path: Path,
    *,
    name: str = "scores",
    tasks: Sequence[str] = TOY,
    variants: Sequence[str] = VARIANTS,
    method: str = "task_arithmetic",
    source: str = "ViT-tiny",
    seed: int = 0,
) -> DriftRun:
    """A run that holds accuracies and nothing else."""
    rng = np.random.default_rng(seed)
    with RunWriter.create(path, spec_yaml="", spec_digest="0" * 64, name=name) as writer:
        architecture = {"adapter": "open_clip_vit", "source": source}
        writer.update_manifest(tasks=tasks, variants=variants, layers=layer_list(2), architecture=architecture)
        keys = itertools.product(tasks, ("expert", *variants))
        rows = pd.DataFrame(keys, columns=["task", "variant"]).assign(metric="accuracy", n=400, seed=0)
        value = rng.integers(100, 400, len(rows)) / 400
        writer.append("accuracy", rows.assign(value=value, ci_low=value - 0.02, ci_high=value + 0.02))
    _write_spec(path, name, method)
    return open_run(path)


def _write_spec(path: Path, name: str, method: str) -> None:
    spec = f"name: {name!r}\nmerge:\n  method: {method}\n  scaling: 0.3\n"
    (path / "spec.yaml").write_text(spec, encoding="utf-8")


def _calibration(tasks: Sequence[str]) -> CalibrationInfo:
    samples = dict.fromkeys(tasks, 256)
    return CalibrationInfo("featcal", SETTINGS, "baseline:featcal-anchor", 12.5, samples, layers=(2, 3))


def _resources() -> pd.DataFrame:
    row = {"phase": "calibrate:featcal", "seconds": 14.0, "peak_rss_bytes": 3 * GIB, "energy_wh": 1.25}
    return pd.DataFrame([row])


def _sweep(tasks: Sequence[str]) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    rows = []
    for (point, n), seed, task in itertools.product(enumerate((8, 16, 48)), (1, 2, 3), tasks):
        row = {"sweep": "n", "point": point, "seed": seed, "task": task, "n": n, "n_test": 400}
        row |= {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "seconds": 2.0 + point + 0.1 * seed}
        row["accuracy"] = round(0.7 + 0.05 * point + 0.02 * rng.random(), 4)
        rows.append(row)
    return pd.DataFrame(rows)
