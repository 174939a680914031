"""A run's folder that is taken away while somebody writes to it: the writer says so, and brings nothing back."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from driftlens.base.errors import Cancelled, RunError
from driftlens.base.progress import ProgressEvent
from driftlens.runs.status import RunLock
from driftlens.runs.writer import RunWriter, attach
from tests.quick import few
from tests.records.full_run import write_run
from tests.records.stopping import accuracy_of, contents

Work = Callable[[RunWriter], Any]


def a_file(writer: RunWriter) -> None:
    with writer.file("thumbs/new.npy") as path:
        path.write_bytes(b"")


def a_phase(writer: RunWriter) -> None:
    with writer.phase("later"):
        pass


WORK: dict[str, Work] = {
    "a table": lambda writer: writer.append("accuracy", accuracy_of("cars", 0.5).assign(metric="top5")),
    "a new table": lambda writer: writer.append(
        "sweeps", pd.DataFrame([{"sweep": "lam", "point": 0, "seed": 0, "task": "cars"}])
    ),
    "a file": a_file,
    "a phase": a_phase,
    "progress": lambda writer: writer.progress(ProgressEvent("walk", 1, 3, "layer 1", 0.1, {})),
    "the status": lambda writer: writer.status("running"),
    "an event": lambda writer: writer.event("layer"),
    "a notice": lambda writer: writer.notice("something"),
    "a removal": lambda writer: writer.remove_calibration("nosuch"),
    "nothing more": lambda writer: None,
}


@pytest.mark.parametrize("name", WORK)
def test_a_folder_that_is_gone_stays_gone(own: pathlib.Path, name: str) -> None:
    with (
        pytest.raises(RunError, match="was removed, moved or replaced") as caught,
        RunWriter.resume(own) as writer,
    ):
        shutil.rmtree(own)
        WORK[name](writer)
    assert str(own) in caught.value.message and caught.value.hint and caught.value.exit_code == 4
    assert not own.exists()


@pytest.mark.parametrize("name", few(WORK, ["a table", "nothing more"]))
def test_another_run_in_its_place_is_left_alone(own: pathlib.Path, name: str) -> None:
    with pytest.raises(RunError, match="was removed, moved or replaced"), RunWriter.resume(own) as writer:
        shutil.rmtree(own)
        write_run(own)
        other = RunLock(own)
        other.acquire()
        before = contents(own)
        WORK[name](writer)
    assert contents(own) == before and (own / "run.lock").exists(), "its lock's note is its own writer's"
    other.release()


def test_what_fails_because_the_folder_is_gone_is_told_as_that(own: pathlib.Path) -> None:
    with pytest.raises(RunError, match="was removed"), RunWriter.resume(own):
        shutil.rmtree(own)
        (own / "spec.yaml").read_text()


def test_a_job_that_was_cancelled_is_that_even_without_its_folder(own: pathlib.Path) -> None:
    with pytest.raises(Cancelled), RunWriter.resume(own):
        shutil.rmtree(own)
        raise Cancelled("cancelled")
    assert not own.exists()


def test_a_file_is_not_attached_to_a_run_that_took_the_place_of_the_one_it_is_about(
    own: pathlib.Path,
) -> None:
    with pytest.raises((RunError, OSError)), attach(own, "reports/report.html") as path:
        path.write_text("text")
        shutil.rmtree(own)
        write_run(own)
        before = contents(own)
    assert contents(own) == before
