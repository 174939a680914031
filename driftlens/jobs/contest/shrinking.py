"""How far a repaired model is from the base, chosen on held-out samples: base + a (repaired - base), all tensors.

The repair is fitted without a quarter of every task's samples, and its models for all shares a are judged on these.
With a = 0 the base and with a = 1 the repair are among them, so that by the judge none of them is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.base.files import temporary_folder
from driftlens.base.intervals import mean_over_tasks
from driftlens.base.progress import Reporter
from driftlens.calibration.automatic import NUM_FOLDS, folds_of
from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.sources import Between
from driftlens.data.samples import part_of
from driftlens.engine.sites import updated_sites
from driftlens.jobs.contest.contest import (
    LANE,
    Fit,
    HeldOut,
    Judge,
    KeptScores,
    Outcome,
    Scored,
    Trials,
    contest,
    over_samples,
    unlabelled,
)
from driftlens.jobs.study.reopening import Kept
from driftlens.jobs.study.study import Study

PHASE = "shrink"
SHRINKING = "choosing how far to shrink"
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_REST = frozenset(range(NUM_FOLDS - 1))


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

    def scores(missing: Sequence[float]) -> dict[float, Scored]:
        repaired, by_share = pool.source(LANE), dict[float, Scored]()
        for share in missing:
            pool.add(LANE, Between(base, repaired, share))
            by_share[share] = held_out.of(LANE)
        return by_share

    def attempts(missing: Sequence[float]) -> Iterator[tuple[float, Outcome[Scored]]]:
        if isinstance(method, str):
            pool.add(LANE, pool.source(method))
            yield from ((share, Outcome(value)) for share, value in scores(missing).items())
            return
        with temporary_folder() as folder:
            trials = Trials(
                study,
                samples,
                folds,
                lambda update: updated_sites(pool.chain, sites, update),
                reporter,
                PHASE,
                folder / "features",
                seed=study.seed,
            )
            for _, outcome in trials.outcomes([Fit(method, _REST)], lambda _: scores(missing)):
                if outcome.error is not None:
                    raise outcome.error
                assert outcome.value is not None
                yield from ((share, Outcome(value)) for share, value in outcome.value.items())

    ledger = KeptScores[float](kept, lambda share: f"{share:g}", study.team)
    by_share = {share: outcome.value for share, outcome in contest(SHARES, attempts, ledger)}
    return [share_entry(share, by_share[share] or {}, judge.measure) for share in SHARES]


def share_entry(
    share: float, by_task: Mapping[str, Mapping[str, NDArray[np.float64]]], judged_by: str
) -> dict[str, Any]:
    """Means over tasks with their intervals, samples being strata by task."""
    entry: dict[str, Any] = {"share": share, "judged_by": judged_by}
    for name in ("score", "drift"):
        mean = mean_over_tasks([over_samples(numbers[name]) for numbers in by_task.values()])
        entry |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return entry | {"n": sum(len(numbers["score"]) for numbers in by_task.values())}
