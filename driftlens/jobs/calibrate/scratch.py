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

from driftlens.base.errors import RunError, SpecError
from driftlens.base.files import from_json, write_json_atomic
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import OnDemand
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.jobs.study.kept import Kept
from driftlens.models.saving import save_state_dict
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


class CalibrationScratch:
    """The folder of one unfinished calibration inside a run; it belongs to nothing that a reader sees."""

    def __init__(self, run: pathlib.Path, name: str) -> None:
        """Nothing is read or written yet."""
        self._settings = run / layout.begun_calibration(name)
        self._folder = self._settings.parent
        self._seconds = 0.0

    def begin(
        self, settings: Mapping[str, Any], *, resume: bool, asked: Mapping[str, Any] | None = None
    ) -> dict[int, SolvedLayer]:
        """The layers solved before an interruption, by index; none when the calibration starts afresh.

        Args:
            settings: everything that the solutions depend on, as plain values, and as `selection` how it was chosen:
                nothing as long as it is being chosen.
            resume: whether to go on; otherwise what is there is thrown away.
            asked: as for `require_same`.

        Raises:
            SpecError: what is there was solved with other settings; the first difference is named.
            RunError: the folder can't be written to.
        """
        if resume and self.is_there:
            self.require_same(settings, asked=asked)
            return self.solved()
        self.remove()
        write_json_atomic(self._settings, settings)
        return {}

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
    def is_there(self) -> bool:
        """Whether a calibration of this name was begun and is not finished."""
        return self._settings.is_file()

    @property
    def begun(self) -> dict[str, Any]:
        """What it began with, and as `selection` how that was chosen; nothing where nothing was begun.

        Raises:
            RunError: that is damaged.
        """
        if not self.is_there:
            return {}
        try:
            found = from_json(self._settings.read_bytes())
        except (OSError, ValueError) as error:
            raise _damaged(self._settings, str(error)) from error
        if not isinstance(found, dict):
            raise _damaged(self._settings, f"an object expected, got {type(found).__name__}")
        return found

    def require_same(self, settings: Mapping[str, Any], *, asked: Mapping[str, Any] | None = None) -> None:
        """Refuse to go on with other settings; nothing happens where nothing was begun.

        Args:
            settings: everything that the solutions depend on, as plain values.
            asked: what a choice begins with: where one was made, it is compared with what that one began with.

        Raises:
            SpecError: the first setting that differs.
        """
        if not self.is_there:
            return
        before, now, skipped = self.begun, dict(settings), {"selection"}
        if asked and (chosen := before.get("selection")):
            before, now, skipped = before | chosen["asked"], {**now, **asked}, {"selection", "sites"}
        before, now = _flat(before), _flat(now)
        for name in {**now, **before}:
            if name.partition(".")[0] not in skipped and before.get(name) != now.get(name):
                raise SpecError(
                    f"the interrupted calibration had another {name}: {_shown(before.get(name))}, "
                    f"now {_shown(now.get(name))}",
                    hint="Resume with the same settings, models and samples, or start afresh without --resume.",
                )

    @property
    def spill(self) -> pathlib.Path:
        """A folder for features that don't fit into memory."""
        return self._folder / "features"

    @property
    def tried(self) -> Kept:
        """What became of the candidates that a choice has tried; nothing any more once it is `settled`."""
        return Kept(self._folder / "tried", self._require_there)

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Go on with what was chosen: `settings` take the place of those that the choice began with.

        Raises:
            RunError: the folder can't be written to, or the run was removed since the calibration began.
        """
        self._require_there()
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
        return Kept(self._folder / "training", self._require_there)

    def keep(self, layer: CalibratedLayer, seconds: float) -> SolvedLayer:
        """Store one layer's solution, whole or not at all; returns what was stored.

        Args:
            layer: what was solved.
            seconds: time since the calibration began, over all sittings.

        Raises:
            RunError: the disk is full, or the run was removed since the calibration began.
        """
        self._require_there()
        reports = json.dumps([dataclasses.asdict(report) for report in layer.reports])
        file = self._folder / f"{layer.layer:03d}.safetensors"
        save_state_dict(file, layer.updates, {"reports": reports, "seconds": repr(seconds)})
        return _read(file)

    def _require_there(self) -> None:
        if not self.is_there:  # to write would bring the run's folder back
            raise RunError(
                f"{self._folder} was removed while it was being written to",
                hint="Nothing more was written there. Start again with a run that is in its place.",
            )

    def remove(self) -> None:
        """Throw everything away."""
        remove_tree(self._folder)

    def _files(self) -> list[pathlib.Path]:
        return sorted(self._folder.glob("*.safetensors"))


def _metadata(path: pathlib.Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def _read(path: pathlib.Path) -> SolvedLayer:
    source, stored = open_checkpoint(path), _metadata(path)
    reports = tuple(SiteReport(**report) for report in from_json(stored["reports"]))
    return SolvedLayer(OnDemand(source.headers, source.read), reports, float(stored["seconds"]))


def _damaged(path: pathlib.Path, reason: str) -> RunError:
    return RunError(f"{path} can't be read: {reason}", hint="Start the calibration afresh, without --resume.")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, so that a difference can be told where it is."""
    return {
        (f"{name}.{part}" if part else name): value
        for name, parts in settings.items()
        for part, value in (parts.items() if isinstance(parts, Mapping) else [("", parts)])
    }


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
