"""How drift and accuracy depend on methods, settings and samples: many calibrations of one run, as a table."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from driftlens.pipelines.calibration_plan import (
    CalibrationPlan,
    calibrator_of,
    method_called,
)
from driftlens.pipelines.evaluation import final_drift, metrics_of, scores_of
from driftlens.pipelines.model_selection import (
    LANE,
    Bar,
    Candidate,
    Fitting,
    HeldOut,
    Judge,
    Outcome,
    candidates,
    require_any,
    try_each,
)
from driftlens.results.sweep_results import ABLATION, settings_of, sweep_named
from driftlens.runs import layout
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.run_state import is_live
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

Rows = Mapping[str, dict[str, Any]]
"""What is measured of one model, by task, as columns of the sweep table."""

PHASE = "sweep"


@dataclass(frozen=True)
class Setting:
    """One calibration: a method, all its settings as JSON, samples per task, how their pictures are corrupted."""

    method: str
    settings: str
    n: int
    corruption: str = CLEAN

    @classmethod
    def of(cls, method: str, settings: Mapping[str, Any], n: int, corruption: str = CLEAN) -> Setting:
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

    def changed(self, values: Mapping[str, Any]) -> Setting:
        """The setting with some values changed; raises as `of` does."""
        updated = self.values | dict(values)
        count, corruption = int(updated.pop("n")), updated.pop("corruption")
        return Setting.of(self.method, updated, count, corruption)

    def stored(self, row: Mapping[Any, Any]) -> Setting:
        """The setting of a row of the sweep table, around this one."""
        corruption = row["corruption"] if isinstance(row["corruption"], str) else CLEAN
        return self.changed(settings_of(row) | {"n": int(row["n"]), "corruption": corruption})

    def __str__(self) -> str:
        plain = Setting.of(self.method, {}, 0).values | {"n": self.n}
        named = [f" {name} {_written(value)}," for name, value in self.values.items() if value != plain[name]]
        return f"{self.method},{''.join(named)} {self.n} samples"


@dataclass(frozen=True)
class _Point:
    """A setting's place in a sweep; `sweep` names what is varied, several factors joined by `+`."""

    sweep: str
    point: int
    setting: Setting


def sweep(path: PathLike, request: SweepRequest, context: Context = Context()) -> DriftRun:
    """The run with the rows of its sweeps: final drift on the diagnosis samples, accuracy on the test samples.

    Every point is the calibration that `calibrate` would make of these settings; its weights are not kept. A setting
    that a sweep of the run has already is measured anew and keeps its number.
    """
    folder = pathlib.Path(path)
    for count in request.param.get("n", ()):
        if not isinstance(count, int | float) or count != int(count) or count < 1:
            raise SpecError(f"n is {count}, expected a whole number from 1 upwards")
    opened, around = _open(folder, request, context)
    if context.live is not None:
        _require_own_samples(request, opened.study)
    sweeps = _settings_of(request, around)
    settings = list(dict.fromkeys(itertools.chain(*sweeps.values())))
    for setting in settings:
        setting.calibrator.check(has_base=opened.study.has_base)
    _Table(open_run(folder).sweeps(), sweeps, request)  # refused here where they would mix with others
    team = opened.study.team
    team.once(lambda: reopening.require_same_samples(opened.manifest, opened.study))
    seeds = range(opened.study.seed, opened.study.seed + request.seeds)
    samples, tasks = _samples_by_seed(opened, seeds, context.access)
    corruptions = tuple(dict.fromkeys(setting.corruption for setting in settings))
    for clean in samples[opened.study.seed].values():
        for name in corruptions:
            corrupted(clean, name, opened.study.seed)  # refused here where it can't be
    study = dataclasses.replace(opened.study, tasks=tasks)
    team.once(lambda: reopening.require_same_models(opened.manifest, study, context.reporter()))
    unsolved = dict[Setting, DriftLensError]()
    with writing(team, functools.partial(RunWriter.resume, folder)) as writer:
        reporter = context.reporter(writer.progress)
        table = _Table(team.once(lambda: open_run(folder).sweeps()), sweeps, request)
        (folder / layout.SCRATCH).mkdir(exist_ok=True)
        visits = _Visits(study, opened.plan, request, reporter, folder / layout.SCRATCH / PHASE)
        with deterministic_algorithms(study.settings.deterministic):
            for seed, drawn in samples.items():
                rows = _SeedRows(writer, table, seed, tuple(tasks), visits.scored)
                visit = functools.partial(visits.visit, settings, drawn, seed, rows, unsolved)
                run_phase(writer, f"{PHASE}:{seed}", visit, study, again=True, sums=True)
    if unsolved:
        raise _incomplete(unsolved)
    return open_run(folder)


def _open(
    folder: pathlib.Path, request: SweepRequest, context: Context
) -> tuple[OpenCalibration, list[Setting]]:
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
    return opened, [Setting.of(method_called(start), start.get_params(), count or fewest) for start in starts]


def _asked(request: SweepRequest, samples: int | None) -> list[CalibrationRequest]:
    """The calibrations that sweeps vary around, one a method."""
    around = {wanted.method: dict(wanted.settings) for wanted in wanted_methods(request.methods or ())}
    has_preset = [name for name in around if request.preset in calibrators[name].presets] or [*around]
    if not around:
        return [CalibrationRequest(name=PHASE, preset=request.preset, samples=samples)]
    return [
        CalibrationRequest(
            name=PHASE,
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


def _measured(study: Study, model: str, task: str, features: Tensor, expert: Tensor) -> dict[str, Any]:
    """Drift and accuracy of one model on one task, as columns of the sweep table."""
    row = {"task": task, **final_drift(features, expert)}
    judge = Judge(study)
    if not judge.bare:
        row["kl"] = float(judge.divergence(model, task, features, expert).mean())
    # One process has the task, whatever others do meanwhile.
    alone = dataclasses.replace(study, team=ALONE)
    scored = scores_of(alone, task, [model], Reporter())
    for score in scored.rows if scored is not None else ():
        row |= {
            score["metric"] if score["metric"] in METRICS else "accuracy": score["value"],
            "n_test": score["n"],
        }
    return row


@dataclass(frozen=True)
class _Visits:
    """How the settings of a sweep are tried and measured; `plan` is what they vary around."""

    study: Study
    plan: CalibrationPlan
    request: SweepRequest
    reporter: Reporter
    spill: pathlib.Path

    @property
    def scored(self) -> tuple[str, ...]:
        """The tasks whose test samples are scored too."""
        tasks = self.study.tasks.items()
        return tuple(task for task, data in tasks if data.test is not None and metrics_of(self.study, task))

    def visit(
        self,
        settings: Sequence[Setting],
        drawn: Mapping[str, SampleSet],
        seed: int,
        rows: _SeedRows,
        unsolved: dict[Setting, DriftLensError],
    ) -> None:
        """Calibrate and measure with every setting that has no rows yet; those that can't be solved are added.

        Args:
            settings: all that are visited.
            drawn: the calibration samples of this seed.
            seed: of the draw.
            rows: the table's rows of this seed.
            unsolved: gains the error of every setting that can't be solved for.
        """
        missing = [setting for setting in settings if not rows.has(setting)]
        if not missing:
            return
        bar = Bar(self.reporter, len(missing))
        fitting = Fitting(self.study, self._sites, bar, PHASE, self.spill, seed)
        for (corruption, n), group in itertools.groupby(
            sorted(missing, key=lambda one: one.reads), key=lambda one: one.reads
        ):
            samples = {
                task: part_of(corrupted(clean, corruption, seed), range(n)) for task, clean in drawn.items()
            }
            attempt = functools.partial(self._attempt, fitting, bar, samples, fitting.cache())
            team = self.study.team
            for setting, outcome in try_each(group, attempt, write=rows.write, team=team):
                if outcome.error is not None:
                    unsolved.setdefault(setting, outcome.error)
        bar.finish(PHASE)

    def _attempt(
        self,
        fitting: Fitting,
        bar: Bar,
        samples: Mapping[str, SampleSet],
        cache: ExpertFeatures,
        setting: Setting,
    ) -> Outcome[Rows]:
        bar.begin(1, str(setting))
        seconds = fitting.fit(setting.calibrator, samples, cache)
        return Outcome(self._held_out.of(LANE), seconds)

    @cached_property
    def _held_out(self) -> HeldOut[dict[str, Any]]:
        measure = functools.partial(_measured, self.study)
        return HeldOut(self.study, {task: data.diagnosis for task, data in self.study.tasks.items()}, measure)

    def _sites(self, update: Collection[str]) -> Mapping[int, Sequence[str]]:
        chain = self.study.pool.chain
        return select_sites(chain, sites=self.plan.patterns or None, update=update)


class _Table:
    """The settings to visit as points beside the rows that the run has.

    A point that the run has keeps its number; sweeps that are `outdated` make room for the first new row.
    """

    def __init__(
        self, rows: pd.DataFrame, sweeps: Mapping[str, Sequence[Setting]], request: SweepRequest
    ) -> None:
        self.points: list[_Point] = []
        self.outdated: set[str] = set()
        for name, settings in sweeps.items():
            present = rows[rows["sweep"] == name].to_dict("records")
            numbers = {settings[0].stored(row): int(row["point"]) for row in present}
            # A sweep that took another's place and was stopped has no points but these.
            if request.replace and numbers and not (request.resume and numbers.keys() <= {*settings}):
                self.outdated.add(name)
                numbers = {}
            _require_same_rest(name, settings, numbers)
            following = itertools.count(max(numbers.values(), default=-1) + 1)
            self.points += [
                _Point(name, numbers[setting] if setting in numbers else next(following), setting)
                for setting in settings
            ]
        self.rows = rows[~rows["sweep"].isin(self.outdated)] if request.resume else rows[:0]


@dataclass(frozen=True)
class _SeedRows:
    """The run's sweep table for one seed: a setting is finished where all its points have their rows."""

    writer: RunWriter
    table: _Table
    seed: int
    tasks: tuple[str, ...]
    scored: tuple[str, ...]

    def has(self, setting: Setting) -> bool:
        """Return True if the run has all rows of a setting."""
        return not self._missing(setting)

    def write(self, setting: Setting, outcome: Outcome[Rows]) -> None:
        """Write the rows of a setting."""
        import pandas as pd

        assert outcome.value is not None
        if self.table.outdated:  # once: their rows go, and the others keep their exact values
            self.writer.drop("sweeps", "sweep", self.table.outdated)
            self.table.outdated.clear()
        columns = {name: value for name, value in setting.values.items() if name in SWEEPS.names}
        columns |= {"seed": self.seed, "seconds": outcome.seconds, **dataclasses.asdict(setting)}
        rows = [
            {"sweep": point.sweep, "point": point.point, **columns, **row}
            for point in self._missing(setting)
            for row in outcome.value.values()
        ]
        self.writer.append("sweeps", pd.DataFrame(rows), replace=True)

    def _missing(self, setting: Setting) -> list[_Point]:
        return [point for point in self.table.points if point.setting == setting and not self._is_done(point)]

    def _is_done(self, point: _Point) -> bool:
        """Whether the run has a point's rows for all tasks, with a score for those that are scored."""
        rows = self.table.rows
        rows = rows[(rows["sweep"] == point.sweep) & (rows["point"] == point.point)]
        rows = rows[rows["seed"] == self.seed]
        has_score = set(rows["task"][rows[[*METRICS]].notna().any(axis=1)])
        return set(rows["task"]) >= set(self.tasks) and has_score >= set(self.scored)


def _incomplete(unsolved: Mapping[Setting, DriftLensError]) -> DriftLensError:
    """Names the settings that could not be measured; every other point is in the run."""
    error = next(iter(unsolved.values()))
    return type(error)(
        f"not measured, because they can't be solved for: {'; '.join(map(str, unsolved))}. "
        f"The first one: {error.message}",
        hint=f"All other points are in the run. {error.hint}",
        **error.context,
    )


def _settings_of(request: SweepRequest, around: Sequence[Setting]) -> dict[str, list[Setting]]:
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


def _require_same_rest(sweep: str, settings: Sequence[Setting], earlier: Collection[Setting]) -> None:
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
    """The calibration samples of every seed by task, and the tasks without what some seed calibrates on.

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
    """The samples whose ids are not among `ids`; the very same set where that is all of them."""
    positions = [position for position, sample in enumerate(samples.ids) if sample not in ids]
    return samples if len(positions) == len(samples) else part_of(samples, positions)


BESIDE = ("views", "shrink")
"""Settings of a calibration that a candidate may have in addition to those of its method."""


def wanted_methods(asked: Sequence[tuple[str, Mapping[str, object]]]) -> list[Candidate]:
    """Return candidates by method and settings, under names that calibrations can have; as `candidates`."""

    def name_of(method: str, settings: Mapping[str, object]) -> str:
        parts = [method, *(f"{key}-{value}" for key, value in settings.items())]
        return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")

    wanted = candidates(asked, calibrators, calibrators.__getitem__, name_of, beside=BESIDE)
    for candidate in wanted:
        request_of(candidate)
    return wanted


def request_of(candidate: Candidate, **more: Any) -> CalibrationRequest:
    """Return the calibration that a candidate asks for; raise a SpecError where there is no such calibration."""
    settings = dict(candidate.settings)
    beside: dict[str, Any] = {name: settings.pop(name) for name in BESIDE if name in settings}
    return CalibrationRequest(
        name=candidate.name, method=candidate.method, parameters=settings, **beside, **more
    )


def compare_methods(
    run: PathLike, wanted: Sequence[Candidate], context: Context = Context(), *, samples: int | None = None
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

    def attempt(candidate: Candidate) -> Outcome[None]:
        kind = calibrators[candidate.method]
        preset = kind.suited.get(loader, next(iter(kind.presets), None))
        if (
            section is not None
            and section.method == candidate.method
            and (section.preset or section.parameters)
        ):
            preset = None
        request = request_of(candidate, preset=preset, samples=samples, resume=True, attribution=False)
        calibrate(run, request, context)
        return Outcome()

    try:
        results = try_each(wanted, attempt, team=context.access.team)
        outcomes = {candidate.name: outcome for candidate, outcome in results}
    except Cancelled as error:
        error.hint = "What was finished is kept; the same command resumes."
        raise
    require_any(outcomes.values())
    return {name: outcome.error.message for name, outcome in outcomes.items() if outcome.error is not None}
