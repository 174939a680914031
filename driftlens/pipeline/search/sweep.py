"""How drift and accuracy depend on the settings of a calibration: many calibrations of one run, as a table."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlens.access import Access
from driftlens.calibration.calibrator import Calibrator, closed_form
from driftlens.data.samples import SampleSet, part_of, shuffled
from driftlens.engine.forward_order import Lane
from driftlens.errors import DataError, SingularGramError, SpecError, did_you_mean
from driftlens.files import PathLike
from driftlens.metrics import METRICS
from driftlens.pipeline.analyze.answers import metrics_of
from driftlens.pipeline.analyze.evaluation import final_drift, scores_of
from driftlens.pipeline.analyze.phases import all_of, deterministic_algorithms, suitable_threads
from driftlens.pipeline.calibrate.job import OpenCalibration, open_calibration
from driftlens.pipeline.calibrate.plan import CalibrationRequest
from driftlens.pipeline.search.trials import Trials, Tried, with_settings
from driftlens.pipeline.study.opening import open_data, with_own_answers
from driftlens.pipeline.study.reopening import (
    Live,
    redrawn,
    require_same_models,
    require_same_samples,
    require_spec,
)
from driftlens.pipeline.study.study import Study, TaskSamples
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records import layout
from driftlens.records.run import DriftRun, open_run
from driftlens.records.writer import RunWriter
from driftlens.spec import load_spec

if TYPE_CHECKING:
    import pandas as pd

PHASE = "sweep"
FACTORS = ("lam", "rho", "alpha", "n")
"""What a sweep can vary; `n` is the number of calibration samples per task."""


@dataclass(frozen=True)
class SweepRequest:
    """One or several sweeps, as asked for.

    Attributes:
        values: lam, rho, alpha or n -> the values to visit.
        grid: whether all combinations are visited in one sweep; otherwise each factor is varied by itself.
        seeds: how many draws of the calibration samples; the first is the run's own.
        method: a registered calibrator; the spec's, or FeatCal, if left out.
        preset: published settings for all that is not varied.
        samples: calibration samples per task where n is not varied; the spec's number if left out.
        accuracy: whether every point is scored on the test samples too.
    """

    values: Mapping[str, Sequence[float]]
    grid: bool = False
    seeds: int = 1
    method: str | None = None
    preset: str | None = None
    samples: int | None = None
    accuracy: bool = True


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
class _Point:
    """A setting's place in a sweep; `sweep` names what is varied, several factors joined by `+`."""

    sweep: str
    point: int
    setting: Setting


def sweep(
    path: PathLike,
    request: SweepRequest,
    *,
    resume: bool = False,
    replace: bool = False,
    access: Access = Access(),
    live: Live | None = None,
    on_progress: ProgressSink | None = None,
    cancel: CancelToken | None = None,
) -> DriftRun:
    """The run with the rows of its sweeps: final drift on the diagnosis samples, accuracy on the test samples.

    Every point is the calibration that `calibrate` would make of these settings; its weights are not kept. A setting
    that a sweep of the run has already is measured anew and keeps its number.

    Args:
        path: the run directory.
        request: what to vary.
        resume: leave out points that the run has already.
        replace: take the run's earlier sweeps of the same factors out, once the first new point is measured.
        access: what may be used, and on which device.
        live: how the study of a run of live modules is made again.
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop; finished points stay.

    Raises:
        SpecError: an unknown factor, a value out of its range, or a sweep that would mix with another one's points.
        DataError: a task has fewer samples than asked for.
        SingularGramError: some settings can't be solved for; all others were measured.
        DriftLensError: see the tree in `driftlens.errors`.
    """
    folder = pathlib.Path(path)
    _require_factors(request.values)
    if request.seeds < 1:
        raise SpecError(f"seeds is {request.seeds}, expected a whole number from 1 upwards")
    opened, around = _open(folder, request, access=access, live=live)
    if live is not None:
        _require_own_samples(request, opened.study)
    sweeps = _settings_of(request.values, around, grid=request.grid)
    for setting in {setting for settings in sweeps.values() for setting in settings}:
        with_settings(opened.plan.calibrator, setting.hyperparameters).check(has_base=opened.study.has_base)
    rows = open_run(folder).sweeps()
    _numbered(sweeps, rows[~rows["sweep"].isin(sweeps)] if replace else rows)
    require_same_samples(opened.manifest, opened.study)
    seeds = range(opened.study.seed, opened.study.seed + request.seeds)
    samples, tasks = _samples_by_seed(opened, seeds, access)
    if live is not None:
        samples[opened.study.seed] = {task: _as_drawn(at, opened) for task, at in opened.plan.samples.items()}
    study = dataclasses.replace(opened.study, tasks=tasks)
    require_same_models(opened.manifest, study, Reporter(on_progress, cancel))
    scored = [task for task, at in tasks.items() if at.test is not None and metrics_of(study, task)]
    unsolved: dict[Setting, SingularGramError] = {}
    with RunWriter.resume(folder) as writer:
        rows = open_run(folder).sweeps()
        is_outdated = rows["sweep"].isin(sweeps) & replace
        outdated = set(rows["sweep"][is_outdated])
        points = _numbered(sweeps, rows[~is_outdated])
        kept = rows[~is_outdated] if resume else rows[:0]
        trials = Trials(
            study,
            opened.plan.sites,
            {task: at.diagnosis for task, at in tasks.items()},
            functools.partial(_measured, study, accuracy=request.accuracy),
            Reporter(all_of(writer.progress, on_progress), cancel),
            PHASE,
            spill=folder / layout.SCRATCH / PHASE,
        )
        (folder / layout.SCRATCH).mkdir(exist_ok=True)
        with deterministic_algorithms(study.settings.deterministic):
            for seed, drawn in samples.items():
                phase, wanted = f"{PHASE}:{seed}", scored if request.accuracy else []
                missing = [point for point in points if not _is_there(point, seed, tasks, wanted, kept)]
                with writer.phase(phase), suitable_threads(writer, phase, study):
                    for setting, tried in _tried(trials, opened.plan.calibrator, missing, drawn):
                        if tried.error is not None:
                            unsolved.setdefault(setting, tried.error)
                            continue
                        known = {"seed": seed, "seconds": tried.seconds, **dataclasses.asdict(setting)}
                        found = [
                            {"sweep": point.sweep, "point": point.point, **known, **row}
                            for point in missing
                            if point.setting == setting
                            for row in tried.by_task.values()
                        ]
                        _write(writer, found, outdated)
    if unsolved:
        raise _incomplete(unsolved)
    return open_run(folder)


def _open(
    folder: pathlib.Path, request: SweepRequest, *, live: Live | None, **options: Any
) -> tuple[OpenCalibration, Setting]:
    """The run opened with the most samples that a point needs, and the setting that sweeps vary around."""
    count = request.samples
    if count is None and live is None:
        require_spec(folder, open_run(folder).manifest)
        spec = load_spec(folder / layout.SPEC)
        count = min(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    wanted = int(max(request.values.get("n", ()), default=0))
    most = None if count is None else max(count, wanted, 1)
    asked = CalibrationRequest(PHASE, method=request.method, preset=request.preset, samples=most)
    opened = open_calibration(folder, asked, live=live, **options)
    fewest = min(map(len, opened.plan.samples.values()))
    if wanted > fewest:  # of samples that were handed in as many were taken as calibrations take
        raise DataError(
            f"n is {wanted}, but there are {fewest} calibration samples",
            hint="Hand in more, and set `samples`.",
        )
    count = count or fewest
    settings = opened.plan.calibrator.get_params() | {"n": count}
    missing = [name for name in FACTORS if name not in settings]
    if missing:
        raise SpecError(f"{opened.plan.method} has no {', '.join(missing)} to sweep")
    return opened, Setting.of(settings)


def _require_own_samples(request: SweepRequest, study: Study) -> None:
    """Refuse what samples that were handed in can't do: be drawn anew, or serve calibration and measurement."""
    if request.seeds > 1:
        raise SpecError(
            f"a sweep of live modules can't draw its samples {request.seeds} times",
            hint="Leave `seeds` out, or hand in other samples as `data` and sweep again.",
        )
    for task, at in study.tasks.items():
        if at.calibration is None or at.calibration is at.diagnosis:
            raise SpecError(
                f"task {task}: no samples to calibrate on but those on which drift is measured, and settings that are "
                "compared on these are chosen for fitting them",
                hint="Hand in samples to calibrate on: dl.sweep(run, param=..., data={task: SAMPLES}).",
            )


def _as_drawn(samples: SampleSet, opened: OpenCalibration) -> SampleSet:
    """Samples that were handed in, in the order in which some of them would be drawn: all of them keep their own."""
    if samples.ids != tuple(map(str, range(len(samples)))):
        return samples
    order = shuffled(len(samples), opened.study.seed, task=samples.task, split="calibration")
    return part_of(samples, order)


def _measured(
    study: Study, model: str, task: str, found: Tensor, expert: Tensor, *, accuracy: bool
) -> dict[str, Any]:
    """Drift and accuracy of one model on one task, as columns of the sweep table."""
    row = {"task": task, **final_drift(found, expert)}
    for score in scores_of(study, task, [model], Reporter()).rows if accuracy else ():
        row |= {
            score["metric"] if score["metric"] in METRICS else "accuracy": score["value"],
            "n_test": score["n"],
        }
    return row


def _tried(
    trials: Trials[dict[str, Any]],
    start: Calibrator,
    missing: Sequence[_Point],
    samples: Mapping[str, SampleSet],
) -> Iterator[tuple[Setting, Tried[dict[str, Any]]]]:
    """What became of every setting of the missing points, calibrated on these samples."""
    settings = list(dict.fromkeys(point.setting for point in missing))
    if not settings:
        return
    cuts = sorted({setting.n for setting in settings})
    parts = {
        task: [part_of(drawn, range(low, high)) for low, high in zip([0, *cuts], cuts, strict=False)]
        for task, drawn in samples.items()
    }
    lanes = []
    for setting in settings:
        calibrator = closed_form(with_settings(start, setting.hyperparameters))
        lanes.append(Lane(calibrator, frozenset(range(cuts.index(setting.n) + 1))))
    yield from zip(settings, trials.run(parts, lanes), strict=True)


def _write(writer: RunWriter, rows: Sequence[Mapping[str, Any]], outdated: set[str]) -> None:
    """Append rows; once, the first time, those of outdated sweeps go, and the others keep their exact values."""
    import pandas as pd

    if outdated:
        writer.drop("sweeps", "sweep", outdated)
        outdated.clear()
    writer.append("sweeps", pd.DataFrame(rows), replace=True)


def _incomplete(unsolved: Mapping[Setting, SingularGramError]) -> SingularGramError:
    """Names the settings that could not be measured; every other point is in the run."""
    named = "; ".join(
        f"lam {setting.lam:g}, rho {setting.rho:g}, alpha {setting.alpha:g}, {setting.n} samples"
        for setting in unsolved
    )
    error = next(iter(unsolved.values()))
    return SingularGramError(
        f"not measured, because they can't be solved for: {named}. The first one: {error.message}",
        hint=f"All other points are in the run. {error.hint}",
        **error.context,
    )


def _require_factors(values: Mapping[str, Sequence[float]]) -> None:
    """Refuse an unknown factor, one without values, a value that can't be, or nothing at all."""
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


def _settings_of(
    values: Mapping[str, Sequence[float]], around: Setting, *, grid: bool
) -> dict[str, list[Setting]]:
    """The settings to visit around another one, by sweep, in the order of the values; none twice."""
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


def _numbered(sweeps: Mapping[str, Sequence[Setting]], rows: pd.DataFrame) -> list[_Point]:
    """The settings as points: one that the run has in `rows` keeps its number, a new one gets the next."""
    points = []
    for name, settings in sweeps.items():
        there = rows[rows["sweep"] == name].to_dict("records")
        known = {Setting.of(row): int(row["point"]) for row in there}
        _require_same_rest(name, settings, known)
        following = itertools.count(max(known.values(), default=-1) + 1)
        points += [
            _Point(name, known[setting] if setting in known else next(following), setting)
            for setting in settings
        ]
    return points


def _is_there(
    point: _Point, seed: int, tasks: Collection[str], scored: Collection[str], rows: pd.DataFrame
) -> bool:
    """Whether the run has a point's rows of one seed for all tasks, with a score for those `scored`."""
    mine = rows[(rows["sweep"] == point.sweep) & (rows["point"] == point.point) & (rows["seed"] == seed)]
    has_score = set(mine["task"][mine[[*METRICS]].notna().any(axis=1)])
    return set(mine["task"]) >= set(tasks) and has_score >= set(scored)


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


def _samples_by_seed(
    opened: OpenCalibration, seeds: Sequence[int], access: Access
) -> tuple[dict[int, dict[str, SampleSet]], dict[str, TaskSamples]]:
    """The calibration samples of every seed by task, and the tasks without what some seed calibrates on.

    A seed draws as many as the run's own, as the spec would with that seed. Diagnosis and test samples can only be
    among them where a task's splits draw from the same place.
    """
    first, architecture = opened.plan.samples, opened.models.architecture
    found, tasks, sources = {seeds[0]: dict(first)}, dict(opened.study.tasks), {}
    for seed in seeds[1:]:
        spec = load_spec(opened.folder / layout.SPEC)
        drawn = redrawn(spec, {task: len(samples) for task, samples in first.items()}, seed)
        sources = {task: open_data(drawn, task, architecture, access=access) for task in first}
        found[seed] = {
            task: with_own_answers(data.calibration, opened.study.pool) for task, data in sources.items()
        }
    for task, data in sources.items():
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
