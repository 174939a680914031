"""Which settings a sweep visits, and which of them a run has already."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.access import Access
from driftlens.data.samples import SampleSet
from driftlens.errors import DataError, SpecError, did_you_mean
from driftlens.pipeline.search.trials import part_of
from driftlens.pipeline.study.opening import OpenModels, open_data
from driftlens.pipeline.study.reopening import redrawn
from driftlens.pipeline.study.study import Study, TaskSamples
from driftlens.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd


FACTORS = ("lam", "rho", "alpha", "n")
"""What a sweep can vary; `n` is the number of calibration samples per task."""


@dataclass(frozen=True)
class Setting:
    """One calibration: the hyperparameters that sweeps vary, and the samples per task."""

    lam: float
    rho: float
    alpha: float
    n: int

    @classmethod
    def of(cls, values: Mapping[Any, Any]) -> Setting:
        """The setting that these values are about, among others that don't matter."""
        return cls(float(values["lam"]), float(values["rho"]), float(values["alpha"]), int(values["n"]))

    @property
    def hyperparameters(self) -> dict[str, float]:
        """What the calibrator is told of it."""
        return {"lam": self.lam, "rho": self.rho, "alpha": self.alpha}


@dataclass(frozen=True)
class SweepPoint:
    """A setting's place in a sweep; `sweep` names what is varied, several factors joined by `+`."""

    sweep: str
    point: int
    setting: Setting


def require_factors(values: Mapping[str, Sequence[float]]) -> None:
    """Refuse what can't be varied.

    Raises:
        SpecError: an unknown factor, one without values, a count that is none, or nothing at all.
    """
    if not values:
        raise SpecError("a sweep needs something to vary", hint="For example --param lam=0.01,0.05,0.25.")
    for name, wanted in values.items():
        if name not in FACTORS:
            raise SpecError(
                f"a sweep can't vary {name!r}; it varies {', '.join(FACTORS)}",
                hint=did_you_mean(name, FACTORS),
            )
        if not wanted:
            raise SpecError(f"{name} has no values", hint=f"For example --param {name}=1,2.")
        for value in wanted:
            if not math.isfinite(value) or (name == "n" and (value < 1 or value != int(value))):
                expected = "a whole number from 1 upwards" if name == "n" else "a finite number"
                raise SpecError(f"{name} is {value:g}, expected {expected}")


def settings_of(
    values: Mapping[str, Sequence[float]], around: Setting, *, grid: bool
) -> dict[str, list[Setting]]:
    """The settings to visit, by sweep, in the order of the values; none twice.

    Args:
        values: factor -> its values.
        around: the value of every factor that is not varied.
        grid: whether factors are varied together, all combinations in one sweep; otherwise each in a sweep of its own.
    """
    groups = [tuple(values)] if grid else [(name,) for name in values]
    return {
        "+".join(names): list(
            dict.fromkeys(
                Setting.of(dataclasses.asdict(around) | dict(zip(names, chosen, strict=True)))
                for chosen in itertools.product(*(values[name] for name in names))
            )
        )
        for names in groups
    }


def numbered(sweeps: Mapping[str, Sequence[Setting]], rows: pd.DataFrame) -> list[SweepPoint]:
    """The settings as points: one that the run has keeps its number, a new one gets the next.

    Args:
        sweeps: settings by sweep.
        rows: of the run's sweep table.

    Raises:
        SpecError: the run's sweep of the same name keeps another factor at another value.
    """
    points = []
    for sweep, settings in sweeps.items():
        there = rows[rows["sweep"] == sweep].to_dict("records")
        known = {Setting.of(row): int(row["point"]) for row in there}
        _require_same_rest(sweep, settings, known)
        following = itertools.count(max(known.values(), default=-1) + 1)
        points += [
            SweepPoint(sweep, known[setting] if setting in known else next(following), setting)
            for setting in settings
        ]
    return points


def is_there(
    point: SweepPoint, seed: int, tasks: Collection[str], scored: Collection[str], rows: pd.DataFrame
) -> bool:
    """Whether the run has a point's rows of one seed for all tasks, with an accuracy for those `scored`."""
    mine = rows[(rows["sweep"] == point.sweep) & (rows["point"] == point.point) & (rows["seed"] == seed)]
    has_accuracy = set(mine["task"][mine["accuracy"].notna()])
    return set(mine["task"]) >= set(tasks) and has_accuracy >= set(scored)


def _require_same_rest(sweep: str, settings: Sequence[Setting], known: Collection[Setting]) -> None:
    varied = sweep.split("+")
    for name in FACTORS:
        before = {getattr(setting, name) for setting in known}
        if name not in varied and before and before != {getattr(settings[0], name)}:
            there = ", ".join(f"{value:g}" for value in sorted(before))
            raise SpecError(
                f"the run has a sweep of {sweep} with {name} {there}; "
                f"now {name} is {getattr(settings[0], name):g}",
                hint="Points of one curve share everything else; --replace takes the earlier ones out.",
            )


def samples_by_seed(
    spec: RunSpec,
    models: OpenModels,
    study: Study,
    first: Mapping[str, SampleSet],
    seeds: Sequence[int],
    *,
    access: Access,
) -> tuple[dict[int, dict[str, SampleSet]], dict[str, TaskSamples]]:
    """The calibration samples of every seed by task, and the tasks without what some seed calibrates on.

    A seed draws as many as the run's own, as the spec would with that seed. Diagnosis and test samples can only be
    among them where a task's splits draw from the same place.

    Args:
        spec: of the run.
        models: for the preprocessing.
        study: with all diagnosis and test samples.
        first: the samples of the first seed.
        seeds: the run's own first.
        access: what may be used, and on which device.

    Raises:
        DataError: a source can't be read any more, or nothing is left to measure with.
    """
    preprocess = models.architecture.preprocess
    assert preprocess is not None  # every loader that a spec can name brings one
    found, tasks, opened = {seeds[0]: dict(first)}, dict(study.tasks), {}
    for seed in seeds[1:]:
        drawn = redrawn(spec, {task: len(samples) for task, samples in first.items()}, seed)
        opened = {task: open_data(drawn, task, preprocess, access=access) for task in first}
        found[seed] = {task: data.calibration() for task, data in opened.items()}
    for task, data in opened.items():
        seen = {name for samples in found.values() for name in samples[task].ids}
        at = tasks[task]
        diagnosis = _without(at.diagnosis, seen) if data.shares("diagnosis") else at.diagnosis
        test = _without(at.test, seen) if data.shares("test") and at.test is not None else at.test
        if not len(diagnosis) or (test is not None and not len(test)):
            raise DataError(
                f"task {task}: over {len(seeds)} seeds every sample serves calibration, none is left to measure with",
                hint="Sweep with fewer seeds or fewer samples, or give calibration a split of its own.",
            )
        tasks[task] = dataclasses.replace(at, diagnosis=diagnosis, test=test)
    return found, tasks


def _without(samples: SampleSet, ids: Collection[str]) -> SampleSet:
    """The samples whose ids are not among `ids`; the very same set where that is all of them."""
    kept = [position for position, sample in enumerate(samples.ids) if sample not in ids]
    return samples if len(kept) == len(samples) else part_of(samples, kept)
