"""A training that is killed goes on where it was, and ends in the same files as one that was not."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from driftlens.base.errors import SpecError
from driftlens.jobs.calibrate.job import calibrate
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from driftlens.spec.requests import CalibrationRequest
from tests.pipeline.calibrating import copied
from tests.pipeline.fixtures import light, world

__all__ = ["light", "world"]

KILLED = """
import os, signal, sys
from driftlens.base.access import Context
from driftlens.calibration import descent
from driftlens.jobs.calibrate.job import calibrate
from driftlens.spec.requests import CalibrationRequest

folder, method, steps, at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
descent.KEPT_EVERY_S = 0.0  # behind every step
seen = 0

def told(event):
    global seen
    seen += event.phase == "calibrate" and ": step " in event.label
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)

request = CalibrationRequest(name="trained", method=method, parameters={"steps": steps}, attribution=False)
calibrate(folder, request, Context(on_progress=told))
"""
FILES = {
    "surgery": "attachments",
    "prob_surgery": "attachments",
    "surgery_v2": "attachments",
    "interv_merge": "attachments",
    "distill": "weights",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("surgery", 2),
        ("surgery", 5),
        ("prob_surgery", 5),
        ("surgery_v2", 3),
        ("interv_merge", 5),
        ("distill", 2),
    ],
)
def test_it_ends_as_if_it_had_never_been_killed(
    light: DriftRun, tmp_path: pathlib.Path, method: str, at: int
) -> None:
    """Of the first task or the second, which are told of thrice each; no calibration is seen before it is done."""
    steps = 30
    whole, killed = (copied(light, tmp_path / name) for name in ("whole", "killed"))
    request = CalibrationRequest(name="trained", method=method, parameters={"steps": steps})
    calibrate(whole, request.changed(attribution=False))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), method, str(steps), str(at)], check=False, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL
    kept = list(killed.rglob("training/*.safetensors"))
    assert kept and "trained" not in open_run(killed).manifest.calibrations
    with pytest.raises(SpecError, match=r"had another settings\.steps: 30, now 31"):
        calibrate(
            killed, CalibrationRequest(name="trained", method=method, parameters={"steps": 31}, resume=True)
        )
    calibrate(killed, request.changed(resume=True, attribution=False))
    file = f"calibrations/trained/{FILES[method]}.safetensors"
    found, wanted = load_file(killed / file), load_file(whole / file)
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in wanted)
    assert verify(killed).ok and not list(killed.rglob("training"))
    one, other = (
        open_run(run).layers(variant="calibrated:trained")["drift_l2_mean"] for run in (whole, killed)
    )
    assert one.tolist() == other.tolist()
