"""How drift and accuracy depend on the settings of a calibration: many calibrations of one run, as a table."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlens.access import Access
from driftlens.calibration.calibrator import Calibrator, closed_form
from driftlens.data.samples import SampleSet
from driftlens.engine.forward_order import Lane
from driftlens.errors import SingularGramError, SpecError
from driftlens.files import PathLike
from driftlens.pipeline.analyze.evaluation import FinalDrift, accuracy_rows
from driftlens.pipeline.analyze.phases import all_of, deterministic_algorithms, suitable_threads
from driftlens.pipeline.calibrate.job import OpenCalibration, open_calibration
from driftlens.pipeline.calibrate.request import CalibrationRequest
from driftlens.pipeline.search.sweep_points import (
    FACTORS,
    Setting,
    SweepPoint,
    is_there,
    numbered,
    require_factors,
    samples_by_seed,
    settings_of,
)
from driftlens.pipeline.search.trials import Trials, part_of, with_settings
from driftlens.pipeline.study.reopening import require_same_models, require_same_samples
from driftlens.pipeline.study.study import Study
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records import layout
from driftlens.records.run import DriftRun, open_run
from driftlens.records.schema import SWEEPS
from driftlens.records.tables import append_rows
from driftlens.records.writer import RunWriter
from driftlens.spec import load_spec

if TYPE_CHECKING:
    import pandas as pd


PHASE = "sweep"


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


def sweep(
    path: PathLike,
    request: SweepRequest,
    *,
    resume: bool = False,
    replace: bool = False,
    access: Access = Access(),
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
        on_progress: called with every `ProgressEvent`.
        cancel: asked once per batch whether to stop; finished points stay.

    Raises:
        SpecError: an unknown factor, a value out of its range, or a sweep that would mix with another one's points.
        DataError: a task has fewer samples than asked for.
        SingularGramError: some settings can't be solved for; all others were measured.
        DriftLensError: see the tree in `driftlens.errors`.
    """
    folder = pathlib.Path(path)
    require_factors(request.values)
    if request.seeds < 1:
        raise SpecError(f"seeds is {request.seeds}, expected a whole number from 1 upwards")
    opened, around = _open(folder, request, access=access)
    sweeps = settings_of(request.values, around, grid=request.grid)
    for setting in {setting for settings in sweeps.values() for setting in settings}:
        with_settings(opened.plan.calibrator, setting.hyperparameters).check(has_base=opened.study.has_base)
    rows = open_run(folder).sweeps()
    numbered(sweeps, rows[~rows["sweep"].isin(sweeps)] if replace else rows)
    require_same_samples(opened.manifest, opened.study)
    spec = load_spec(folder / layout.SPEC)
    seeds = range(opened.study.seed, opened.study.seed + request.seeds)
    first = opened.plan.samples
    samples, tasks = samples_by_seed(spec, opened.models, opened.study, first, seeds, access=access)
    study = dataclasses.replace(opened.study, tasks=tasks)
    require_same_models(opened.manifest, study, Reporter(on_progress, cancel))
    with RunWriter.resume(folder) as writer:
        rows = open_run(folder).sweeps()
        outdated = rows["sweep"].isin(sweeps) & replace
        trials = Trials(
            study,
            opened.plan.sites,
            {task: at.diagnosis for task, at in tasks.items()},
            functools.partial(_measured, study, accuracy=request.accuracy),
            Reporter(all_of(writer.progress, on_progress), cancel),
            PHASE,
            folder / layout.SCRATCH / PHASE,
        )
        job = _Job(
            writer,
            trials,
            opened.plan.calibrator,
            numbered(sweeps, rows[~outdated]),
            _scored(study) if request.accuracy else [],
            rows[~outdated] if resume else rows[:0],
            set(rows["sweep"][outdated]),
        )
        with deterministic_algorithms(study.settings.deterministic):
            for seed, drawn in samples.items():
                phase = f"{PHASE}:{seed}"
                with writer.phase(phase), suitable_threads(writer, phase, study):
                    job.run(seed, drawn)
    job.require_all()
    return open_run(folder)


def _open(folder: pathlib.Path, request: SweepRequest, **options: Any) -> tuple[OpenCalibration, Setting]:
    """The run opened with the most samples that a point needs, and the setting that sweeps vary around."""
    spec = load_spec(folder / layout.SPEC)
    fewest = min(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)
    count = request.samples or fewest
    most = max(count, *map(int, request.values.get("n", ())), 1)
    asked = CalibrationRequest(PHASE, method=request.method, preset=request.preset, samples=most)
    opened = open_calibration(folder, asked, **options)
    settings = opened.plan.calibrator.get_params() | {"n": count}
    missing = [name for name in FACTORS if name not in settings]
    if missing:
        raise SpecError(f"{opened.plan.method} has no {', '.join(missing)} to sweep")
    return opened, Setting.of(settings)


def _scored(study: Study) -> list[str]:
    return [task for task, at in study.tasks.items() if at.test is not None and at.head is not None]


def _measured(
    study: Study, model: str, task: str, found: Tensor, expert: Tensor, *, accuracy: bool
) -> dict[str, Any]:
    """Drift and accuracy of one model on one task, as columns of the sweep table."""
    row = {"task": task, **dataclasses.asdict(FinalDrift.between(found, expert))}
    for score in accuracy_rows(study, task, [model], Reporter()) if accuracy else ():
        row |= {"accuracy": score["value"], "n_test": score["n"]}
    return row


@dataclass(frozen=True)
class _Job:
    """The points of all sweeps, and those of them that are there already.

    Attributes:
        writer: of the run.
        trials: which give rows without their settings.
        start: the calibrator whose settings are varied.
        points: of all sweeps.
        scored: tasks whose accuracy is wanted.
        kept: rows of points that need not be measured again.
        outdated: sweeps whose rows go when the first new ones come.
        unsolved: settings that can't be solved for, and why.
    """

    writer: RunWriter
    trials: Trials[dict[str, Any]]
    start: Calibrator
    points: Sequence[SweepPoint]
    scored: Sequence[str]
    kept: pd.DataFrame
    outdated: set[str]
    unsolved: dict[Setting, SingularGramError] = field(default_factory=dict)

    def run(self, seed: int, samples: Mapping[str, SampleSet]) -> None:
        """Measure what is missing of one seed; the rows of every setting are written as soon as they are known."""
        missing = [p for p in self.points if not is_there(p, seed, samples, self.scored, self.kept)]
        settings = list(dict.fromkeys(point.setting for point in missing))
        if not settings:
            return
        cuts = sorted({setting.n for setting in settings})
        parts = {
            task: [part_of(drawn, range(low, high)) for low, high in zip([0, *cuts], cuts, strict=False)]
            for task, drawn in samples.items()
        }
        lanes = [
            Lane(
                closed_form(with_settings(self.start, setting.hyperparameters)),
                frozenset(range(cuts.index(setting.n) + 1)),
            )
            for setting in settings
        ]
        (self.writer.folder / layout.SCRATCH).mkdir(exist_ok=True)
        for setting, tried in zip(settings, self.trials.run(parts, lanes), strict=True):
            if tried.error is not None:
                self.unsolved.setdefault(setting, tried.error)
                continue
            known = {"seed": seed, "seconds": tried.seconds, **dataclasses.asdict(setting)}
            self._write(
                [
                    {"sweep": point.sweep, "point": point.point, **known, **row}
                    for point in missing
                    if point.setting == setting
                    for row in tried.by_task.values()
                ]
            )

    def require_all(self) -> None:
        """Complain of what could not be measured.

        Raises:
            SingularGramError: names the settings; every other point is in the run.
        """
        if not self.unsolved:
            return
        named = "; ".join(
            f"lam {setting.lam:g}, rho {setting.rho:g}, alpha {setting.alpha:g}, {setting.n} samples"
            for setting in self.unsolved
        )
        error = next(iter(self.unsolved.values()))
        raise SingularGramError(
            f"not measured, because they can't be solved for: {named}. The first one: {error.message}",
            hint=f"All other points are in the run. {error.hint}",
            **error.context,
        )

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas as pd

        if self.outdated:  # the others keep their exact values
            there = open_run(self.writer.folder).sweeps()
            with self.writer.file(layout.table_file(SWEEPS.name)) as file:
                append_rows(file, SWEEPS, there[~there["sweep"].isin(self.outdated)])
            self.outdated.clear()
        self.writer.append("sweeps", pd.DataFrame(rows), replace=True)
