"""How far a reader has to go to follow one batch of pixels into the tables."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from types import FrameType
from typing import Any

import torch

import driftlens
from driftlens.base.access import Access
from driftlens.base.progress import Reporter
from driftlens.engine.walk import walk
from driftlens.jobs.analyze.diagnosis import _Recorder, diagnosis_of, walked
from driftlens.jobs.study.reopening import reopened
from driftlens.runs.run import DriftRun

ROOM = pathlib.Path(driftlens.__file__).parent
MOST = 11
"""Half of the files that were entered before."""


def entered(work: Any) -> set[str]:
    """Files of driftlens in which a function is called while `work` is done; importing them does not count."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(f"{ROOM}/"):
            found.add(pathlib.Path(frame.f_code.co_filename).relative_to(ROOM).as_posix())

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def test_a_batch_of_pixels_enters_few_files_on_its_way_into_tables(light: DriftRun) -> None:
    study, _ = reopened(light.path, access=Access(device="cpu"))
    task = next(iter(study.tasks))
    at_hand = study.tasks[task]
    pixels = at_hand.diagnosis.load(range(len(at_hand.diagnosis)))
    in_memory = dataclasses.replace(at_hand.diagnosis, load=lambda rows: pixels[list(rows)])
    tasks = {**study.tasks, task: dataclasses.replace(at_hand, diagnosis=in_memory)}
    study = dataclasses.replace(study, tasks=tasks)

    def look() -> None:
        whole = walked(study, task, Reporter(), 0, in_memory.num_batches)
        diagnosis_of(study, task, [whole])

    look()  # finds the diagnostics and whatever else is found once
    files = entered(look)
    assert len(files) <= MOST, "\n".join(sorted(files))


def test_pooled_features_hold_no_other_tokens(light: DriftRun) -> None:
    """One token of each sample, kept as a view, would keep the whole features of every layer."""
    study, _ = reopened(light.path, access=Access(device="cpu"))
    task, variant = next(iter(study.tasks)), study.variants[0]
    recorder = _Recorder("cls", variant, study.settings.measured)
    with torch.no_grad():
        for view in walk(study.pool, task, [variant], study.tasks[task].diagnosis.batches()):
            recorder.add(view)
    waiting = [part for parts in recorder._vectors.values() for part in parts]  # of the last layer
    assert waiting and all(part.untyped_storage().nbytes() == part.nbytes for part in waiting)
    kept = [part for parts in recorder._features.values() for part in parts]
    assert kept and all(part.base.untyped_storage().nbytes() == part.nbytes for part in kept)
