"""Features that wait at a boundary; those beyond a budget lie on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from driftlens.base.errors import RunError
from driftlens.engine.pool import moved
from driftlens.models.chain import SideInputs, State


class FeatureStore:
    """Counts the bytes of states that are in memory, and keeps the others in files of one folder.

    As a context it takes its files away again at the end, and the folder if it made it.

    Args:
        budget: bytes of states that may stay in memory.
        folder: where the rest goes, made on first use in one that is there; None keeps everything in memory.
    """

    def __init__(self, budget: int = 0, folder: Path | None = None) -> None:
        self._budget = budget
        self._folder = folder
        self._held = 0
        self._files: set[Path] = set()
        self._made_folder = False

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        if self._made_folder and self._folder is not None:
            with contextlib.suppress(OSError):  # somebody else's files may lie there too
                self._folder.rmdir()

    def fits(self, nbytes: int) -> bool:
        """Whether that much more may stay in memory."""
        return self._folder is None or self._held + nbytes <= self._budget

    def hold(self, nbytes: int) -> None:
        """Count bytes that stay in memory; negative ones are let go."""
        self._held += nbytes

    def write(self, name: str, state: State) -> Path:
        """Write a state to its file, in the place of what was there; the file.

        Raises:
            RunError: the folder can't be written to, or the disk is full.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        assert self._folder is not None
        file = self._folder / f"{name}.safetensors"
        try:
            if not self._folder.exists():
                # Not its parents: a run that was removed meanwhile must not come back.
                self._folder.mkdir(exist_ok=True)
                self._made_folder = True
            # A new file, not new content: tensors that were read from the old one may still look into it.
            file.unlink(missing_ok=True)
            self._files.add(file)
            save_file({key: value.contiguous().cpu() for key, value in state.items()}, file)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"waiting features can't be written to {self._folder}: {error}",
                hint="Make room there, or raise compute.feature_budget.",
            ) from error
        return file


@dataclass(frozen=True)
class _OnDisk:
    file: Path
    devices: dict[str, torch.device]


class WaitingBatch:
    """One batch of one task at one boundary: a state per model, wherever it lies.

    Args:
        store: where its states are held.
        name: of its files, unlike any other's.
        side: what every layer needs beside the state; the same for every model.
        start: position of its first sample.
        stop: position behind its last one.
    """

    def __init__(self, store: FeatureStore, name: str, side: SideInputs, start: int, stop: int) -> None:
        self.side = side
        self.start = start
        self.stop = stop
        self._store = store
        self._name = name
        self._states: dict[str, State | _OnDisk] = {}
        self._held: dict[str, int] = {}

    def lend(self, model: str, state: State) -> None:
        """Give the model a state that is used at once and never waits, so that no budget counts it."""
        self._states[model] = state

    def put(self, model: str, state: State) -> None:
        """Let `state` take the place of the model's state at the boundary before.

        Raises:
            RunError: it has to go to disk and can't be written there.
        """
        before, nbytes = self._states.get(model), sum(leaf.nbytes for leaf in state.values())
        self._store.hold(-self._held.pop(model, 0))
        if self._store.fits(nbytes):
            self._store.hold(nbytes)
            self._held[model] = nbytes
            self._states[model] = state
            if isinstance(before, _OnDisk):
                before.file.unlink(missing_ok=True)
        else:
            file = self._store.write(f"{self._name}-{model}", state)
            self._states[model] = _OnDisk(file, {key: value.device for key, value in state.items()})

    def drop(self, model: str) -> None:
        """Let go of a state that nobody asks for again."""
        self.put(model, {})

    def get(self, model: str) -> State:
        """The model's state at this boundary."""
        held = self._states[model]
        if isinstance(held, dict):
            return held
        from safetensors.torch import load_file

        return {key: value.to(held.devices[key]) for key, value in load_file(held.file).items()}


def on_device(inputs: object, device: torch.device, dtype: torch.dtype) -> object:
    """Raw inputs moved to `device`; floating tensors are cast, lists become tuples, mappings of any kind dicts."""
    if isinstance(inputs, Tensor):
        return moved(inputs, device, dtype if inputs.is_floating_point() else None)
    if isinstance(inputs, Mapping):
        return {name: on_device(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(on_device(value, device, dtype) for value in inputs)
    return inputs


def input_bytes(inputs: object) -> int:
    """Bytes of raw inputs, as `on_device` takes them."""
    if isinstance(inputs, Tensor):
        return inputs.nbytes
    if isinstance(inputs, Mapping):
        return sum(input_bytes(value) for value in inputs.values())
    return sum(input_bytes(value) for value in inputs) if isinstance(inputs, list | tuple) else 0
