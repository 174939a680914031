"""A further calibration of a finished run, stopped by a real signal: the run is what it was, and says what is left.

What one that was killed goes on to is, file by file, what it would have been, whatever calibrates and whoever chose.
"""

from __future__ import annotations

import shlex
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from driftlens.models.saving import PatchedSource
from driftlens.pipelines import calibration_plan as variants
from driftlens.pipelines.model_selection import CandidateFitter
from driftlens.results.listing import find_runs
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from tests.cli.conftest import Cli
from tests.cli.worker import Event, frozen
from tests.forked import Forked
from tests.pipelines.calibrating import (
    NAME,
    calibrate_until,
    copied,
    files_of,
    roomy_run,
    same_rows,
    spoil_merged,
)
from tests.zoo.world import TASKS, World

PHASES = pytest.mark.parametrize("phase", ["calibrate", "analyze"])


def middle_of(phase: str) -> Callable[[Event], bool]:
    return lambda event: event["phase"] == phase and event["done"] >= 2


def calibrating(folder: Path, stops: Callable[[Event], bool], *flags: str) -> AbstractContextManager[Forked]:
    return frozen(stops, "calibrate", str(folder), "--name", NAME, *flags)


@pytest.mark.slow
@PHASES
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_calibration_leaves_the_run_done_and_every_file_listed(
    folder: Path, light: DriftRun, run_cli: Cli, sent: signal.Signals, phase: str
) -> None:
    with calibrating(folder, middle_of(phase)) as process:
        process.send_signal(sent)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[sent]
    assert "Traceback" not in errors and ("--resume" in errors) == (sent == signal.SIGINT)
    same_rows(open_run(folder), light)
    assert set(read_manifest(folder).files) == set(light.manifest.files)

    listed = run_cli("ls", folder.parent)
    assert " done " in listed.out and f"calibration '{NAME}' is unfinished" in listed.out
    checked = run_cli("check", folder)
    assert checked.code == 0 and f"{len(light.manifest.files) + 1} files checked" in checked.out
    assert ("not listed" in checked.out) == ("--resume" in checked.err), "whose the files are should be said"

    table = folder / "tables/layers.parquet"
    whole = table.read_bytes()
    middle = len(whole) // 2
    table.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    checked = run_cli("check", folder)
    assert checked.code == 4 and "changed: tables/layers.parquet" in checked.out
    table.write_bytes(whole)

    assert run_cli("calibrate", folder, "--name", NAME, "--resume", "--progress", "none").code == 0
    assert NAME in open_run(folder).manifest.calibrations
    checked = run_cli("check", folder)
    assert checked.code == 0 and "not listed" not in checked.out
    assert "--resume" not in run_cli("ls", folder.parent).out


@pytest.mark.slow
@PHASES
def test_a_run_that_is_removed_ends_its_calibration_and_stays_removed(folder: Path, phase: str) -> None:
    with calibrating(folder, middle_of(phase)) as process:
        shutil.rmtree(folder)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 4 and "was removed, moved or replaced" in errors and "hint: " in errors
    assert not folder.exists()


def of_a_layer(number: int, *, kept: int | None) -> Callable[[Event], bool]:
    """Batches of a layer's last task are being read; of the layers before, this process has solved up to `kept`."""
    label = f"layer {number} of 3, task "
    return lambda event: (
        event["phase"] == "calibrate" and event["label"].startswith(label) and event["metrics"].get("layer") == kept
    )


def in_gradients(event: Event) -> bool:
    """Between the layers through which the experts' gradients go back, before any is solved."""
    return event["phase"] == "calibrate" and event["done"] > 0 and "weighing tokens" in event["label"]


@pytest.mark.slow
def test_a_calibration_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    world: World, tmp_path: Path, run_cli: Cli
) -> None:
    """In the experts' gradients, in the middle of layers, and while its drift is measured."""
    moments = [in_gradients, of_a_layer(3, kept=2), of_a_layer(3, kept=None), middle_of("analyze")]
    run = roomy_run(world, tmp_path)
    folder, whole = copied(run, tmp_path / "killed"), copied(run, tmp_path / "whole")
    flags = ("--method", "residual", "--layers", "2,3")
    quiet = ("--name", NAME, *flags, "--progress", "none")
    assert run_cli("calibrate", whole, *quiet).code == 0
    assert open_run(whole).manifest.calibrations[NAME].layers == [2, 3], "something should be solved"
    for stops in moments:
        with calibrating(folder, stops, *flags, "--resume") as process:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        same_rows(open_run(folder), run)
    assert run_cli("calibrate", folder, *quiet, "--resume").code == 0
    found, expected = (load_file(at / f"calibrations/{NAME}/weights.safetensors") for at in (folder, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    same_rows(open_run(folder), open_run(whole))
    assert files_of(folder).keys() == files_of(whole).keys()
    checked = run_cli("check", folder)
    assert checked.code == 0 and "not listed" not in checked.out


def same_folders(found: Path, expected: Path) -> None:
    """Byte for byte, but for what cards say of times."""
    names = [sorted(file.relative_to(at) for file in at.rglob("*") if file.is_file()) for at in (found, expected)]
    assert names[0] == names[1]
    differing = [name for name in names[0] if (found / name).read_bytes() != (expected / name).read_bytes()]
    assert {name.name for name in differing} <= {"README.md"}, differing


@pytest.mark.slow
@pytest.mark.parametrize("written", [0, 1], ids=["in the run", "saved"])
def test_a_choice_that_is_stopped_while_it_is_written_is_written_whole(
    world: World, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    run = roomy_run(World(world.folder, TASKS[:1]), tmp_path, heads=None)
    folder, whole = copied(run, tmp_path / "stopped"), copied(run, tmp_path / "whole")
    targets = [tmp_path / "saved", tmp_path / "saved_whole"]
    choice = ("--method", "featcal", "--auto", "--layers", "2", "--no-attribution")
    flags = ("--name", NAME, *choice, "--progress", "none")
    save, read, count = variants.save_model, PatchedSource.read, []

    def watched(*given: Any, **named: Any) -> None:
        count.append(given[3])
        save(*given, **named)

    def stopped(self: PatchedSource, *given: Any) -> Any:
        if len(count) == written + 1 and not any(at is None for at in count):
            count.append(None)
            for _ in range(2):  # the second one stops at once
                signal.raise_signal(signal.SIGTERM)
        return read(self, *given)

    spoil_merged(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(variants, "save_model", watched)
        patch.setattr(PatchedSource, "read", stopped)
        ended = run_cli("calibrate", folder, *flags, "--save-weights", targets[0])
    assert ended.code == 130 and None in count and not targets[0].exists()
    assert not [path for path in tmp_path.iterdir() if targets[0].name in path.name], "something half-written stays"
    (left,) = find_runs(folder)[0].left
    monkeypatch.setattr(CandidateFitter, "fit", lambda *_: pytest.fail("candidates were tried again"))
    assert run_cli(*shlex.split(left.split("`")[1])[1:], "--progress", "none").code == 0
    monkeypatch.undo()
    spoil_merged(monkeypatch)
    assert run_cli("calibrate", whole, *flags, "--save-weights", targets[1]).code == 0
    same_folders(*targets)
    assert open_run(folder).manifest.calibrations[NAME].kept == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"lam": 0.1, "update": ["linear"]}, "layers": (2, 3), "attribution": False},
        pytest.param({"preset": "demo-clip", "sites": ["*.mlp.*"], "samples": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_command_that_is_named_goes_on_whatever_was_asked_for(
    folder: Path, run_cli: Cli, changes: dict[str, Any]
) -> None:
    calibrate_until(folder, lambda event: event.phase == "calibrate" and "layer 3" in event.label, **changes)
    (left,) = find_runs(folder)[0].left
    solved = [file.name for file in (folder / f"scratch/calibrate-{NAME}").glob("*.safetensors")]
    assert solved == ["002.safetensors"]
    done = run_cli(*shlex.split(left.split("`")[1])[1:], "--progress", "none")
    assert done.code == 0, done.err
    assert NAME in open_run(folder).manifest.calibrations and find_runs(folder)[0].left == ()
