"""The picture of e = m + p: its areas add up to the drift, by the parts of m and p along it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from driftlens.runs.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.drift_parts import compared_variants, drift_parts_by_task


def test_the_parts_are_those_of_the_vectors_along_their_sum() -> None:
    own, inherited, expert = np.random.default_rng(0).normal(size=(3, 9, 5))
    own[0], inherited[0] = 0.0, 0.0
    drift = own + inherited
    norms = {"drift_l2": drift, "mismatch_l2": own, "propagation_l2": inherited}
    samples = pd.DataFrame({name: np.linalg.norm(rows, axis=1) for name, rows in norms.items()})
    lengths = np.linalg.norm(expert, axis=1).sum()
    layers = pd.DataFrame([("a", "merged", 2, samples["drift_l2"].sum() / lengths)])
    layers.columns = pd.Index(["task", "variant", "layer", "drift_rel"])
    samples = samples.assign(task="a", variant="merged", layer=2)
    run: Any = SimpleNamespace(samples=lambda: samples, layers=lambda: layers)
    (row,) = drift_parts_by_task(run).to_dict("records")
    along = [
        (own * drift).sum(1)[1:] / samples["drift_l2"][1:],
        (inherited * drift).sum(1)[1:] / samples["drift_l2"][1:],
    ]
    wanted = [part.sum() / lengths for part in along]
    assert [row["m along e"], row["p along e"]] == pytest.approx(wanted)
    assert row["m along e"] + row["p along e"] == pytest.approx(row["relative drift"])


def test_it_shows_before_and_after_on_one_axis_with_the_head_apart(full: DriftRun) -> None:
    drawn = charts["drift-parts"].draw(full)
    names = compared_variants(full, ChartOptions())
    assert [*dict.fromkeys(drawn.data["variant"])] == names and names[0] == "merged"
    sums = drawn.data["m along e"] + drawn.data["p along e"]
    assert sums.tolist() == pytest.approx(drawn.data["relative drift"].tolist(), nan_ok=True)
    last = full.manifest.layers[-1].index
    lines = [trace for trace in drawn.figure.data if trace.type == "scatter" and trace.mode == "lines+markers"]
    assert lines and all(max(trace.x) < last for trace in lines)
    assert {trace.type for trace in drawn.figure.data} == {"scatter", "bar"}
    one = charts["drift-parts"].draw(full, ChartOptions(tasks=[full.tasks[0]], variants=["merged"]))
    rows = drift_parts_by_task(full)
    own = rows[(rows["task"] == full.tasks[0]) & (rows["variant"] == "merged")].set_index("layer")
    mean = one.data[one.data["task"] == "mean over tasks"].set_index("layer")
    assert mean["m along e"].to_dict() == pytest.approx(own["m along e"].to_dict(), nan_ok=True)
