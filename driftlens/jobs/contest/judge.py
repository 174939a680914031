"""How near models are to the experts on given samples, sample by sample; no label is read.

What counts is the divergence of the expert's class probabilities from the model's, each through its own score map, and
the relative final drift only where a task has no score map. Over 27 settings of four real tasks (docs/benchmarks.md)
held-out divergence ranked the settings nearly as test accuracy did, Spearman -0.91; relative drift did worse, -0.52,
because it favours targets with more of the expert (alpha 0.6) that class decisions don't gain from. Nats and relative
drift have no common mean, so relative drift is what counts for all tasks as soon as one of them lacks a score map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.base.variants import expert_of
from driftlens.data.samples import SampleSet
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.study.study import Study
from driftlens.models.heads import ScoreMap

T = TypeVar("T")

LANE = "lane"
"""Name in the study's pool of the calibrated model at hand: the merged model with other weights."""


@dataclass(frozen=True)
class Judge:
    """Judges the models of a study's pool; lower is better."""

    study: Study

    @property
    def bare(self) -> list[str]:
        """Tasks without a score map."""
        return [task for task, at in self.study.tasks.items() if at.head is None]

    @property
    def score(self) -> str:
        """What is compared, in words."""
        drift = f"relative final drift of all tasks, as there is no head for {', '.join(self.bare)}"
        return drift if self.bare else "KL(expert || calibrated) of class probabilities, nat"

    def __call__(self, model: str, task: str, found: Tensor, expert: Tensor) -> NDArray[np.float64]:
        """One value per sample of a task, [n], from final features of a model and of the expert, [n, d] each."""
        given, wanted = self._head(model, task), self.study.head(task, expert_of(task))
        if self.bare or given is None or wanted is None:
            return drift_scores(found, expert).cpu().numpy()
        return divergences(found, given, expert, wanted).cpu().numpy()

    def _head(self, model: str, task: str) -> ScoreMap | None:
        at = self.study.tasks[task]
        own = at.own_heads.get("merged" if model == LANE else model, at.head)
        return self.study.pool.score_map(own, model)


@dataclass(frozen=True)
class HeldOut(Generic[T]):
    """Samples on which models are measured that were made without them; experts are run once.

    `measure` gets a model, a task, and final features of model and expert, [n, d]; `watch` hears before any are taken.
    """

    study: Study
    samples: Mapping[str, SampleSet]
    measure: Callable[[str, str, Tensor, Tensor], T]
    watch: Callable[[str, str], None] = lambda task, model: None

    @torch.no_grad()
    def of(self, model: str) -> dict[str, T]:
        """What is measured of a model, by task."""

        def measured(task: str) -> T:
            expert = self.expert(task)
            return self.measure(model, task, self._features(model, task), expert)

        return self.study.team.each(list(self.samples), measured)

    def expert(self, task: str) -> Tensor:
        """The expert's final features, which are taken once."""
        if task not in self._experts:
            self._experts[task] = self._features(expert_of(task), task)
        return self._experts[task]

    @cached_property
    def _experts(self) -> dict[str, Tensor]:
        return {}

    def _features(self, model: str, task: str) -> Tensor:
        self.watch(task, model)
        return final_features(self.study.pool, model, task, self.samples[task], self.study.settings.pool)


def drift_scores(found: Tensor, expert: Tensor) -> Tensor:
    """Norms of final drift, [n], against the mean norm of the expert's features: their mean is `drift_rel`."""
    sizes = torch.linalg.vector_norm(expert, dim=1).double()
    return torch.linalg.vector_norm(found - expert, dim=1).double() / sizes.mean()


def divergences(found: Tensor, head: ScoreMap, expert: Tensor, expert_head: ScoreMap) -> Tensor:
    """KL(expert || model) of each sample's class probabilities, [n], in nat; no label is needed."""
    wanted = F.log_softmax(expert_head.scores(expert).double(), dim=1)
    given = F.log_softmax(head.scores(found).double(), dim=1)
    return (wanted.exp() * (wanted - given)).sum(dim=1)
