"""Which task a sample is of where nobody tells: what of its base's final feature says so.

Repairs with a map per task are scored so where `task_id` is `unknown`. The classifier is a linear discriminant analysis
of the calibration samples, whose common covariance is shrunk (Ledoit and Wolf, 2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftlens.data.samples import SampleSet
from driftlens.jobs.analyze.evaluation import final_features
from driftlens.jobs.study.study import Study


class TaskFinder:
    """Says the task of test samples of a study, of which it reads no label."""

    def __init__(self, study: Study) -> None:
        """Nothing is computed yet; the study has a base, and calibration samples."""
        self._study, self._taken_for = study, dict[str, tuple[str, ...]]()

    def tasks_of(self, task: str) -> Sequence[str]:
        """Of every test sample of a task, in order, the task that it is taken for."""
        if task not in self._taken_for:
            test = self._study.tasks[task].test
            self._taken_for[task] = self._predicted(test) if test else ()
        return self._taken_for[task]

    def shares(self) -> dict[str, float]:
        """Of every task with test samples the share of them whose task is found out."""
        taken = {task: self.tasks_of(task) for task in self._study.tasks}
        return {task: names.count(task) / len(names) for task, names in taken.items() if names}

    def _predicted(self, test: SampleSet) -> tuple[str, ...]:
        if len(self._study.tasks) == 1:
            return (test.task,) * len(test)
        return tuple(map(str, self._trained.predict(self._features(test))))

    @cached_property
    def _trained(self) -> Any:
        """The classifier of all calibration samples."""
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

        sets = self._study.calibration_sets
        features = np.concatenate([self._features(samples) for samples in sets.values()])
        names = [task for task, samples in sets.items() for _ in samples.ids]
        return LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(features, names)

    def _features(self, samples: SampleSet) -> NDArray[np.float32]:
        pool = self._study.pool
        return (
            final_features(pool, "base", samples.task, samples, self._study.settings.pool)
            .cpu()
            .float()
            .numpy()
        )
