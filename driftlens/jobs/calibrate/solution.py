"""What one calibration solves for or trains, kept layer by layer, so that one that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from driftlens.base.files import from_json, write_json_atomic
from driftlens.base.progress import Reporter
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.saving import save_state_dict
from driftlens.checkpoints.sources import OnDemand
from driftlens.engine.attached import Attachment
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.jobs.calibrate.plan import CalibrationPlan
from driftlens.jobs.study.study import Study
from driftlens.jobs.study.writing import Begun, Kept
from driftlens.models.chain import ParameterKey
from driftlens.runs import layout
from driftlens.runs.contents import remove_tree
from driftlens.runs.manifest import CalibrationInfo, versions
from driftlens.runs.schema import CALIBRATION
from driftlens.runs.standing import COMMAND
from driftlens.runs.writer import RunWriter

PHASE = "calibrate"
"""What progress events of the solving walk are called."""


@dataclass(frozen=True)
class SolvedLayer:
    """One layer's solution: own parameter names -> values, which stay on disk, and seconds over all sittings."""

    updates: Mapping[str, Tensor]
    reports: Sequence[SiteReport]
    seconds: float


class CalibrationScratch(Begun):
    """The folder of one unfinished calibration inside a run; it belongs to nothing that a reader sees.

    Of what it begins with, `selection` is how settings were chosen (nothing until then), `command` with which options.
    """

    what = "calibration"
    afresh = "start afresh without --resume"

    def __init__(self, run: pathlib.Path, name: str) -> None:
        """Nothing is read or written yet."""
        super().__init__(run / layout.begun_calibration(name))
        self._seconds = 0.0

    def go_on(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Begin, unless that was done before, with the same settings; `asked` is what a choice begins with."""
        if self.is_there:
            self.require_begun(settings, asked=asked)
        else:
            self.begin(settings)

    def require_begun(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Refuse what `go_on` would, if anything was begun."""
        if not self.is_there:
            return
        before, now, skipped = self.begun, dict(settings), {"selection", COMMAND}
        if asked and (chosen := before.get("selection")):
            before, now, skipped = before | chosen["asked"], {**now, **asked}, {*skipped, "sites"}
        self.require_same(*({name: of[name] for name in of if name not in skipped} for of in (before, now)))

    def solved(self) -> dict[int, SolvedLayer]:
        """The layers that are kept, by index."""
        return {int(path.stem): _read(path) for path in self._files()}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """A block that, stopped in the middle, leaves nothing to go on with."""
        settings = self.begun
        self._settings.unlink()
        yield
        write_json_atomic(self._settings, settings)

    @property
    def spill(self) -> pathlib.Path:
        """A folder for features that don't fit into memory."""
        return self._folder / "features"

    @property
    def tried(self) -> Kept:
        """What became of the candidates that a choice has tried; nothing any more once it is `settled`."""
        return self.kept("tried")

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Go on with what was chosen: `settings` take the place of those that the choice began with."""
        self.require_there()
        write_json_atomic(self._settings, settings)
        remove_tree(self._folder / "tried")

    @property
    def seconds(self) -> float:
        """What was solved or trained so far took, over all sittings."""
        solved = max((float(_metadata(path)["seconds"]) for path in self._files()), default=0.0)
        return max(solved, self._training.seconds) or self._seconds

    def took(self, seconds: float) -> None:
        """Remember what work took of which nothing is kept layer by layer."""
        self._seconds = seconds

    def read(self, name: str) -> dict[str, Tensor]:
        """What a training has kept under a name; nothing where there is none. See `engine.training.Memory`."""
        return self._training.read(name)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep what a training has reached, whole or not at all."""
        self._training.write(name, tensors, self._seconds)

    @property
    def _training(self) -> Kept:
        return self.kept("training")

    def keep(self, layer: CalibratedLayer, seconds: float) -> SolvedLayer:
        """Store one layer's solution, whole or not at all; returns what was stored."""
        self.require_there()
        reports = json.dumps([dataclasses.asdict(report) for report in layer.reports])
        file = self._folder / f"{layer.layer:03d}.safetensors"
        save_state_dict(file, layer.updates, {"reports": reports, "seconds": repr(seconds)})
        return _read(file)

    def _files(self) -> list[pathlib.Path]:
        return sorted(self._folder.glob("*.safetensors"))


def _metadata(path: pathlib.Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def _read(path: pathlib.Path) -> SolvedLayer:
    source, stored = open_checkpoint(path), _metadata(path)
    reports = tuple(SiteReport(**report) for report in from_json(stored["reports"]))
    return SolvedLayer(OnDemand(source.headers, source.read), reports, float(stored["seconds"]))


@dataclass
class Solution:
    """What a walk solved: layers by index, and (task, boundary) -> what a trained calibrator attaches there."""

    layers: dict[int, SolvedLayer] = field(default_factory=dict)
    attachments: dict[tuple[str, int], Attachment] = field(default_factory=dict)

    @property
    def updates(self) -> OnDemand[ParameterKey]:
        """(layer index, own parameter name) -> calibrated value, in the layer's layout."""
        keys = [(index, name) for index, layer in self.layers.items() for name in layer.updates]
        return OnDemand(dict.fromkeys(keys), lambda key: self.layers[key[0]].updates[key[1]])

    @property
    def reports(self) -> list[tuple[int, SiteReport]]:
        """One per site, with its layer's index."""
        return [(index, report) for index, layer in self.layers.items() for report in layer.reports]


@torch.no_grad()
def solve(
    writer: RunWriter, study: Study, plan: CalibrationPlan, scratch: CalibrationScratch, reporter: Reporter
) -> Solution:
    """What a plan solves for or trains, in forward order; it is kept at once, and not done again when resumed."""
    solution, started = Solution(scratch.solved()), time.monotonic() - scratch.seconds
    metrics: dict[str, float] = {}  # of the last finished layer: enough to draw a curve while it runs

    def step(now: Step) -> None:
        scratch.took(time.monotonic() - started)
        reporter.step(
            PHASE, now.done, now.total, now.label, **(metrics if now.loss is None else {"loss": now.loss})
        )

    ground = Ground(
        study.pool,
        {task: [samples] for task, samples in plan.samples.items()},
        plan.sites,
        base="base" if study.has_base else None,
        done={index: earlier.updates for index, earlier in solution.layers.items()},
        feature_budget=study.settings.feature_budget,
        spill=scratch.spill,
        on_step=step,
        pooling=study.settings.pool,
        team=study.team,
        seed=plan.seed,
        memory=scratch,
    )
    for layer in plan.calibrator.calibrate(ground):
        solution.attachments |= {(task, layer.layer): each for task, each in layer.attachments.items()}
        if study.team.leads and (layer.updates or layer.reports):
            solution.layers[layer.layer] = scratch.keep(layer, time.monotonic() - started)
        if layer.reports:
            drifts = layer.drift_l2_mean.values()
            metrics |= {
                "layer": layer.layer,
                "drift_l2_mean": sum(drifts) / len(drifts) if drifts else math.nan,
                "objective_before": _total(report.objective_before for report in layer.reports),
                "objective_after": _total(report.objective_after for report in layer.reports),
            }
            writer.event("layer", phase=PHASE, name=plan.name, **metrics)
    scratch.took(time.monotonic() - started)
    return solution


def _total(values: Iterable[float | None]) -> float:
    """The sum; NaN where a value was not computed."""
    return sum(math.nan if value is None else value for value in values)


def history_rows(name: str, reports: Sequence[tuple[int, SiteReport]]) -> list[dict[str, Any]]:
    """Rows of the calibration table: one per site, layer index first."""
    known = CALIBRATION.names
    return [
        {"name": name, "layer": layer}
        | {key: value for key, value in dataclasses.asdict(report).items() if key in known}
        for layer, report in reports
    ]


def record_solution(
    writer: RunWriter,
    plan: CalibrationPlan,
    reports: Sequence[tuple[int, SiteReport]],
    identity: dict[str, Any],
    info: CalibrationInfo,
) -> None:
    """Write the history of every site and `config.yaml`, in which all settings are resolved."""
    import pandas as pd

    from driftlens.spec.yaml_text import to_yaml

    if reports:
        writer.append("calibration", pd.DataFrame(history_rows(plan.name, reports)), replace=True)
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": plan.counts,
        "seconds": round(info.seconds, 3),
        "notices": list(info.notices),
        "versions": versions(),
    }
    with writer.file(f"{layout.calibration_folder(plan.name)}/config.yaml") as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def calibration_info(
    plan: CalibrationPlan, seconds: float, notices: Sequence[str], attached: int = 0
) -> CalibrationInfo:
    """The entry of the manifest."""
    return CalibrationInfo(
        method=plan.method,
        settings=plan.hyperparameters,
        control=plan.control,
        seconds=seconds,
        samples=plan.counts,
        sample_digests=plan.sample_digests,
        layers=plan.layers,
        automatic=plan.automatic,
        notices=tuple(notices),
        preset=plan.preset,
        sites=tuple(plan.patterns),
        seed=plan.seed,
        selection=plan.selection,
        attached=attached,
    )
