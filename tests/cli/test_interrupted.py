"""Runs that are killed, cancelled, locked, resumed or damaged: real processes, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd
import pytest

from driftlens.cli.app import cancel_on_signals, interrupt_on_signals
from driftlens.runs.manifest import read_lock_owner
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import Cancelled, RunError
from tests.cli.conftest import Cli
from tests.cli.worker import COMMAND, analyzing
from tests.zoo.world import TASKS, World, write_spec

TABLES = ("layers", "samples", "outputs", "params", "accuracy")


def same_tables(one: DriftRun, other: DriftRun) -> None:
    for table in TABLES:
        pd.testing.assert_frame_equal(getattr(one, table)(), getattr(other, table)(), check_exact=True, obj=table)
    for file in sorted(other.path.rglob("*.npy")):
        relative = file.relative_to(other.path)
        assert (one.path / relative).read_bytes() == file.read_bytes(), relative


def states(run: DriftRun) -> dict[str, str]:
    return {name: phase.state for name, phase in run.manifest.phases.items()}


@pytest.fixture
def spec(world: World, finished: DriftRun, spec_file: Path) -> Path:
    """The spec behind `finished`."""
    return write_spec(spec_file, world.spec(metrics={"jacobian": {"samples": 2}, "cka": True}))


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_very_same_tables(
    spec: Path, tmp_path: Path, run_cli: Cli, finished: DriftRun
) -> None:
    out = tmp_path / "run"
    with analyzing(spec, out) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = open_run(out)
    first = killed.manifest.phases[f"analyze:{TASKS[0]}"]
    assert states(killed) == {
        **dict.fromkeys(["merge", "digests", f"analyze:{TASKS[0]}"], "done"),
        f"analyze:{TASKS[1]}": "running",
    }
    assert run_cli("ls", tmp_path).out.count("stopped") == 1

    early = run_cli("analyze", out)
    assert early.code == 4 and f"analyze:{TASKS[1]}" in early.message and "--resume" in early.hint
    changed = ("analyze", spec, "--out", out, "--resume", "--set", "data.defaults.seed=7")
    refused = run_cli(*changed)
    assert (
        refused.code == 2
        and "another data.defaults.seed: 0, now 7" in refused.message
        and str(out / "spec.yaml") in refused.hint
    )

    assert run_cli("analyze", spec, "--out", out, "--resume", "--progress", "none").code == 0
    resumed = open_run(out)
    same_tables(resumed, finished)
    assert set(states(resumed).values()) == {"done"}
    assert resumed.manifest.phases[f"analyze:{TASKS[0]}"] == first, "a finished phase should not be done again"
    assert run_cli("check", out).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_behind_an_error_does_not_take_its_place(number: signal.Signals) -> None:
    """As torchrun's does, which stops all processes as soon as one is gone; one behind a cancelled job is heard."""
    for error, heard in (
        (RunError("process 1 is gone"), RunError),
        (Cancelled("cancelled"), KeyboardInterrupt),
    ):
        with pytest.raises(heard), interrupt_on_signals(last=False):
            try:
                with cancel_on_signals():
                    raise error
            finally:
                signal.raise_signal(number)


@pytest.mark.slow
def test_a_second_writer_is_refused_and_ctrl_c_cancels(
    spec: Path, tmp_path: Path, run_cli: Cli, finished: DriftRun
) -> None:
    out = tmp_path / "run"
    with analyzing(spec, out) as process:
        for second in (("--resume",), ("--force",), ()):
            refused = run_cli("analyze", spec, "--out", out, "--progress", "none", *second)
            assert refused.code == 5 and f"process {process.pid}" in refused.message
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, written = process.communicate(timeout=300)
        assert process.returncode == 130
    assert "Traceback" not in written and "--resume" in written
    run = open_run(out)
    assert run.status is not None and run.status.state == "cancelled"
    assert states(run)[f"analyze:{TASKS[1]}"] == "cancelled"
    assert read_lock_owner(out) is None and not list(out.rglob(".partial-*"))
    assert run_cli("analyze", spec, "--out", out, "--resume", "--progress", "none").code == 0
    same_tables(open_run(out), finished)


@pytest.mark.slow
def test_a_terminal_that_is_closed_cancels(spec: Path, tmp_path: Path) -> None:
    """Its SIGHUP is heard, and what can't be written there any more is no further error."""
    pty = pytest.importorskip("pty")
    out = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND[0], [*COMMAND, "analyze", str(spec), "--out", str(out), "--progress", "rich"])
    seen = b""
    while b"measuring drift" not in seen:
        seen += os.read(terminal, 1024)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130, seen
    run = open_run(out)
    assert run.status is not None and run.status.state == "cancelled"
    assert read_lock_owner(out) is None and not list(out.rglob(".partial-*"))
