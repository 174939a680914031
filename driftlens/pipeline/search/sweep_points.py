"""Which settings a sweep visits, and which of them a run has already."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.access import Access
from driftlens.data.samples import SampleSet
from driftlens.data.sources import Split, data_sources
from driftlens.errors import DataError, SpecError
from driftlens.pipeline.search.lanes import without
from driftlens.pipeline.study.opening import OpenModels, open_data
from driftlens.pipeline.study.study import Study, TaskSamples
from driftlens.spec import RunSpec, load_spec

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

    def with_values(self, names: Sequence[str], values: Sequence[float]) -> Setting:
        """The setting with some values changed."""
        changed = {name: getattr(self, name) for name in FACTORS} | dict(zip(names, values, strict=True))
        return Setting(
            float(changed["lam"]), float(changed["rho"]), float(changed["alpha"]), int(changed["n"])
        )


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
            near = difflib.get_close_matches(name, FACTORS, n=1, cutoff=0.5)
            raise SpecError(
                f"a sweep can't vary {name!r}; it varies {', '.join(FACTORS)}",
                hint=f"Did you mean {near[0]!r}?" if near else "",
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
                around.with_values(names, chosen)
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
        known = {setting_of_row(row): int(row["point"]) for row in _rows_of(rows, sweep)}
        _require_same_rest(sweep, settings, known)
        following = itertools.count(max(known.values(), default=-1) + 1)
        points += [
            SweepPoint(sweep, known[setting] if setting in known else next(following), setting)
            for setting in settings
        ]
    return points


def setting_of_row(row: Mapping[str, Any]) -> Setting:
    """The setting that a row of the sweep table is about."""
    return Setting(float(row["lam"]), float(row["rho"]), float(row["alpha"]), int(row["n"]))


def is_there(
    point: SweepPoint, seed: int, tasks: Collection[str], scored: Collection[str], rows: pd.DataFrame
) -> bool:
    """Whether the run has a point's rows of one seed for all tasks, with an accuracy for those `scored`."""
    mine = [row for row in _rows_of(rows, point.sweep) if row["point"] == point.point and row["seed"] == seed]
    has_accuracy = {row["task"] for row in mine if row["accuracy"] == row["accuracy"]}  # NaN is not itself
    return {row["task"] for row in mine} >= set(tasks) and has_accuracy >= set(scored)


def _rows_of(rows: pd.DataFrame, sweep: str) -> Iterable[dict[str, Any]]:
    return [
        {str(name): value for name, value in row.items()}
        for row in rows[rows["sweep"] == sweep].to_dict("records")
    ]


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


BySeed = Mapping[int, Mapping[str, SampleSet]]
"""Seed -> task -> its calibration samples."""


def samples_by_seed(
    spec: RunSpec,
    models: OpenModels,
    first: Mapping[str, SampleSet],
    seeds: Sequence[int],
    *,
    access: Access,
) -> BySeed:
    """As many calibration samples for every seed as the run's own seed has, drawn as the spec would with that seed.

    Args:
        spec: of the run.
        models: for the preprocessing.
        first: the samples of the first seed.
        seeds: the run's own first.
        access: what may be used, and on which device.

    Raises:
        DataError: a source can't be read any more.
    """
    preprocess = models.architecture.preprocess
    assert preprocess is not None  # every loader that a spec can name brings one
    found = {seeds[0]: dict(first)}
    for seed in seeds[1:]:
        drawn = _with_seed(spec, seed, {task: len(samples) for task, samples in first.items()})
        found[seed] = {
            task: open_data(drawn, task, preprocess, access=access).calibration() for task in first
        }
    return found


def measured_elsewhere(
    study: Study, spec: RunSpec, samples: BySeed, *, access: Access
) -> dict[str, TaskSamples]:
    """The study's tasks without those diagnosis and test samples that some seed calibrates on.

    That can only be where a task's splits draw from the same place.

    Raises:
        DataError: nothing is left to measure with.
    """
    tasks = dict(study.tasks)
    for task, at_hand in tasks.items() if len(samples) > 1 else ():
        seen = {name for drawn in samples.values() for name in drawn[task].ids}
        shared = _shared_splits(spec, task, access=access)
        diagnosis, test = at_hand.diagnosis, at_hand.test
        if "diagnosis" in shared:
            diagnosis = without(diagnosis, seen)
        if "test" in shared and test is not None:
            test = without(test, seen)
        if not len(diagnosis) or (test is not None and not len(test)):
            raise DataError(
                f"task {task}: over {len(samples)} seeds every sample serves calibration, none is left to measure with",
                hint="Sweep with fewer seeds or fewer samples, or give calibration a split of its own.",
            )
        tasks[task] = dataclasses.replace(at_hand, diagnosis=diagnosis, test=test)
    return tasks


def _shared_splits(spec: RunSpec, task: str, *, access: Access) -> set[Split]:
    """The splits that draw from where calibration draws from."""
    entry = spec.data.tasks[task]
    source = data_sources[entry.kind]
    origin = source(entry, "calibration", access).origin
    own: Split = "diagnosis" if getattr(entry, "diagnosis", None) is not None else "test"
    shared: set[Split] = {"test"} if source(entry, "test", access).origin == origin else set()
    if source(entry, own, access).origin == origin:
        shared.add("diagnosis")
    return shared


def _with_seed(spec: RunSpec, seed: int, counts: Mapping[str, int]) -> RunSpec:
    values = spec.as_dict()
    values["data"]["defaults"]["seed"] = seed
    for task, count in counts.items():
        values["data"][task]["n"] = count
    return load_spec(values)
