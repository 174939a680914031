"""What a fit on other features loses: an exact quadratic, nothing where features are the same, told by the protocol."""

from __future__ import annotations

import pathlib

import pytest
import torch

from driftlens.jobs.contest.arena import measure_excess, quadratic
from driftlens.linalg.ridge import solve_weight
from driftlens.runs.run import DriftRun
from driftlens.suites.reproduce import PROTOCOLS, Suite
from driftlens_reports.reproduced import shown
from driftlens_reports.terminal import sheet_text
from tests.pipeline.calibrating import copied, same_rows


def test_the_excess_is_the_difference_of_objectives(generator: torch.Generator) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lam, anchor, rows, targets, stale = 0.3, drawn(3, 4), drawn(50, 4), drawn(50, 3), drawn(50, 4)
    gram, cross = rows.T @ rows / 50, targets.T @ rows / 50

    def objective(weight: torch.Tensor) -> float:
        misfit = (rows @ weight.T - targets).square().sum(dim=1).mean()
        return float(misfit + lam * (weight - anchor).square().sum())

    best = solve_weight(gram, cross, anchor, lam=lam)
    other = solve_weight(stale.T @ stale / 50, targets.T @ stale / 50, anchor, lam=lam)
    wanted = objective(other) - objective(best)
    assert wanted > 0.1
    assert quadratic(gram, lam, other - best) == pytest.approx(wanted, rel=1e-10)


def test_fits_on_stale_features_lose_from_the_second_block_on(
    light: DriftRun, tmp_path: pathlib.Path
) -> None:
    run = measure_excess(copied(light, tmp_path / "run"), {"alpha": 0.5})
    rows = run.excess()
    sites = rows.groupby(["inputs", "layer"]).size()
    assert {*rows["inputs"]} == {"merged", "expert"} and sites.nunique() == 1
    first = rows["layer"] == rows["layer"].min()
    assert (rows["gain"] > 0).all() and (rows["excess"] >= 0).all()
    is_stale = rows["inputs"] == "merged"
    # What enters the first block is the same, calibrated or not.
    assert (rows["excess"][is_stale & first] == 0).all()
    assert (rows["excess"][is_stale & ~first] > 0).all() and (rows["excess"][~is_stale] > 0).all()
    same_rows(run, light)
    again = measure_excess(run.path, {"alpha": 0.9}, resume=True).excess()
    assert again.equals(rows), "what is there is left"
    suite = Suite(title="Two", tasks=["a"], spec={})
    told = shown(suite, "source", {"task_arithmetic": run}, [])
    assert PROTOCOLS["source"].is_excess and len(told.rows) == len(rows)
    text = sheet_text(told.sheets[0])
    assert "the merged" in text and "the expert" in text
    layer, inputs = rows["layer"].max(), "expert"
    own = rows[(rows["layer"] == layer) & (rows["inputs"] == inputs)]
    line = next(row for row in told.sheets[0].rows if row[1:3] == (f"the {inputs}", layer))
    assert line[3] == pytest.approx(own["excess"].sum() / own["gain"].sum())
