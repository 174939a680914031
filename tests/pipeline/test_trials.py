"""The runner of trials: any calibrator that solves in closed form, in the order of the candidates, whoever fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import SingularGramError
from driftlens.base.progress import Reporter
from driftlens.calibration.calibrator import ClosedFormBase
from driftlens.calibration.featcal import FeatCal
from driftlens.engine.problems import LinearProblem, Problem, SiteReport, SiteUpdate
from driftlens.engine.sites import select_sites
from driftlens.jobs.contest.trials import LANE, Fit, HeldOut, Trials
from driftlens.jobs.study.reopening import reopened
from driftlens.jobs.study.study import Study
from driftlens.runs.run import DriftRun


class Unmoved(ClosedFormBase):
    """A calibrator that changes nothing."""

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        sites = problem.sites if isinstance(problem, LinearProblem) else [problem.site]
        return [SiteUpdate({}, SiteReport(site.name, site.kind, 0.0, None, None, 0.0)) for site in sites]


class Unsolvable(Unmoved):
    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        raise SingularGramError("singular", hint="take more samples")


@pytest.fixture
def study(light: DriftRun) -> Study:
    return reopened(light.path)[0]


def test_candidates_of_any_kind_are_measured_in_their_order(study: Study) -> None:
    samples = {task: at.calibration for task, at in study.tasks.items() if at.calibration is not None}
    parts = {task: [range(len(at))] for task, at in samples.items()}

    def drift(model: str, task: str, found: Tensor, expert: Tensor) -> Tensor:
        return torch.linalg.vector_norm(found - expert, dim=1)

    held_out = HeldOut(study, {task: at.diagnosis for task, at in study.tasks.items()}, drift)
    sites = select_sites(study.pool.chain, layers=[2])
    trials = Trials(study, samples, parts, lambda update: sites, Reporter(), "try")
    merged = held_out.of("merged")
    kinds = (FeatCal(), Unsolvable(), Unmoved(), FeatCal())
    fits = [Fit(calibrator, frozenset({0})) for calibrator in kinds]
    met = [*trials.outcomes(fits, lambda _: held_out.of(LANE))]
    assert [fit for fit, _ in met] == fits
    first, failed, unmoved, last = (outcome for _, outcome in met)
    assert failed.error is not None and failed.error.hint == "take more samples" and failed.value is None
    assert first.value and unmoved.value and last.value
    for task, drifts in merged.items():
        assert torch.equal(unmoved.value[task], drifts)
        assert not torch.equal(first.value[task], drifts)
        assert torch.equal(first.value[task], last.value[task])
    assert first.error is None and first.seconds > 0
