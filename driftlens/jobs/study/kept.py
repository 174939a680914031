"""What a job has finished, kept in a folder of its own, so that one that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Mapping

from safetensors import SafetensorError, safe_open
from torch import Tensor

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.saving import save_state_dict


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
        """Keep tensors, with the time that all work took until then, over all sittings.

        Raises:
            RunError: the disk is full, or the run was removed since the job began.
        """
        self._require_there()
        self._folder.mkdir(exist_ok=True)
        contiguous = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_state_dict(self._file(name), contiguous, {"seconds": repr(seconds)})

    @property
    def seconds(self) -> float:
        """What the work that is kept took, over all sittings."""
        return max(map(_seconds_of, self._folder.glob("*.safetensors")), default=0.0)

    def _file(self, name: str) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


def _seconds_of(file: pathlib.Path) -> float:
    try:
        with safe_open(file, framework="pt") as opened:
            return float(opened.metadata()["seconds"])
    except SafetensorError:  # as in `read`
        return 0.0
