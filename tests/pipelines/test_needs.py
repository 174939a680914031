"""Memory and disk by headers and shapes, compared with what commands on an embedded suite really take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from driftlens.config.spec import load_spec
from driftlens.demo import spec_file
from driftlens.pipelines.validate import preflight
from tests.quick import few
from tests.zoo.decoders import MORE
from tests.zoo.suite import spec_of

FACTOR = 1.5
"""A sum of headers and shapes is to be right within this factor."""


def peak_of(*arguments: object, output: Path) -> int:
    """Return the peak of resident memory, in bytes, of one command in a process of its own."""
    command = [sys.executable, "-m", "driftlens", *map(str, arguments)]
    with output.open("wb") as file, subprocess.Popen(command, stdout=file) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output.read_text()
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bytes_below(folder: Path, *names: str) -> int:
    """Return the bytes of all files in these parts of a run."""
    return sum(file.stat().st_size for name in names for file in (folder / name).rglob("*") if file.is_file())


@pytest.mark.parametrize("suite", few(["image", "text"], (), some=["text"]))
def test_peaks_of_an_embedded_suite_are_within_a_factor_of_the_sum(suite: str, tmp_path: Path) -> None:
    spec, run, out = spec_file(suite), tmp_path / "run", tmp_path / "out.txt"
    peak_of("validate", spec, "--json", output=out)
    needs = json.loads(out.read_text())["needs"]
    peaks = {"analyze": peak_of("analyze", spec, "--out", run, "--no-attribution", output=out)}
    stored = {"analyze": bytes_below(run, "models", "features")}
    calibrate = ("calibrate", run, "--name", "featcal", "--no-attribution")
    peaks["calibrate"] = peak_of(*calibrate, output=out)
    stored["calibrate"] = bytes_below(run, "models", "features", "calibrations") - stored["analyze"]
    for job, peak in peaks.items():
        assert peak / FACTOR < needs[job]["memory_bytes"] < peak * FACTOR, (job, peak, needs[job])
        assert stored[job] / FACTOR < needs[job]["disk_bytes"] < stored[job] * FACTOR, (job, stored, needs)


@pytest.mark.parametrize("family", few(["Gemma 3n", "Gemma 4"], quick=["Gemma 4"]))
def test_layers_that_read_keys_and_values_of_earlier_ones_are_ready(family: str, tmp_path: Path) -> None:
    config = MORE[family]
    assert config.num_kv_shared_layers == 2
    found = preflight(load_spec(spec_of(config, tmp_path)))
    assert not found.problems, found.text()
    assert found.needs["analyze"].memory_bytes > found.needs["analyze"].disk_bytes > 0
