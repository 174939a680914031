"""What a calibration has solved so far, layer by layer, so that one that was interrupted goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from torch import Tensor

from driftlens.base.files import from_json, write_json_atomic
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.saving import save_state_dict
from driftlens.checkpoints.sources import OnDemand
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.jobs.study.kept import Begun, Kept
from driftlens.runs import layout
from driftlens.runs.contents import remove_tree


@dataclass(frozen=True)
class SolvedLayer:
    """One layer's solution.

    Attributes:
        updates: the layer's own parameter names -> calibrated values, which stay on disk until they are asked for.
        reports: one per site.
        seconds: time since the calibration began, over all sittings.
    """

    updates: Mapping[str, Tensor]
    reports: Sequence[SiteReport]
    seconds: float


class CalibrationScratch(Begun):
    """The folder of one unfinished calibration inside a run; it belongs to nothing that a reader sees.

    Among the settings that it begins with is, as `selection`, how they were chosen: nothing as long as they are being
    chosen.
    """

    what = "calibration"
    afresh = "start afresh without --resume"

    def __init__(self, run: pathlib.Path, name: str) -> None:
        """Nothing is read or written yet."""
        super().__init__(run / layout.begun_calibration(name))
        self._seconds = 0.0

    def go_on(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Begin, unless that was done before, with the same settings.

        Args:
            settings: everything that the solutions depend on, as plain values.
            asked: what a choice begins with: where one was made, it is compared with what that one began with.

        Raises:
            SpecError: what is there was begun with other settings; the first difference is named.
            RunError: the folder can't be written to.
        """
        if self.is_there:
            self.require_begun(settings, asked=asked)
        else:
            self.begin(settings)

    def require_begun(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Refuse what `go_on` would, if anything was begun."""
        if not self.is_there:
            return
        before, now, skipped = self.begun, dict(settings), {"selection"}
        if asked and (chosen := before.get("selection")):
            before, now, skipped = before | chosen["asked"], {**now, **asked}, {"selection", "sites"}
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
        """Go on with what was chosen: `settings` take the place of those that the choice began with.

        Raises:
            RunError: the folder can't be written to, or the run was removed since the calibration began.
        """
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
        """Keep what a training has reached, whole or not at all.

        Raises:
            RunError: the disk is full, or the run was removed since the calibration began.
        """
        self._training.write(name, tensors, self._seconds)

    @property
    def _training(self) -> Kept:
        return self.kept("training")

    def keep(self, layer: CalibratedLayer, seconds: float) -> SolvedLayer:
        """Store one layer's solution, whole or not at all; returns what was stored.

        Args:
            layer: what was solved.
            seconds: time since the calibration began, over all sittings.

        Raises:
            RunError: the disk is full, or the run was removed since the calibration began.
        """
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
