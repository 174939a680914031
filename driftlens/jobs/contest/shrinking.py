"""How far a repaired model is from the base, chosen on held-out samples: base + a (repaired - base), all tensors.

The repair is fitted without a quarter of every task's samples, and its models for all shares a are judged on these.
With a = 0 the base and with a = 1 the repair are among them, so that by the judge none of them is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.files import temporary_folder
from driftlens.base.intervals import mean_over_tasks
from driftlens.base.progress import Reporter
from driftlens.calibration.automatic import folds_of
from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.sources import Between
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.jobs.contest.contest import (
    LANE,
    Fitting,
    HeldOut,
    Judge,
    KeptScores,
    Outcome,
    Scored,
    over_samples,
    try_each,
    unlabelled,
)
from driftlens.jobs.study.reopening import Kept
from driftlens.jobs.study.study import Study

PHASE = "shrink"
SHRINKING = "choosing how far to shrink"
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@torch.no_grad()
def shares_of_the_way(
    study: Study, method: Calibrator | str, sites: Mapping[int, Sequence[str]], reporter: Reporter, kept: Kept
) -> list[dict[str, Any]]:
    """See `Choice.shares`: of every share score and drift, each with its interval over the `n` held-out samples."""
    samples = unlabelled(study)
    folds = {task: folds_of(len(drawn), task, SHRINKING) for task, drawn in samples.items()}
    judge, judged = Judge(study), {task: part_of(drawn, folds[task][-1]) for task, drawn in samples.items()}
    held_out = HeldOut(study, judged, judge.with_drift)
    base, pool = study.pool.source("base"), study.pool

    def attempt(name: str) -> Outcome[Scored]:
        seconds = 0.0
        if isinstance(method, str):
            pool.add(LANE, pool.source(method))
        else:
            rest = {
                task: part_of(drawn, sorted(position for fold in folds[task][:-1] for position in fold))
                for task, drawn in samples.items()
            }
            with temporary_folder() as folder:
                fitting = Fitting(
                    study,
                    lambda update: updated_sites(pool.chain, sites, update),
                    reporter,
                    PHASE,
                    folder / "features",
                    seed=study.seed,
                )
                seconds = fitting.fit(method, rest)
        repaired, scores = pool.source(LANE), dict[str, Mapping[str, NDArray[np.float64]]]()
        for share in SHARES:
            pool.add(LANE, Between(base, repaired, share))
            scores |= {f"{share:g} {task}": numbers for task, numbers in held_out.of(LANE).items()}
        return Outcome(scores, seconds)

    kept_scores = KeptScores[str](kept, str, study.team)
    [(_, outcome)] = try_each(
        [PHASE], attempt, read=kept_scores.read, write=kept_scores.write, team=study.team
    )
    if outcome.error is not None:
        raise outcome.error
    assert outcome.value is not None
    by_share = scores_by_share(outcome.value)
    return [share_entry(share, by_share[share], judge.measure) for share in SHARES]


def scores_by_share(flat: Scored) -> dict[float, dict[str, Mapping[str, NDArray[np.float64]]]]:
    """Return scores by share of the way and task; names in files are "SHARE TASK"."""
    by_share = dict[float, dict[str, Mapping[str, NDArray[np.float64]]]]()
    for name, numbers in flat.items():
        share, task = name.split(" ", 1)
        by_share.setdefault(float(share), {})[task] = numbers
    return by_share


def share_entry(
    share: float, by_task: Mapping[str, Mapping[str, NDArray[np.float64]]], judged_by: str
) -> dict[str, Any]:
    """Means over tasks with their intervals, samples being strata by task."""
    entry: dict[str, Any] = {"share": share, "judged_by": judged_by}
    for name in ("score", "drift"):
        mean = mean_over_tasks([over_samples(numbers[name]) for numbers in by_task.values()])
        entry |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return entry | {"n": sum(len(numbers["score"]) for numbers in by_task.values())}
