"""How drift and accuracy depend on the settings of a calibration: many calibrations of one run, as a table."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from driftlens.access import Access
from driftlens.calibration.calibrator import Calibrator, closed_form
from driftlens.data.samples import SampleSet
from driftlens.engine.forward_order import Lane
from driftlens.errors import SingularGramError, SpecError
from driftlens.files import PathLike
from driftlens.pipeline.analyze.evaluation import FinalDrift, accuracy_rows, final_features
from driftlens.pipeline.analyze.phases import all_of, deterministic_algorithms, suitable_threads
from driftlens.pipeline.calibrate.job import OpenCalibration, open_calibration
from driftlens.pipeline.calibrate.request import CalibrationRequest
from driftlens.pipeline.search.lanes import LANE, part_of, solved_lanes
from driftlens.pipeline.search.sweep_points import (
    Setting,
    SweepPoint,
    is_there,
    measured_elsewhere,
    numbered,
    require_factors,
    samples_by_seed,
    settings_of,
)
from driftlens.pipeline.study.reopening import require_same_models, require_same_samples
from driftlens.pipeline.study.study import Study
from driftlens.progress import CancelToken, ProgressSink, Reporter
from driftlens.records import layout
from driftlens.records.run import DriftRun, open_run
from driftlens.records.schema import SWEEPS
from driftlens.records.tables import append_rows
from driftlens.records.writer import RunWriter
from driftlens.spec import RunSpec, load_spec
from driftlens.variants import expert_of

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
        _calibrator(opened.plan.calibrator, setting).check(has_base=opened.study.has_base)
    rows = open_run(folder).sweeps()
    numbered(sweeps, rows[~rows["sweep"].isin(sweeps)] if replace else rows)
    require_same_samples(opened.manifest, opened.study)
    spec = load_spec(folder / layout.SPEC)
    seeds = range(opened.study.seed, opened.study.seed + request.seeds)
    samples = samples_by_seed(spec, opened.models, opened.plan.samples, seeds, access=access)
    tasks = measured_elsewhere(opened.study, spec, samples, access=access)
    study = dataclasses.replace(opened.study, tasks=tasks)
    require_same_models(opened.manifest, study, Reporter(on_progress, cancel))
    with RunWriter.resume(folder) as writer:
        reporter = Reporter(all_of(writer.progress, on_progress), cancel)
        rows = open_run(folder).sweeps()
        outdated = rows["sweep"].isin(sweeps) & replace
        points = numbered(sweeps, rows[~outdated])
        kept = rows[~outdated] if resume else rows[:0]
        job = _Job(writer, study, opened, request, points, kept, set(rows["sweep"][outdated]))
        with deterministic_algorithms(study.settings.deterministic):
            for seed, drawn in samples.items():
                phase = f"{PHASE}:{seed}"
                with writer.phase(phase), suitable_threads(writer, phase, study):
                    job.run(seed, drawn, reporter)
    job.require_all()
    return open_run(folder)


def _open(folder: pathlib.Path, request: SweepRequest, **options: Any) -> tuple[OpenCalibration, Setting]:
    """The run opened with the most samples that a point needs, and the setting that sweeps vary around."""
    spec = load_spec(folder / layout.SPEC)
    count = request.samples or _fewest(spec)
    most = max(count, *map(int, request.values.get("n", ())), 1)
    asked = CalibrationRequest(PHASE, method=request.method, preset=request.preset, samples=most)
    opened = open_calibration(folder, asked, **options)
    settings = opened.plan.calibrator.get_params()
    missing = [name for name in ("lam", "rho", "alpha") if name not in settings]
    if missing:
        raise SpecError(f"{opened.plan.method} has no {', '.join(missing)} to sweep")
    return opened, Setting(float(settings["lam"]), float(settings["rho"]), float(settings["alpha"]), count)


def _fewest(spec: RunSpec) -> int:
    """Calibration samples that every task has by the spec."""
    return min(spec.data.tasks[task].n or spec.data.defaults.n for task in spec.tasks)


@dataclass(frozen=True)
class _Job:
    """The points of all sweeps, and those of them that are there already.

    Attributes:
        kept: rows of points that need not be measured again.
        outdated: sweeps whose rows go when the first new ones come.
        unsolved: settings that can't be solved for, and why.
    """

    writer: RunWriter
    study: Study
    opened: OpenCalibration
    request: SweepRequest
    points: Sequence[SweepPoint]
    kept: pd.DataFrame
    outdated: set[str]
    unsolved: dict[Setting, SingularGramError] = field(default_factory=dict)

    @cached_property
    def experts(self) -> dict[str, Tensor]:
        """The experts' final features, which no setting changes."""
        return {
            task: final_features(
                self.study.pool, expert_of(task), task, at.diagnosis, self.study.settings.pool
            )
            for task, at in self.study.tasks.items()
        }

    def run(self, seed: int, samples: Mapping[str, SampleSet], reporter: Reporter) -> None:
        """Measure what is missing of one seed; the rows of every setting are written as soon as they are known."""
        scored = self._scored()
        missing = [p for p in self.points if not is_there(p, seed, self.study.tasks, scored, self.kept)]
        settings = list(dict.fromkeys(point.setting for point in missing))
        if not settings:
            return
        try:
            self._measure(settings, missing, seed, samples, reporter)
        except SingularGramError:  # without a word on whose: one after the other, it is known
            for setting in settings:
                try:
                    self._measure([setting], missing, seed, samples, reporter)
                except SingularGramError as error:
                    self.unsolved.setdefault(setting, error)

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

    def _measure(
        self,
        settings: Sequence[Setting],
        missing: Sequence[SweepPoint],
        seed: int,
        samples: Mapping[str, SampleSet],
        reporter: Reporter,
    ) -> None:
        """Calibrate with some settings side by side.

        Raises:
            SingularGramError: one of them can't be solved for; what came before it is written.
        """
        cuts = sorted({setting.n for setting in settings})
        parts = {
            task: [part_of(drawn, range(low, high)) for low, high in zip([0, *cuts], cuts, strict=False)]
            for task, drawn in samples.items()
        }
        lanes = [
            Lane(
                closed_form(_calibrator(self.opened.plan.calibrator, setting)),
                frozenset(range(cuts.index(setting.n) + 1)),
            )
            for setting in settings
        ]
        spill = self.writer.folder / layout.SCRATCH / PHASE
        spill.parent.mkdir(exist_ok=True)
        for lane, seconds in solved_lanes(
            self.study, parts, lanes, self.opened.plan.sites, reporter, phase=PHASE, spill=spill
        ):
            found = self._measured()
            self._write(
                [
                    {"sweep": point.sweep, "point": point.point, "seed": seed, "seconds": seconds}
                    | dataclasses.asdict(point.setting)
                    | row
                    for point in missing
                    if point.setting == settings[lane]
                    for row in found
                ]
            )

    def _scored(self) -> list[str]:
        tasks = self.study.tasks.items() if self.request.accuracy else ()
        return [task for task, at in tasks if at.test is not None and at.head is not None]

    def _measured(self) -> list[dict[str, Any]]:
        """Drift and accuracy of the model at hand, one row per task."""
        rows = []
        for task, at in self.study.tasks.items():
            found = final_features(self.study.pool, LANE, task, at.diagnosis, self.study.settings.pool)
            row: dict[str, Any] = {"task": task}
            row |= dataclasses.asdict(FinalDrift.between(found, self.experts[task]))
            for score in accuracy_rows(self.study, task, [LANE], Reporter()) if self.request.accuracy else ():
                row |= {"accuracy": score["value"], "n_test": score["n"]}
            rows.append(row)
        return rows

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas as pd

        if self.outdated:
            _take_out(self.writer, self.outdated)
            self.outdated.clear()
        self.writer.append("sweeps", pd.DataFrame(rows), replace=True)


def _calibrator(start: Calibrator, setting: Setting) -> Calibrator:
    values = {"lam": setting.lam, "rho": setting.rho, "alpha": setting.alpha}
    return type(start)(**start.get_params() | values)


def _take_out(writer: RunWriter, sweeps: Collection[str]) -> None:
    """Remove the rows of some sweeps; the others keep their exact values."""
    rows = open_run(writer.folder).sweeps()
    with writer.file(layout.table_file(SWEEPS.name)) as file:
        append_rows(file, SWEEPS, rows[~rows["sweep"].isin(sweeps)])
