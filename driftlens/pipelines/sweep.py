"""Sweeps: many calibrations of one run over methods, settings and samples, measured as rows of one table.

Entry points: `sweep` for settings; `resolve_calibrators`, then `compare_methods`, for methods.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.config.renamed import with_current_names
from driftlens.config.requests import CalibrationRequest, SweepRequest
from driftlens.data.altered import CLEAN, corrupt_samples, format_corruption
from driftlens.data.samples import SampleSet, random_order, select_samples
from driftlens.engine.sites import ExpertFeatureCache, select_sites
from driftlens.experiment.study import Study, TaskSamples
from driftlens.experiment.study_loading import open_data, with_expert_answers
from driftlens.pipelines.analyze import (
    load_run_spec,
    open_finished_run,
    require_same_inputs,
    run_phase,
    with_sample_counts,
)
from driftlens.pipelines.calibrate import PreparedCalibration, calibrate, prepare_calibration
from driftlens.pipelines.calibration_plan import registered_method, resolve_calibrator
from driftlens.pipelines.evaluation import final_drift_columns, score_variants
from driftlens.pipelines.model_selection import (
    CANDIDATE_MODEL,
    CandidateFitter,
    CombinedProgress,
    HeldOutScorer,
    NamedMethod,
    expand_methods,
    kl_divergences,
    require_one_result,
    result_or_error,
    settings_for_name,
)
from driftlens.results.sweep_results import one_factor_sweep_name, sweep_row_settings
from driftlens.runs.manifest import SCRATCH
from driftlens.runs.run import DriftRun, has_live_modules, open_run
from driftlens.runs.schema import SWEEPS
from driftlens.utils.distributed import JobContext, Permissions, ProgressReporter
from driftlens.utils.errors import Cancelled, DataError, DriftLensError, SpecError
from driftlens.utils.files import PathLike
from driftlens.utils.registry import resolve_settings
from driftlens.utils.variants import METRICS

if TYPE_CHECKING:
    import pandas as pd

_PHASE = "sweep"


@dataclass(frozen=True)
class _SweepSetting:
    """One calibration of a sweep: method, settings as JSON, samples per task, image corruption."""

    method: str
    settings: str
    n: int
    corruption: str = CLEAN

    @classmethod
    def from_settings(cls, method: str, settings: Mapping[str, Any], n: int, corruption: str = CLEAN) -> _SweepSetting:
        resolved = resolve_settings(calibrators[method], settings, method)
        return cls(method, json.dumps(resolved), n, format_corruption(corruption))

    @property
    def values(self) -> dict[str, Any]:
        """All settings, with sample count and corruption, by name."""
        return {**json.loads(self.settings), "n": self.n, "corruption": self.corruption}

    @property
    def calibrator(self) -> Calibrator:
        return calibrators[self.method](**json.loads(self.settings))

    def with_values(self, values: Mapping[str, Any]) -> _SweepSetting:
        """Return a copy with some values changed; raises as `from_settings` does."""
        updated = self.values | dict(values)
        count, corruption = int(updated.pop("n")), updated.pop("corruption")
        return _SweepSetting.from_settings(self.method, updated, count, corruption)

    def with_row_values(self, row: Mapping[Any, Any]) -> _SweepSetting:
        """Return the setting that a row of the sweep table describes; missing values are kept."""
        corruption = row["corruption"] if isinstance(row["corruption"], str) else CLEAN
        return self.with_values(sweep_row_settings(row) | {"n": int(row["n"]), "corruption": corruption})

    def __str__(self) -> str:
        defaults = _SweepSetting.from_settings(self.method, {}, 0).values | {"n": self.n}
        named = [f" {name} {_format_value(value)}," for name, value in self.values.items() if value != defaults[name]]
        return f"{self.method},{''.join(named)} {self.n} samples"


# Name of a sweep, with several factors joined by `+`, and the number of a setting in it.
_Point = tuple[str, int]


def sweep(path: PathLike, request: SweepRequest, context: JobContext = JobContext()) -> DriftRun:
    """Calibrate with varied settings and add final drift and accuracy of each to a run.

    Each point is the calibration that `calibrate` makes of its settings; the weights are not kept. A setting that a
    sweep of the run already has is measured again and keeps its number.

    Args:
        path: the run directory.
        request: the values to vary.
        context: device, progress and cancellation.
    """
    folder = pathlib.Path(path)
    for count in request.param.get("n", ()):
        if not isinstance(count, int | float) or count != int(count) or count < 1:
            raise SpecError(f"n is {count}, expected a whole number from 1 upwards")
    opened, starts = _open_run_to_sweep(folder, request, context)
    study, team = opened.study, opened.study.team
    if context.live is not None:
        _require_separate_samples(request, study)
    sweeps = _settings_by_sweep(request, starts)
    settings = list(dict.fromkeys(itertools.chain(*sweeps.values())))
    for setting in settings:
        setting.calibrator.check(has_base=study.has_base)
    # Refuse what can't be measured before the lock is taken: a finished run must not become a failed one.
    outdated = {*sweeps} if request.replace and not request.resume else set[str]()
    _points_by_setting(open_run(folder).sweeps(), sweeps, outdated)
    seeds = range(study.seed, study.seed + request.seeds)
    samples, tasks = _samples_by_seed(opened, seeds, context.access)
    for clean in samples[study.seed].values():
        for corruption in dict.fromkeys(setting.corruption for setting in settings):
            corrupt_samples(clean, corruption, study.seed)
    require_same_inputs(opened.manifest, study, context.reporter())
    study = dataclasses.replace(study, tasks=tasks)
    unsolved = dict[_SweepSetting, DriftLensError]()
    with open_finished_run(folder, study, context) as (writer, reporter):
        rows = team.run_on_main(lambda: open_run(folder).sweeps())
        # Again under the lock: another process may have written points meanwhile.
        points = _points_by_setting(rows, sweeps, outdated)
        rows = rows if request.resume else rows[:0]
        (folder / SCRATCH).mkdir(exist_ok=True)
        spill = folder / SCRATCH / _PHASE
        scorer = HeldOutScorer(study, {task: data.diagnosis for task, data in tasks.items()})

        def _selected_sites(update: Collection[str]) -> Mapping[int, Sequence[str]]:
            return select_sites(study.pool.chain, sites=opened.plan.patterns or None, update=update)

        def _measure_seed(seed: int) -> None:
            missing = _missing_points(points, rows[rows["seed"] == seed], study)
            progress = CombinedProgress(reporter, len(missing))
            fitter = CandidateFitter(study, _selected_sites, progress, _PHASE, spill, seed)
            # Settings that read the same samples follow each other and share the experts' features.
            for (corruption, n), group in itertools.groupby(
                sorted(missing, key=_sample_group_key), key=_sample_group_key
            ):
                drawn = {
                    task: select_samples(corrupt_samples(clean, corruption, seed), range(n))
                    for task, clean in samples[seed].items()
                }
                cache = fitter.feature_cache()
                for setting in group:
                    progress.begin_part(1, str(setting))
                    work = functools.partial(_fit_and_measure, scorer, fitter, setting.calibrator, drawn, cache)
                    result = result_or_error(work, team)
                    if isinstance(result, DriftLensError):
                        unsolved.setdefault(setting, result)
                        continue
                    # Only now, when there is something to replace them.
                    if outdated:
                        writer.drop("sweeps", "sweep", outdated)
                        outdated.clear()
                    writer.append("sweeps", _sweep_rows(setting, missing[setting], seed, *result), replace=True)
            if missing:
                progress.finish(_PHASE)

        for seed in seeds:
            work = functools.partial(_measure_seed, seed)
            run_phase(writer, f"{_PHASE}:{seed}", work, study, again=True, sums=True)
    if unsolved:
        error = next(iter(unsolved.values()))
        raise type(error)(
            f"{len(unsolved)} settings have no solution: {'; '.join(map(str, unsolved))}. "
            f"The first one: {error.message}",
            hint=f"All other points are in the run. {error.hint}",
            **error.context,
        )
    return open_run(folder)


def _open_run_to_sweep(
    folder: pathlib.Path, request: SweepRequest, context: JobContext
) -> tuple[PreparedCalibration, list[_SweepSetting]]:
    """Open the run with enough samples for all points; return it and the start setting of each method."""
    count = request.samples
    section = None
    if context.live is None:
        spec = load_run_spec(folder)
        section = spec.calibration
        count = count or min(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    largest = int(max(request.param.get("n", ()), default=0))
    requests = _starting_requests(request, None if count is None else max(count, largest, 1))
    # All points share the samples, so that only a single method has the views of its preset.
    first = requests[0] if len(requests) == 1 else requests[0].with_changes(preset=None)
    opened = prepare_calibration(folder, first, context)
    fewest = min(map(len, opened.plan.samples.values()))
    # Of in-memory samples, a run keeps as many as `samples` says.
    if largest > fewest:
        raise DataError(
            f"n is {largest}, but there are {fewest} calibration samples",
            hint="Pass more samples and set `samples`.",
        )
    starts = [resolve_calibrator(start, section, has_views=opened.study.has_views) for start in requests]
    return opened, [
        _SweepSetting.from_settings(registered_method(start), start.get_params(), count or fewest) for start in starts
    ]


def _starting_requests(request: SweepRequest, samples: int | None) -> list[CalibrationRequest]:
    starts = {method.method: dict(method.settings) for method in resolve_calibrators(request.methods or ())}
    # A preset belongs to one method; if no method has it, all get it, and the error names them.
    has_preset = [name for name in starts if request.preset in calibrators[name].presets] or [*starts]
    if not starts:
        return [CalibrationRequest(name=_PHASE, preset=request.preset, samples=samples)]
    return [
        CalibrationRequest(
            name=_PHASE,
            method=name,
            preset=request.preset if name in has_preset else None,
            parameters=settings,
            samples=samples,
        )
        for name, settings in starts.items()
    ]


def _require_separate_samples(request: SweepRequest, study: Study) -> None:
    """Refuse in-memory samples that would be resampled, or used for calibration and measurement."""
    if request.seeds > 1:
        raise SpecError(
            f"a sweep of live modules can't draw samples for {request.seeds} seeds",
            hint="Leave `seeds` out, or pass other samples as `data` and sweep again.",
        )
    for task, data in study.tasks.items():
        if data.calibration is None or data.calibration is data.diagnosis:
            raise SpecError(
                f"task {task} has only diagnosis samples: settings chosen on them would overfit",
                hint="Pass samples to calibrate on: dl.sweep(run, param=..., data={task: SAMPLES}).",
            )


def _settings_by_sweep(request: SweepRequest, starts: Sequence[_SweepSetting]) -> dict[str, list[_SweepSetting]]:
    """Return the settings to measure, by sweep, in the order of their values, without duplicates."""
    values = request.param
    groups = [tuple(values)] if request.grid and values else [(name,) for name in values]
    sweeps = {}
    for start in starts:
        for names in groups:
            combinations = itertools.product(*(values[name] for name in names))
            settings = (start.with_values(dict(zip(names, chosen, strict=True))) for chosen in combinations)
            sweeps[one_factor_sweep_name("+".join(names), start.method)] = list(dict.fromkeys(settings))
    if not any(sweeps.values()):
        raise SpecError(
            "a sweep needs something to vary",
            hint="For example: --param lam=0.01,0.05,0.25, or --methods all.",
        )
    return sweeps


def _points_by_setting(
    rows: pd.DataFrame, sweeps: Mapping[str, Sequence[_SweepSetting]], outdated: Collection[str]
) -> dict[_SweepSetting, list[_Point]]:
    """Return the numbered points of every setting; stored points keep their numbers."""
    points: dict[_SweepSetting, list[_Point]] = {}
    for name, settings in sweeps.items():
        present = rows[rows["sweep"] == name].to_dict("records") if name not in outdated else []
        numbers = {settings[0].with_row_values(row): int(row["point"]) for row in present}
        _require_same_fixed_settings(name, settings, numbers)
        following = itertools.count(max(numbers.values(), default=-1) + 1)
        for setting in settings:
            number = numbers[setting] if setting in numbers else next(following)
            points.setdefault(setting, []).append((name, number))
    return points


def _require_same_fixed_settings(
    sweep: str, settings: Sequence[_SweepSetting], earlier: Collection[_SweepSetting]
) -> None:
    varied, values = sweep.rpartition(":")[2].split("+"), settings[0].values
    for name, value in values.items():
        before = [setting.values[name] for setting in earlier]
        if name not in varied and any(other != value for other in before):
            listed = ", ".join(dict.fromkeys(_format_value(other) for other in before))
            raise SpecError(
                f"the run has a sweep of {sweep} with {name} {listed}; now {name} is {_format_value(value)}",
                hint="Other settings of a curve must be equal. Replace earlier points with --replace.",
            )


def _sample_group_key(setting: _SweepSetting) -> tuple[str, int]:
    return setting.corruption, setting.n


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _samples_by_seed(
    opened: PreparedCalibration, seeds: Sequence[int], access: Permissions
) -> tuple[dict[int, dict[str, SampleSet]], dict[str, TaskSamples]]:
    """Return calibration samples by seed and task, and the tasks without all samples used by any seed."""
    planned, architecture = dict(opened.plan.samples), opened.models.architecture
    for task, samples in planned.items() if has_live_modules(opened.manifest) else ():
        # The first n of in-memory samples are drawn like those of a file; all of them keep their order.
        if samples.ids == tuple(map(str, range(len(samples)))):
            order = random_order(len(samples), opened.study.seed, task=task, split="calibration")
            planned[task] = select_samples(samples, order)
    by_seed, tasks, sources = {seeds[0]: planned}, dict(opened.study.tasks), {}
    for seed in seeds[1:]:
        spec = load_run_spec(opened.folder)
        drawn = with_sample_counts(spec, {task: len(samples) for task, samples in planned.items()}, seed)
        sources = {task: open_data(drawn, task, architecture, access=access) for task in planned}
        by_seed[seed] = {
            task: with_expert_answers(data.calibration, opened.study.pool) for task, data in sources.items()
        }
    for task, data in sources.items():
        # Only where splits share a source can the calibration samples of a seed be among the others.
        used = {name for samples in by_seed.values() for name in samples[task].ids}
        diagnosis, test = tasks[task].diagnosis, tasks[task].test
        diagnosis = _exclude_samples(diagnosis, used) if data.has_shared_source("diagnosis") else diagnosis
        test = _exclude_samples(test, used) if data.has_shared_source("test") and test is not None else test
        if not len(diagnosis) or (test is not None and not len(test)):
            raise DataError(
                f"task {task}: {len(seeds)} seeds use every sample for calibration; none is left to measure with",
                hint="Use fewer seeds or samples, or a separate calibration split.",
            )
        tasks[task] = dataclasses.replace(tasks[task], diagnosis=diagnosis, test=test)
    return by_seed, tasks


def _exclude_samples(samples: SampleSet, ids: Collection[str]) -> SampleSet:
    positions = [position for position, sample in enumerate(samples.ids) if sample not in ids]
    return samples if len(positions) == len(samples) else select_samples(samples, positions)


def _missing_points(
    points: Mapping[_SweepSetting, Sequence[_Point]], rows: pd.DataFrame, study: Study
) -> dict[_SweepSetting, list[_Point]]:
    """Return, by setting, the points that lack a row for some task."""
    present = {*zip(rows["sweep"], rows["point"], rows["task"], strict=True)}
    missing = {
        setting: [point for point in named if any((*point, task) not in present for task in study.tasks)]
        for setting, named in points.items()
    }
    return {setting: named for setting, named in missing.items() if named}


def _sweep_rows(
    setting: _SweepSetting,
    points: Sequence[_Point],
    seed: int,
    columns: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> pd.DataFrame:
    """Return a setting's rows of the sweep table, one per point and task."""
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


def _fit_and_measure(
    scorer: HeldOutScorer,
    fitter: CandidateFitter,
    calibrator: Calibrator,
    samples: Mapping[str, SampleSet],
    cache: ExpertFeatureCache,
) -> tuple[dict[str, dict[str, Any]], float]:
    seconds = fitter.fit(calibrator, samples, cache)
    return scorer.map_final_features(CANDIDATE_MODEL, functools.partial(_task_result_columns, scorer)), seconds


def _task_result_columns(scorer: HeldOutScorer, task: str, features: Tensor, expert: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task, **final_drift_columns(features, expert)}
    if not scorer.tasks_without_head:
        row["kl"] = float(
            scorer.class_distances(kl_divergences, CANDIDATE_MODEL, task, features, expert).cpu().numpy().mean()
        )
    for score in score_variants(scorer.study, task, [CANDIDATE_MODEL], ProgressReporter()).tables["accuracy"]:
        name = score["metric"] if score["metric"] in METRICS else "accuracy"
        row |= {name: score["value"], "n_test": score["n"]}
    return row


# Settings of a calibration that a compared method may have in addition to its own.
_SHARED_SETTINGS = ("views", "interpolate")


def resolve_calibrators(requested: Sequence[tuple[str, Mapping[str, object]]]) -> list[NamedMethod]:
    """Parse requested calibrators with settings and give each a valid calibration name."""

    def _named_calibrator(method: str, settings: Mapping[str, object]) -> NamedMethod:
        settings = with_current_names(settings)
        own = {key: value for key, value in settings.items() if key not in _SHARED_SETTINGS}
        resolved = {**settings, **resolve_settings(calibrators[method], own, method)}
        parts = [method, *(f"{key}-{value}" for key, value in settings_for_name(settings, resolved).items())]
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-")
        candidate = NamedMethod(name, method, settings)
        _calibration_request(candidate)
        return candidate

    return expand_methods(requested, calibrators, _named_calibrator)


def _calibration_request(candidate: NamedMethod, **more: Any) -> CalibrationRequest:
    """Return the request for a compared method; raise a SpecError if its settings are invalid."""
    settings = dict(candidate.settings)
    shared: dict[str, Any] = {name: settings.pop(name) for name in _SHARED_SETTINGS if name in settings}
    return CalibrationRequest(name=candidate.name, method=candidate.method, parameters=settings, **shared, **more)


def compare_methods(
    run: PathLike,
    methods: Sequence[NamedMethod],
    context: JobContext = JobContext(),
    *,
    samples: int | None = None,
) -> dict[str, str]:
    """Calibrate a run by every method on the same samples; finished calibrations are kept.

    A method's own settings override the spec's `calibration` section for the same method, or else the preset for models
    of the run's kind.

    Args:
        run: gains one calibration per method.
        methods: see `resolve_calibrators`.
        context: an interrupted calibration is resumed.
        samples: calibration samples per task; None takes the spec's.

    Returns:
        The error messages of methods that failed, by name.
    """
    kinds = open_run(run).manifest.model_kinds
    section = None
    if context.live is None:
        section = load_run_spec(pathlib.Path(run)).calibration

    def _calibrate_by_method(method: NamedMethod) -> DriftRun:
        preset = calibrators[method.method].preset_for(kinds)
        if section is not None and section.method == method.method and (section.preset or section.parameters):
            preset = None
        request = _calibration_request(method, preset=preset, samples=samples, resume=True, attribution=False)
        return calibrate(run, request, context)

    team = context.access.team
    try:
        results = {
            method.name: result_or_error(functools.partial(_calibrate_by_method, method), team) for method in methods
        }
    except Cancelled as error:
        error.hint = "Finished calibrations are kept; the same command resumes."
        raise
    require_one_result(results.values())
    return {name: result.message for name, result in results.items() if isinstance(result, DriftLensError)}
