"""A further calibration of a finished run, stopped by a real signal: the run is what it was, and says what is left."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from driftlens.records.manifest import read_manifest
from driftlens.records.run import DriftRun, open_run
from tests.cli.conftest import Result
from tests.cli.worker import COMMAND
from tests.pipeline.calibrating import NAME, copied, same_rows

Cli = Callable[..., Result]


@pytest.fixture
def folder(light: DriftRun, tmp_path: pathlib.Path) -> pathlib.Path:
    return copied(light, tmp_path / "run")


PHASES = pytest.mark.parametrize("phase", ["calibrate", pytest.param("analyze", marks=pytest.mark.slow)])
SIGNALS = [
    # The fast tests ask the same of this signal in test_calibrate_command.py.
    pytest.param(signal.SIGINT, id="ctrl-c", marks=pytest.mark.slow),
    pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
]


@contextmanager
def calibrating(folder: pathlib.Path, phase: str) -> Iterator[subprocess.Popen[str]]:
    """A process that calibrates, frozen (SIGSTOP) in the middle of a phase; killed at the end of the block."""
    command = [*COMMAND, "calibrate", str(folder), "--name", NAME, "--progress", "jsonl"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                event = json.loads(line)
                if event["phase"] == phase and event["done"] >= 2:
                    process.send_signal(signal.SIGSTOP)
                    break
            yield process
        finally:
            process.kill()


@PHASES
@pytest.mark.parametrize("sent", SIGNALS)
def test_a_stopped_calibration_leaves_the_run_done_and_every_file_listed(
    folder: pathlib.Path, light: DriftRun, run_cli: Cli, sent: signal.Signals, phase: str
) -> None:
    with calibrating(folder, phase) as process:
        process.send_signal(sent)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=300)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[sent]
    same_rows(open_run(folder), light)
    assert set(read_manifest(folder).files) == set(light.manifest.files)

    listed = run_cli("ls", folder.parent)
    how = {signal.SIGINT: "cancelled", signal.SIGKILL: "interrupted"}[sent]
    assert " done " in listed.out and f"calibration '{NAME}' was {how}" in listed.out
    checked = run_cli("verify", folder)
    assert checked.code == 0 and f"{len(light.manifest.files) + 1} files checked" in checked.out
    assert ("not listed" in checked.out) == ("--resume" in checked.err), "whose the files are should be said"

    table = folder / "tables/layers.parquet"
    whole = table.read_bytes()
    middle = len(whole) // 2
    table.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    checked = run_cli("verify", folder)
    assert checked.code == 4 and "changed: tables/layers.parquet" in checked.out
    table.write_bytes(whole)

    assert run_cli("calibrate", folder, "--name", NAME, "--resume", "--progress", "none").code == 0
    assert NAME in open_run(folder).manifest.calibrations
    checked = run_cli("verify", folder)
    assert checked.code == 0 and "not listed" not in checked.out
    assert "--resume" not in run_cli("ls", folder.parent).out


@pytest.mark.slow
@PHASES
def test_a_run_that_is_removed_ends_its_calibration_and_stays_removed(
    folder: pathlib.Path, phase: str
) -> None:
    with calibrating(folder, phase) as process:
        shutil.rmtree(folder)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 4 and "was removed, moved or replaced" in errors and "hint: " in errors
    assert not folder.exists()
