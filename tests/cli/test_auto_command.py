"""`driftlens calibrate --auto`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

from driftlens.records.run import DriftRun, open_run
from tests.cli.conftest import Result
from tests.pipeline.calibrating import NAME, copied, files_of
from tests.pipeline.roomy import roomy_run
from tests.pipeline.world import World

QUIET = ("--progress", "none")


def test_too_few_samples_to_hold_any_out_are_refused_and_leave_no_trace(
    light: DriftRun, tmp_path: pathlib.Path, run_cli: Callable[..., Result]
) -> None:
    folder = copied(light, tmp_path / "run")
    before = files_of(folder)
    refused = run_cli("calibrate", folder, "--name", NAME, "--auto", *QUIET)
    assert refused.code == 4 and "has 4 calibration samples" in refused.message and "preset" in refused.hint
    assert files_of(folder) == before


def test_the_settings_chosen_are_those_calibrated_with(
    world: World, tmp_path: pathlib.Path, run_cli: Callable[..., Result]
) -> None:
    folder = roomy_run(world, tmp_path).path
    flags = ("--name", NAME, "--auto", "--lam", 50, "--rho", 4, "--layers", "2")
    rehearsed = run_cli("calibrate", folder, *flags, "--dry-run")
    assert rehearsed.code == 0 and "--auto would first calibrate candidates" in rehearsed.err
    found = json.loads(run_cli("calibrate", folder, *flags, "--json", *QUIET).out)
    assert found["automatic"] and (found["settings"]["lam"], found["settings"]["rho"]) != (50.0, 4.0)
    assert set(open_run(folder).calibration(NAME)["lam"]) == {found["settings"]["lam"]}
