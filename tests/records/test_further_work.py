"""What a list says of a finished run on which later work ended early: it is done, and this is what was left."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from driftlens.base.errors import Cancelled, RunError
from driftlens.findings.listing import find_runs
from driftlens.runs.run import open_run
from driftlens.runs.standing import current_state, last_work, left_undone
from driftlens.runs.status import read_status
from driftlens.runs.writer import RunWriter
from tests.records.stopping import process

KILLED = """
import sys
from driftlens.runs.writer import RunWriter
with RunWriter.resume(sys.argv[1]) as writer:
    writer.begin_variants(["baseline:a b-anchor", "calibrated:a b"])
    with writer.phase("calibrate:a b"):
        print("ready", flush=True)
        sys.stdin.read()
"""


def end_early(folder: pathlib.Path, phase: str, error: BaseException, *variants: str) -> None:
    with pytest.raises(type(error)), RunWriter.resume(folder) as writer:
        writer.begin_variants(variants)
        with writer.phase(phase):
            raise error


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (Cancelled("cancelled"), "cancelled", "was cancelled"),
        (RunError("the disk is full"), "failed", "failed"),
    ],
    ids=["cancelled", "failed"],
)
def test_a_calibration_that_ends_early_leaves_the_run_done(
    own: pathlib.Path, error: Exception, state: str, words: str
) -> None:
    end_early(own, "calibrate:x", error, "baseline:x-anchor", "calibrated:x")
    run = open_run(own)
    status = read_status(own)
    assert (status and status.state, last_work(run)[0], current_state(run)) == (state, state, "done")
    (summary,) = find_runs(own)
    assert summary.state == "done" and summary.left == left_undone(run)
    (said,) = summary.left
    assert said.startswith(f"calibration 'x' {words}; ")
    assert (
        f"`driftlens calibrate {own} --name x --resume`" in said
        and "without --resume it begins afresh" in said
    )


def test_a_calibration_that_is_killed_leaves_the_run_done(own: pathlib.Path) -> None:
    with process(KILLED, own) as writer:
        (running,) = find_runs(own)
        assert (running.state, running.left) == ("running", ())
        writer.kill()
        writer.wait()
    run = open_run(own)
    assert (last_work(run)[0], current_state(run)) == ("stopped", "done")
    (said,) = left_undone(run)
    assert said.startswith("calibration 'a b' was interrupted; ") and "--name 'a b' --resume" in said


def test_it_is_told_until_it_is_finished_or_taken_out(own: pathlib.Path) -> None:
    end_early(own, "calibrate:x", Cancelled("cancelled"), "calibrated:x")
    RunWriter.resume(own).__exit__(None, None, None)  # other work, which succeeds
    assert last_work(open_run(own))[0] == "done" and len(left_undone(open_run(own))) == 1
    with RunWriter.resume(own) as writer:
        writer.remove_calibration("x")
    assert left_undone(open_run(own)) == ()


def test_work_that_leaves_nothing_to_go_on_with_is_told_while_it_is_the_last(own: pathlib.Path) -> None:
    end_early(own, "sweep:0", RunError("the disk is full"))
    run = open_run(own)
    assert current_state(run) == "done"
    assert left_undone(run) == (
        "the last work on it ended early (failed: the disk is full); what the run held before stands",
    )
    RunWriter.resume(own).__exit__(None, None, None)
    assert left_undone(open_run(own)) == ()


def test_a_run_whose_own_analysis_ends_early_is_not_done(own: pathlib.Path, tmp_path: pathlib.Path) -> None:
    again = shutil.copytree(own, tmp_path / "again")
    end_early(again, "evaluate:cars", Cancelled("cancelled"))
    new = tmp_path / "new"
    with (
        pytest.raises(Cancelled),
        RunWriter.create(new, spec_yaml="", spec_digest="", name="new") as writer,
        writer.phase("analyze:cars"),
    ):
        raise Cancelled("cancelled")
    for folder in (again, new):
        (summary,) = find_runs(folder)
        assert (summary.state, summary.left) == ("cancelled", ())
