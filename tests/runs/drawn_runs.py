"""Runs in memory whose tables are drawn: what is right on how many samples, and shares with their ends."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from driftlens.runs.manifest import CalibrationInfo, Manifest
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES
from driftlens.runs.tables import conform_to_schema, empty_frame
from driftlens.utils.intervals import mcnemar_test, unpaired_difference, wilson_interval

CAL, OTHER, CONTROL = "calibrated:cal", "calibrated:other", "baseline:cal-anchor"
PAIRS = (("merged", "expert"), ("merged", "base"), (CAL, "merged"), (CAL, "base"))
Right = Mapping[tuple[str, str], int]
"""By task and variant, how many test samples are answered rightly."""


def answers(right: Right, n: int, task: str, model: str) -> np.ndarray:
    """Which of n samples a model answers rightly: as many as told, from a place of its own on."""
    first = sum(map(ord, model)) % n
    return np.roll(np.arange(n) < right[task, model], first)


@functools.cache
def _nothing() -> dict[str, pd.DataFrame]:
    return {name: empty_frame(table) for name, table in TABLES.items()}


def run_of(
    manifest: Manifest, right: Right, n: int, shares: Mapping[int, Sequence[float]], *, stored: bool = False
) -> DriftRun:
    """A run in memory with these accuracies, and of the merged model these shares with their ends, by layer.

    With `stored` it has the predictions of single test samples.
    """
    tasks, models = (tuple(dict.fromkeys(key[at] for key in right)) for at in (0, 1))
    variants = tuple(name for name in models if name != "expert")
    info = CalibrationInfo("featcal", {}, "", 1.0, dict.fromkeys(tasks, 8))
    made = {name.partition(":")[2]: info for name in variants if name.startswith("calibrated:")}
    known = dataclasses.replace(manifest, tasks=tasks, variants=variants, calibrations=made)
    run = DriftRun(Path("nowhere"), known)
    run._frames |= _nothing()
    accuracy = [
        {"task": task, "variant": variant, "metric": "accuracy", "value": k / n, "n": n}
        | dict(zip(("ci_low", "ci_high"), wilson_interval(k, n), strict=True))
        for (task, variant), k in right.items()
    ]
    run._frames["accuracy"] = conform_to_schema(pd.DataFrame(accuracy), TABLES["accuracy"])
    single = [
        {"task": task, "variant": model, "metric": "accuracy", "sample_id": str(at), "value": float(value)}
        for task, model in right
        for at, value in enumerate(answers(right, n, task, model))
    ]
    if stored:
        run._frames["scores"] = conform_to_schema(pd.DataFrame(single), TABLES["scores"])
    parts = ("final_share", "final_share_low", "final_share_high")
    layers = [
        {"task": task, "variant": "merged", "layer": layer, "path": f"layer.{layer}", "role": "block"}
        | {"jacobian_samples": 8, **dict(zip(parts, ends, strict=True))}
        for task, (layer, ends) in itertools.product(tasks, shares.items())
    ]
    if layers:
        run._frames["layers"] = conform_to_schema(pd.DataFrame(layers), TABLES["layers"])
    return run


def interval(
    right: Right, n: int, pair: tuple[str, str], tasks: Sequence[str], *, stored: bool = False
) -> tuple[float, float]:
    """The interval of the mean change over tasks, taken another way: by pairs or Newcombe's, MOVER's sum of squares."""
    value, down, up = 0.0, 0.0, 0.0
    for task in tasks:
        before, after = right[task, pair[1]], right[task, pair[0]]
        low, high = unpaired_difference(before, n, after, n)
        if stored:
            paired = mcnemar_test(*(answers(right, n, task, model) for model in reversed(pair)))
            low, high = paired.ci_low, paired.ci_high
        change = (after - before) / n
        value, down, up = value + change, down + (change - low) ** 2, up + (high - change) ** 2
    return (value - math.sqrt(down)) / len(tasks), (value + math.sqrt(up)) / len(tasks)


def best_repair(right: Right, n: int, *, stored: bool = False) -> str:
    """The calibration that stands for the run: clearly better than the merge, then by its mean, then the newest."""
    tasks, models = (list(dict.fromkeys(key[at] for key in right)) for at in (0, 1))

    def rank(model: str) -> tuple[int, int]:
        low, high = interval(right, n, (model, "merged"), tasks, stored=stored)
        return (low > 0) - (high < 0), sum(right[task, model] for task in tasks)

    return max([name for name in reversed(models) if name.startswith("calibrated:")], key=rank, default="")


@st.composite
def tables(draw: st.DrawFn, most_tasks: int = 3) -> tuple[dict[tuple[str, str], int], int]:
    models = ["expert", "merged"]
    models = [*(["base"] if draw(st.booleans()) else []), *models]
    models += draw(st.sampled_from([[], [CAL], [CONTROL, CAL], [OTHER, CONTROL, CAL]]))
    n = draw(st.sampled_from([10, 60, 300]))
    tasks = [f"t{at}" for at in range(draw(st.integers(1, most_tasks)))]
    return {(task, model): draw(st.integers(0, n)) for task in tasks for model in models}, n


SHARES = st.dictionaries(
    st.integers(2, 3), st.tuples(st.floats(0.1, 0.9), st.floats(0, 0.4), st.floats(0, 0.4)), max_size=2
)
