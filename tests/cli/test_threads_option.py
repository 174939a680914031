"""`--threads`: what the command computes with, before the variable of the same meaning."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from driftlens.base.errors import Cancelled
from tests.cli.conftest import Cli

COMMANDS = {
    "analyze": ("driftlens.jobs.analyze.job.analyze", ("{spec}",)),
    "evaluate": ("driftlens.jobs.analyze.job.evaluate", ("run",)),
    "calibrate": ("driftlens.jobs.calibrate.job.calibrate", ("run", "--name", "x")),
    "sweep": ("driftlens.jobs.contest.sweep.sweep", ("run", "--param", "lam=0.1")),
    "validate": ("driftlens.jobs.preflight.job.preflight", ("{spec}",)),
    "demo": ("driftlens.suites.embedded.embedded_suite", ("--out", "demo")),
}


@pytest.fixture
def spec(world: Any, spec_file: pathlib.Path) -> pathlib.Path:
    from driftlens.spec import load_spec

    spec_file.write_text(load_spec(world.spec()).dump())
    return spec_file


@pytest.mark.parametrize("command", COMMANDS)
def test_the_option_decides_before_the_variable(
    command: str, spec: pathlib.Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, arguments = COMMANDS[command]
    found: list[int] = []

    def job(*_: Any, **__: Any) -> None:
        found.append(torch.get_num_threads())
        raise Cancelled("cancelled")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(spec.parent)
    monkeypatch.setattr(place, job)
    given = [part.format(spec=spec) for part in arguments]
    before = torch.get_num_threads()
    assert run_cli(command, *given, "--threads", 2).code == Cancelled.exit_code
    monkeypatch.setenv("DRIFTLENS_THREADS", "3")
    run_cli(command, *given)
    run_cli(command, *given, "--threads", 2)
    assert found == [2, 3, 2] and torch.get_num_threads() == before
    assert run_cli(command, *given, "--threads", 0).code == 2
