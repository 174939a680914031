"""What a job has begun and finished, kept in a folder of its own, so that one that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from driftlens.base.errors import CheckpointError, RunError, SpecError
from driftlens.base.files import from_json, write_json_atomic
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.saving import save_state_dict
from driftlens.runs.contents import remove_tree


class Kept:
    """Tensors by name, each name a file that is whole or absent; an `engine.training.Memory`."""

    def __init__(self, folder: pathlib.Path, require_there: Callable[[], None] = lambda: None) -> None:
        """Nothing is read or written yet; `require_there` is asked before the folder is made or written to."""
        self._folder, self._require_there = folder, require_there

    def read(self, name: str) -> dict[str, Tensor]:
        """What is kept under a name; nothing where there is none, or what is there can't be read any more."""
        file = self._file(name)
        if not file.is_file():
            return {}
        try:
            source = open_checkpoint(file)
            return {key: source.read(key).clone() for key in source.headers}
        except CheckpointError:  # it is made once more, and takes that file's place
            return {}

    def write(self, name: str, tensors: Mapping[str, Tensor], seconds: float = 0.0) -> None:
        """Keep tensors, with the time that all work took until then, over all sittings."""
        self._require_there()
        self._folder.mkdir(exist_ok=True)
        contiguous = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_state_dict(self._file(name), contiguous, {"seconds": repr(seconds)})

    def forget(self, name: str) -> None:
        """Keep nothing under a name any more."""
        self._file(name).unlink(missing_ok=True)

    @property
    def seconds(self) -> float:
        """What the work that is kept took, over all sittings."""
        return max(map(_seconds_of, self._files()), default=0.0)

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return any(self._files())

    def _files(self) -> list[pathlib.Path]:
        return [*self._folder.glob("*.safetensors")]

    def _file(self, name: str) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


def _seconds_of(file: pathlib.Path) -> float:
    try:
        with safe_open(file, framework="pt") as opened:
            return float(opened.metadata()["seconds"])
    except SafetensorError:  # as in `Kept.read`
        return 0.0


class Begun:
    """The folder of a job that was begun and is not finished: what its results depend on, and those it has so far."""

    what = "job"
    afresh = "begin afresh"

    def __init__(self, settings: pathlib.Path) -> None:
        """`settings` is the file that is there from the beginning to the end; nothing is read or written yet."""
        self._settings, self._folder = settings, settings.parent

    @property
    def is_there(self) -> bool:
        """Whether the job was begun and is not finished."""
        return self._settings.is_file()

    @property
    def begun(self) -> dict[str, Any]:
        """What it began with; nothing where nothing was begun."""
        if not self.is_there:
            return {}
        try:
            found = from_json(self._settings.read_bytes())
            if not isinstance(found, dict):
                raise ValueError(f"an object expected, got {type(found).__name__}")
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self._settings} can't be read: {error}", hint=f"{self.afresh.capitalize()}."
            ) from error
        return found

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin afresh: what is there is thrown away."""
        self.remove()
        write_json_atomic(self._settings, settings)

    def require_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings than those `before`."""
        flat_before, flat_now = _flat(before), _flat(now)
        for name in {**flat_now, **flat_before}:
            was, given = flat_before.get(name), flat_now.get(name)
            if was != given:
                raise SpecError(
                    f"the interrupted {self.what} had another {name}: {_shown(was)}, now {_shown(given)}",
                    hint=f"Resume with the same settings, models and samples, or {self.afresh}.",
                )

    def kept(self, name: str) -> Kept:
        """Results under a name of their own."""
        return Kept(self._folder / name, self.require_there)

    def require_there(self) -> None:
        """Refuse to write where the job is not any more, which would bring a folder back."""
        if not self.is_there:
            raise RunError(
                f"{self._folder} was removed while it was being written to",
                hint="Nothing more was written there. Start again with a run that is in its place.",
            )

    def remove(self) -> None:
        """Throw everything away."""
        remove_tree(self._folder)


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
