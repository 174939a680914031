"""Files of a finished run that are written anew: listed with a digest that holds, whenever the writer is stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from driftlens.runs import writer as writing
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import open_run
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunLock, RunWriter, attach_file
from driftlens.utils.errors import Cancelled, RunError
from driftlens.utils.progress import ProgressEvent
from tests.quick import few
from tests.runs.full_run import write_run
from tests.runs.stopping import accuracy_of, contents, process, stopping

ACCURACY = "tables/accuracy.parquet"
ROW = {"task": "cars", "variant": "merged", "metric": "top5", "value": 0.5}

KILLED = """
import contextlib
import sys
import pandas as pd
from driftlens.runs import writer as writing
from driftlens.runs.writer import RunWriter

whole = writing.atomic_path

def wait(moment):
    if moment == {moment!r}:
        print("ready", flush=True)
        sys.stdin.read()

@contextlib.contextmanager
def watched(path):
    with whole(path) as written:
        wait("before it is written")
        yield written
        wait("before it lands")
    wait("after it has landed")

with RunWriter.resume(sys.argv[1]) as writer:
    writing.atomic_path = watched
    writer.append("accuracy", pd.DataFrame([{row!r}]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it is written", "before it lands", "after it has landed"])
def test_a_killed_writer_leaves_every_table_listed_as_it_is(own: Path, moment: str) -> None:
    before = read_manifest(own).files
    with process(KILLED.format(moment=moment, row=ROW), own) as writer:
        writer.kill()
        writer.wait()
    has_landed = moment == "after it has landed"
    assert ("top5" in set(open_run(own).accuracy()["metric"])) == has_landed
    assert set(read_manifest(own).files) == set(before)
    assert verify_files(own).ok and verify_files(own).checked == len(before) + 1
    RunWriter.resume(own).__exit__(None, None, None)
    after = read_manifest(own)
    assert {name for name in before if before[name] != after.files[name]} == ({ACCURACY} if has_landed else set())
    assert verify_files(own).ok and not after.rewriting


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("function", ["write_manifest", "_describe_file", "appended_table", "atomic_path"])
def test_ctrl_c_leaves_every_table_listed_as_it_is(
    own: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    before = read_manifest(own).files
    writer = RunWriter.resume(own)
    with monkeypatch.context() as patch:
        patch.setattr(writing, function, stopping(getattr(writing, function), call))
        with pytest.raises(KeyboardInterrupt), writer:
            for at in range(2):
                writer.append("accuracy", pd.DataFrame([ROW | {"metric": f"top{at}"}]))
                writer.append(
                    "outputs",
                    pd.DataFrame([ROW | {"sample_id": f"new{at}"}])[["task", "variant", "sample_id"]],
                )
            raise KeyboardInterrupt
    found = read_manifest(own)
    assert set(found.files) == set(before) and verify_files(own).ok


def test_a_table_that_nobody_touches_keeps_its_entry_while_a_calibration_is_taken_out(
    own: Path,
) -> None:
    before = read_manifest(own).files
    with RunWriter.resume(own) as writer:
        writer.remove_calibration("nosuch")
        assert read_manifest(own).files == before


@pytest.mark.slow
def test_a_file_that_is_neither_the_old_nor_the_new_one_is_found(own: Path) -> None:
    with process(KILLED.format(moment="before it lands", row=ROW), own) as writer:
        writer.kill()
        writer.wait()
    shutil.copy(own / "tables/layers.parquet", own / ACCURACY)
    assert verify_files(own).changed == (ACCURACY,)
    RunWriter.resume(own).__exit__(None, None, None)
    assert verify_files(own).changed == (ACCURACY,)


@pytest.mark.parametrize("call", range(3))
def test_an_attached_file_stays_listed_while_it_is_replaced(
    own: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    with attach_file(own, "reports/report.html") as path:
        path.write_text("first")
    before = read_manifest(own).files
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_manifest", stopping(writing.write_manifest, call))
        with suppress(KeyboardInterrupt), attach_file(own, "reports/report.html") as path:
            path.write_text("second")
    assert set(read_manifest(own).files) == set(before) and verify_files(own).ok
    with attach_file(own, "reports/figure.svg") as path:
        path.write_text("figure")
    assert verify_files(own).ok and not verify_files(own).unlisted and not read_manifest(own).rewriting


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
def test_a_folder_that_is_gone_stays_gone(own: Path, name: str) -> None:
    with (
        pytest.raises(RunError, match="was removed, moved or replaced") as caught,
        RunWriter.resume(own) as writer,
    ):
        shutil.rmtree(own)
        WORK[name](writer)
    assert str(own) in caught.value.message and caught.value.hint and caught.value.exit_code == 4
    assert not own.exists()


@pytest.mark.parametrize("name", few(WORK, ["a table", "nothing more"]))
def test_another_run_in_its_place_is_left_alone(own: Path, name: str) -> None:
    with pytest.raises(RunError, match="was removed, moved or replaced"), RunWriter.resume(own) as writer:
        shutil.rmtree(own)
        write_run(own)
        other = RunLock(own)
        other.acquire()
        before = contents(own)
        WORK[name](writer)
    assert contents(own) == before and (own / "run.lock").exists(), "its lock's note is its own writer's"
    other.release()


def test_what_fails_because_the_folder_is_gone_is_told_as_that(own: Path) -> None:
    with pytest.raises(RunError, match="was removed"), RunWriter.resume(own):
        shutil.rmtree(own)
        (own / "spec.yaml").read_text()


def test_a_job_that_was_cancelled_is_that_even_without_its_folder(own: Path) -> None:
    with pytest.raises(Cancelled), RunWriter.resume(own):
        shutil.rmtree(own)
        raise Cancelled("cancelled")
    assert not own.exists()


def test_a_file_is_not_attached_to_a_run_that_took_the_place_of_the_one_it_is_about(
    own: Path,
) -> None:
    with pytest.raises((RunError, OSError)), attach_file(own, "reports/report.html") as path:
        path.write_text("text")
        shutil.rmtree(own)
        write_run(own)
        before = contents(own)
    assert contents(own) == before
