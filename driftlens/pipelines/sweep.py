"""How drift and accuracy depend on methods, settings and samples: many calibrations of one run, as a table.

Entry points: `sweep`; for methods side by side `wanted_methods`, then `compare_methods`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.config.requests import CalibrationRequest, SweepRequest
from driftlens.config.run import load_spec
from driftlens.data.corruption import CLEAN, corrupted, written
from driftlens.data.samples import SampleSet, part_of, shuffled
from driftlens.engine.calibrating import ExpertFeatures
from driftlens.engine.sites import select_sites
from driftlens.experiment import resume as reopening
from driftlens.experiment.loading import open_data, with_own_answers
from driftlens.experiment.resume import deterministic_algorithms, run_phase, writing
from driftlens.experiment.study import Study, TaskSamples
from driftlens.pipelines.calibrate import OpenCalibration, calibrate, open_calibration
from driftlens.pipelines.calibration_plan import calibrator_of, method_called
from driftlens.pipelines.evaluation import final_drift, metrics_of, scores_of
from driftlens.pipelines.model_selection import (
    LANE,
    Bar,
    Fitting,
    HeldOutScorer,
    NamedMethod,
    attempt,
    divergences,
    named_methods,
    require_any,
)
from driftlens.results.sweep_results import ABLATION, settings_of, sweep_named
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, is_live, open_run
from driftlens.runs.schema import SWEEPS
from driftlens.runs.writer import RunWriter
from driftlens.utils.access import Access, Context
from driftlens.utils.distributed import ALONE
from driftlens.utils.errors import Cancelled, DataError, DriftLensError, SpecError
from driftlens.utils.files import PathLike
from driftlens.utils.metrics import METRICS
from driftlens.utils.progress import Reporter
from driftlens.utils.registry import resolve

if TYPE_CHECKING:
    import pandas as pd

_PHASE = "sweep"


@dataclass(frozen=True)
class _Setting:
    """One calibration: a method, all its settings as JSON, samples per task, how their pictures are corrupted."""

    method: str
    settings: str
    n: int
    corruption: str = CLEAN

    @classmethod
    def of(cls, method: str, settings: Mapping[str, Any], n: int, corruption: str = CLEAN) -> _Setting:
        """The setting with these values over the method's defaults."""
        resolved = resolve(calibrators[method], settings, method)
        return cls(method, json.dumps(resolved), n, written(corruption))

    @property
    def values(self) -> dict[str, Any]:
        """All that a sweep can vary, by name."""
        return {**json.loads(self.settings), "n": self.n, "corruption": self.corruption}

    @property
    def calibrator(self) -> Calibrator:
        """The calibrator with these settings."""
        return calibrators[self.method](**json.loads(self.settings))

    @property
    def reads(self) -> tuple[str, int]:
        """Equal for settings that read the same samples."""
        return self.corruption, self.n

    def changed(self, values: Mapping[str, Any]) -> _Setting:
        """The setting with some values changed; raises as `of` does."""
        updated = self.values | dict(values)
        count, corruption = int(updated.pop("n")), updated.pop("corruption")
        return _Setting.of(self.method, updated, count, corruption)

    def stored(self, row: Mapping[Any, Any]) -> _Setting:
        """The setting of a row of the sweep table, around this one."""
        corruption = row["corruption"] if isinstance(row["corruption"], str) else CLEAN
        return self.changed(settings_of(row) | {"n": int(row["n"]), "corruption": corruption})

    def __str__(self) -> str:
        plain = _Setting.of(self.method, {}, 0).values | {"n": self.n}
        named = [f" {name} {_written(value)}," for name, value in self.values.items() if value != plain[name]]
        return f"{self.method},{''.join(named)} {self.n} samples"


_Columns = dict[str, Any]
"""What is measured on one task, as columns of the sweep table."""
_Point = tuple[str, int]
"""The place of a setting: the name of a sweep, with several factors joined by `+`, and a number."""


def sweep(path: PathLike, request: SweepRequest, context: Context = Context()) -> DriftRun:
    """Add the rows of sweeps to a run: final drift on the diagnosis samples, accuracy on the test samples.

    Every point is the calibration that `calibrate` would make of these settings; its weights are not kept. A setting
    that a sweep of the run has already is measured anew and keeps its number.

    Args:
        path: the run directory.
        request: what to vary.
        context: where and how to run.

    Returns:
        The run, opened anew.
    """
    folder = pathlib.Path(path)
    for count in request.param.get("n", ()):
        if not isinstance(count, int | float) or count != int(count) or count < 1:
            raise SpecError(f"n is {count}, expected a whole number from 1 upwards")
    opened, around = _open(folder, request, context)
    study, team = opened.study, opened.study.team
    if context.live is not None:
        _require_own_samples(request, study)
    sweeps = _settings_by_sweep(request, around)
    settings = list(dict.fromkeys(itertools.chain(*sweeps.values())))
    for setting in settings:
        setting.calibrator.check(has_base=study.has_base)
    _points(open_run(folder).sweeps(), sweeps, request)  # raises here if they would mix with others
    team.once(lambda: reopening.require_same_samples(opened.manifest, study))
    seeds = range(study.seed, study.seed + request.seeds)
    samples, tasks = _samples_by_seed(opened, seeds, context.access)
    for clean in samples[study.seed].values():
        for corruption in dict.fromkeys(setting.corruption for setting in settings):
            corrupted(clean, corruption, study.seed)  # raises here if it can't be
    study = dataclasses.replace(study, tasks=tasks)
    team.once(lambda: reopening.require_same_models(opened.manifest, study, context.reporter()))
    unsolved = dict[_Setting, DriftLensError]()
    with writing(team, functools.partial(RunWriter.resume, folder)) as writer:
        reporter = context.reporter(writer.progress)
        rows = team.once(lambda: open_run(folder).sweeps())
        points, outdated = _points(rows, sweeps, request)
        rows = rows[~rows["sweep"].isin(outdated)] if request.resume else rows[:0]
        (folder / layout.SCRATCH).mkdir(exist_ok=True)
        spill = folder / layout.SCRATCH / _PHASE
        scorer = HeldOutScorer(study, {task: data.diagnosis for task, data in tasks.items()})

        def sites(update: Collection[str]) -> Mapping[int, Sequence[str]]:
            return select_sites(study.pool.chain, sites=opened.plan.patterns or None, update=update)

        def visit(seed: int) -> None:
            missing = _missing(points, rows[rows["seed"] == seed], study)
            if not missing:
                return
            bar = Bar(reporter, len(missing))
            fitting = Fitting(study, sites, bar, _PHASE, spill, seed)
            for setting, result in _measured(scorer, missing, samples[seed], fitting, bar):
                if isinstance(result, DriftLensError):
                    unsolved.setdefault(setting, result)
                    continue
                if outdated:  # once: their rows go, and the others keep their exact values
                    writer.drop("sweeps", "sweep", outdated)
                    outdated.clear()
                writer.append("sweeps", _rows(setting, missing[setting], seed, *result), replace=True)

        with deterministic_algorithms(study.settings.deterministic):
            for seed in seeds:
                visit_seed = functools.partial(visit, seed)
                run_phase(writer, f"{_PHASE}:{seed}", visit_seed, study, again=True, sums=True)
    if unsolved:
        error = next(iter(unsolved.values()))
        raise type(error)(
            f"not measured, because they can't be solved for: {'; '.join(map(str, unsolved))}. "
            f"The first one: {error.message}",
            hint=f"All other points are in the run. {error.hint}",
            **error.context,
        )
    return open_run(folder)


def _open(
    folder: pathlib.Path, request: SweepRequest, context: Context
) -> tuple[OpenCalibration, list[_Setting]]:
    """The run opened with the most samples that a point needs, and the settings that sweeps vary around, by method."""
    count = request.samples
    section = None
    if context.live is None:
        reopening.require_spec(folder, open_run(folder).manifest)
        spec = load_spec(folder / layout.SPEC)
        section = spec.calibration
        count = count or min(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    largest = int(max(request.param.get("n", ()), default=0))
    requests = _asked(request, None if count is None else max(count, largest, 1))
    opened = open_calibration(folder, requests[0], context)
    fewest = min(map(len, opened.plan.samples.values()))
    if largest > fewest:  # of samples that were handed in as many were taken as calibrations take
        raise DataError(
            f"n is {largest}, but there are {fewest} calibration samples",
            hint="Hand in more, and set `samples`.",
        )
    starts = [calibrator_of(start, section, has_views=opened.study.has_views) for start in requests]
    return opened, [
        _Setting.of(method_called(start), start.get_params(), count or fewest) for start in starts
    ]


def _asked(request: SweepRequest, samples: int | None) -> list[CalibrationRequest]:
    """The calibrations that sweeps vary around, one a method."""
    around = {wanted.method: dict(wanted.settings) for wanted in wanted_methods(request.methods or ())}
    has_preset = [name for name in around if request.preset in calibrators[name].presets] or [*around]
    if not around:
        return [CalibrationRequest(name=_PHASE, preset=request.preset, samples=samples)]
    return [
        CalibrationRequest(
            name=_PHASE,
            method=name,
            preset=request.preset if name in has_preset else None,
            parameters=settings,
            samples=samples,
        )
        for name, settings in around.items()
    ]


def _require_own_samples(request: SweepRequest, study: Study) -> None:
    """Refuse what samples that were handed in can't do: be drawn anew, or serve calibration and measurement."""
    if request.seeds > 1:
        raise SpecError(
            f"a sweep of live modules can't draw its samples {request.seeds} times",
            hint="Leave `seeds` out, or hand in other samples as `data` and sweep again.",
        )
    for task, data in study.tasks.items():
        if data.calibration is None or data.calibration is data.diagnosis:
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


def _settings_by_sweep(request: SweepRequest, around: Sequence[_Setting]) -> dict[str, list[_Setting]]:
    """The settings to visit around others, by sweep, in the order of the values; none twice."""
    values = request.param
    groups = [tuple(values)] if request.grid and values else [(name,) for name in values]
    sweeps = {}
    for start in around:
        for names in groups:
            combinations = itertools.product(*(values[name] for name in names))
            settings = (start.changed(dict(zip(names, chosen, strict=True))) for chosen in combinations)
            sweeps[sweep_named("+".join(names), start.method)] = list(dict.fromkeys(settings))
        ablations = calibrators[start.method].ablations if request.ablate else ()
        if ablations:
            sweeps[sweep_named(ABLATION, start.method)] = [start, *map(start.changed, ablations)]
    if not any(sweeps.values()):
        raise SpecError(
            "a sweep needs something to vary",
            hint="For example --param lam=0.01,0.05,0.25, or --methods all.",
        )
    return sweeps


def _points(
    rows: pd.DataFrame, sweeps: Mapping[str, Sequence[_Setting]], request: SweepRequest
) -> tuple[dict[_Setting, list[_Point]], set[str]]:
    """Return the points of every setting, and the sweeps that make room for the first new row.

    A point that the run has keeps its number.
    """
    points: dict[_Setting, list[_Point]] = {}
    outdated = set[str]()
    for name, settings in sweeps.items():
        present = rows[rows["sweep"] == name].to_dict("records")
        numbers = {settings[0].stored(row): int(row["point"]) for row in present}
        # A sweep that replaced another and was stopped has no points but these.
        if request.replace and numbers and not (request.resume and numbers.keys() <= {*settings}):
            outdated.add(name)
            numbers = {}
        _require_same_rest(name, settings, numbers)
        following = itertools.count(max(numbers.values(), default=-1) + 1)
        for setting in settings:
            number = numbers[setting] if setting in numbers else next(following)
            points.setdefault(setting, []).append((name, number))
    return points, outdated


def _require_same_rest(sweep: str, settings: Sequence[_Setting], earlier: Collection[_Setting]) -> None:
    varied, values = sweep.rpartition(":")[2].split("+"), settings[0].values
    if varied == [ABLATION]:
        varied = [name for ablation in calibrators[settings[0].method].ablations for name in ablation]
    for name, value in values.items():
        before = [setting.values[name] for setting in earlier]
        if name not in varied and any(other != value for other in before):
            listed = ", ".join(dict.fromkeys(_written(other) for other in before))
            raise SpecError(
                f"the run has a sweep of {sweep} with {name} {listed}; now {name} is {_written(value)}",
                hint="Points of one curve share everything else; --replace takes the earlier ones out.",
            )


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _samples_by_seed(
    opened: OpenCalibration, seeds: Sequence[int], access: Access
) -> tuple[dict[int, dict[str, SampleSet]], dict[str, TaskSamples]]:
    """Return the calibration samples of every seed by task, and the tasks without what some seed calibrates on.

    A seed draws as many as the run's own, as the spec would with that seed. Diagnosis and test samples can only be
    among them where a task's splits draw from the same place.
    """
    first, architecture = opened.plan.samples, opened.models.architecture
    drawn_first = dict(first)
    if is_live(opened.manifest):
        drawn_first = {task: _as_drawn(samples, opened) for task, samples in first.items()}
    by_seed, tasks, sources = {seeds[0]: drawn_first}, dict(opened.study.tasks), {}
    for seed in seeds[1:]:
        spec = load_spec(opened.folder / layout.SPEC)
        drawn = reopening.redrawn(spec, {task: len(samples) for task, samples in first.items()}, seed)
        sources = {task: open_data(drawn, task, architecture, access=access) for task in first}
        by_seed[seed] = {
            task: with_own_answers(data.calibration, opened.study.pool) for task, data in sources.items()
        }
    for task, data in sources.items():
        used = {name for samples in by_seed.values() for name in samples[task].ids}
        diagnosis, test = tasks[task].diagnosis, tasks[task].test
        diagnosis = _without(diagnosis, used) if data.shares("diagnosis") else diagnosis
        test = _without(test, used) if data.shares("test") and test is not None else test
        if not len(diagnosis) or (test is not None and not len(test)):
            raise DataError(
                f"task {task}: over {len(seeds)} seeds every sample serves calibration, none is left to measure with",
                hint="Sweep with fewer seeds or fewer samples, or give calibration a split of its own.",
            )
        tasks[task] = dataclasses.replace(tasks[task], diagnosis=diagnosis, test=test)
    return by_seed, tasks


def _without(samples: SampleSet, ids: Collection[str]) -> SampleSet:
    """Return the samples whose ids are not among `ids`; the very same set where that is all of them."""
    positions = [position for position, sample in enumerate(samples.ids) if sample not in ids]
    return samples if len(positions) == len(samples) else part_of(samples, positions)


def _scored_tasks(study: Study) -> set[str]:
    """Return the tasks whose test samples are scored, too."""
    return {task for task, data in study.tasks.items() if data.test is not None and metrics_of(study, task)}


def _missing(
    points: Mapping[_Setting, Sequence[_Point]], rows: pd.DataFrame, study: Study
) -> dict[_Setting, list[_Point]]:
    """Return the points that lack a row of some task, or a score of one that is scored, by setting."""
    scored = _scored_tasks(study)

    def is_done(point: _Point) -> bool:
        found = rows[(rows["sweep"] == point[0]) & (rows["point"] == point[1])]
        has_score = found["task"][found[[*METRICS]].notna().any(axis=1)]
        return {*found["task"]} >= {*study.tasks} and {*has_score} >= scored

    missing = {setting: [point for point in at if not is_done(point)] for setting, at in points.items()}
    return {setting: at for setting, at in missing.items() if at}


def _rows(
    setting: _Setting, points: Sequence[_Point], seed: int, columns: Mapping[str, _Columns], seconds: float
) -> pd.DataFrame:
    """Return the rows of the sweep table of a setting at its points, one per task."""
    import pandas as pd

    shared = {name: value for name, value in setting.values.items() if name in SWEEPS.names}
    shared |= {"seed": seed, "seconds": seconds, **dataclasses.asdict(setting)}
    return pd.DataFrame(
        [
            {"sweep": sweep, "point": point, **shared, **of_task}
            for sweep, point in points
            for of_task in columns.values()
        ]
    )


def _measured(
    scorer: HeldOutScorer,
    settings: Collection[_Setting],
    drawn: Mapping[str, SampleSet],
    fitting: Fitting,
    bar: Bar,
) -> Iterator[tuple[_Setting, tuple[Mapping[str, _Columns], float] | DriftLensError]]:
    """Calibrate by every setting and yield what is measured by task and the seconds of the fit, or the error.

    Args:
        scorer: the models, and the samples on which drift is measured.
        settings: what to calibrate by; those that read the same samples follow each other.
        drawn: the most calibration samples that a setting reads, by task.
        fitting: makes the models; its seed is that of the corruption, too.
        bar: shows the progress of all settings.
    """
    by_samples = sorted(settings, key=lambda setting: setting.reads)
    for (corruption, n), group in itertools.groupby(by_samples, key=lambda setting: setting.reads):
        samples = {
            task: part_of(corrupted(clean, corruption, fitting.seed), range(n))
            for task, clean in drawn.items()
        }
        cache = fitting.cache()
        for setting in group:
            bar.begin(1, str(setting))
            work = functools.partial(_measured_by, scorer, setting, samples, cache, fitting)
            yield setting, attempt(work, scorer.study.team)
    bar.finish(_PHASE)


def _measured_by(
    scorer: HeldOutScorer,
    setting: _Setting,
    samples: Mapping[str, SampleSet],
    cache: ExpertFeatures,
    fitting: Fitting,
) -> tuple[dict[str, _Columns], float]:
    seconds = fitting.fit(setting.calibrator, samples, cache)
    return scorer.measured(LANE, functools.partial(_columns, scorer)), seconds


def _columns(scorer: HeldOutScorer, task: str, features: Tensor, expert: Tensor) -> _Columns:
    """Return drift and accuracy on one task of the model in the pool, as columns of the sweep table."""
    row: _Columns = {"task": task, **final_drift(features, expert)}
    if not scorer.without_head:
        row["kl"] = float(scorer.by_class(divergences, LANE, task, features, expert).cpu().numpy().mean())
    # This process alone has the task, whatever others do meanwhile.
    alone = dataclasses.replace(scorer.study, team=ALONE)
    scored = scores_of(alone, task, [LANE], Reporter())
    for score in scored.rows if scored is not None else ():
        name = score["metric"] if score["metric"] in METRICS else "accuracy"
        row |= {name: score["value"], "n_test": score["n"]}
    return row


_BESIDE = ("views", "shrink")
"""Settings of a calibration that a candidate may have in addition to those of its method."""


def wanted_methods(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[NamedMethod]:
    """Return calibrators with settings, under names that calibrations can have; see `named_methods`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    wanted = named_methods(asked, calibrators, calibrators.__getitem__, name_of, beside=_BESIDE)
    for method in wanted:
        _request_of(method)
    return wanted


def _request_of(candidate: NamedMethod, **more: Any) -> CalibrationRequest:
    """Return the calibration that a candidate asks for; raise a SpecError where there is no such calibration."""
    settings = dict(candidate.settings)
    beside: dict[str, Any] = {name: settings.pop(name) for name in _BESIDE if name in settings}
    return CalibrationRequest(
        name=candidate.name, method=candidate.method, parameters=settings, **beside, **more
    )


def compare_methods(
    run: PathLike, wanted: Sequence[NamedMethod], context: Context = Context(), *, samples: int | None = None
) -> dict[str, str]:
    """Calibrate a run by every method, on the same samples; finished calibrations stay as they are.

    Settings are those published for models of the run's kind, under a candidate's own. Where the spec's `calibration`
    section has settings of the same method, these take the place of the published ones.

    Args:
        run: the run, which gains a calibration per candidate.
        wanted: what to compare, see `wanted_methods`.
        context: where and how to run; an interrupted calibration is resumed.
        samples: calibration samples per task; None takes the spec's.

    Returns:
        By name, why a candidate could not be calibrated.
    """
    loader = str(open_run(run).manifest.architecture.get("loader"))
    section = None
    if context.live is None:
        reopening.require_spec(pathlib.Path(run), open_run(run).manifest)
        section = load_spec(pathlib.Path(run) / layout.SPEC).calibration

    def made(method: NamedMethod) -> DriftRun:
        kind = calibrators[method.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if section is not None and section.method == method.method and (section.preset or section.parameters):
            preset = None
        request = _request_of(method, preset=preset, samples=samples, resume=True, attribution=False)
        return calibrate(run, request, context)

    team = context.access.team
    try:
        results = {method.name: attempt(functools.partial(made, method), team) for method in wanted}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command resumes."
        raise
    require_any(results.values())
    return {name: result.message for name, result in results.items() if isinstance(result, DriftLensError)}
