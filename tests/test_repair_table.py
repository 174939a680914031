"""The benchmark's table of repairs says what the draws that were kept hold; `docs/benchmarks.md` has its figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from benchmarks.repairs import FEATCAL, table

TASKS, N, OURS = ("a", "b"), 40, "ours"


def draw(seed: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Scores of 0 or 1; what no calibration sample changes is the same in every draw."""
    models: dict[str, Any] = {}
    for name in names:
        models[name] = {}
        for at, task in enumerate(TASKS):
            is_repair = name in (FEATCAL, OURS)
            numbers = np.random.default_rng([seed * is_repair, len(name), at])
            score, kl = (numbers.random(N) < 0.5 + 0.2 * is_repair).astype(float), numbers.random(N)
            of = {"score": score, "kl": kl, "drift": [numbers.random()], "cosine": [numbers.random()]}
            models[name][task] = {key: [float(value) for value in values] for key, values in of.items()}
    costs = {name: {"seconds": 10.0 * seed, "added": 1000} for name in names if name in (FEATCAL, OURS)}
    return {"models": models, "costs": costs}


def rows_of(text: str) -> dict[str, dict[str, str]]:
    _, head, _, *lines = text.splitlines()
    titles, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines))
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def test_means_errors_and_paired_changes_are_those_of_the_draws() -> None:
    draws = [draw(seed, ("base", "merged", FEATCAL, OURS)) for seed in (1, 2, 4)]
    draws.append(draw(5, ("base", "merged", FEATCAL)))  # which is not ours, and so not compared with
    rows = rows_of(table("real", draws, ("base", "merged", FEATCAL, OURS)))
    scores = {
        name: np.array([[of["models"][name][task]["score"] for task in TASKS] for of in draws[:3]])
        for name in ("merged", FEATCAL, OURS)
    }
    by_draw = 100 * scores[OURS].mean(axis=(1, 2))
    assert rows[OURS]["by draw"] == ", ".join(f"{value:.1f}" for value in by_draw)
    error = by_draw.std(ddof=1) / math.sqrt(3)
    assert rows[OURS]["score, %"] == f"{by_draw.mean():.1f} ± {error:.1f}"
    assert "±" not in rows["merged"]["score, %"] and rows["merged"]["by draw"] == ""
    assert (rows[OURS]["processor seconds"], rows[OURS]["added numbers"]) == ("23", "1,000")
    for start in ("merged", FEATCAL):
        gaps = 100 * (scores[OURS] - scores[start]).mean(axis=0)  # of every sample, its mean over draws
        mean = gaps.mean(axis=1).mean()
        half = scipy.stats.t.ppf(0.975, N - 1) * math.sqrt((gaps.var(axis=1, ddof=1) / N).sum()) / len(TASKS)
        value, low, _, high = rows[OURS][f"score, % against {start}"].replace("(", "").replace(")", "").split()
        assert float(value) == pytest.approx(mean, abs=0.051)
        assert [float(low), float(high)] == pytest.approx([mean - half, mean + half], abs=0.051)
    assert rows["merged"]["score, % against merged"] == ""
