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
from driftlens.engine.forward_order import Lane
from driftlens.engine.problems import LinearProblem, Problem, SiteReport, SiteUpdate
from driftlens.engine.site_selection import select_sites
from driftlens.jobs.contest.trials import Trials
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
    parts = {task: [at.calibration] for task, at in study.tasks.items() if at.calibration is not None}

    def drift(model: str, task: str, found: Tensor, expert: Tensor) -> Tensor:
        return torch.linalg.vector_norm(found - expert, dim=1)

    held_out = {task: at.diagnosis for task, at in study.tasks.items()}
    trials = Trials(study, select_sites(study.pool.chain, layers=[2]), held_out, drift, Reporter(), "try")
    merged = trials.of("merged")
    kinds = (FeatCal(), Unsolvable(), Unmoved(), FeatCal())
    first, failed, unmoved, last = trials.run(parts, [Lane(calibrator) for calibrator in kinds])
    assert failed.error is not None and failed.error.hint == "take more samples" and not failed.by_task
    for task, drifts in merged.items():
        assert torch.equal(unmoved.by_task[task], drifts)
        assert not torch.equal(first.by_task[task], drifts)
        assert torch.equal(first.by_task[task], last.by_task[task])
    assert first.error is None and first.seconds > 0
