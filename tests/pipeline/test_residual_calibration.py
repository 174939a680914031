"""Residual calibration of a run: what is recorded of it, how it goes on, and what it doesn't read."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
from safetensors.torch import load_file

from driftlens.base.access import Context
from driftlens.base.progress import ProgressEvent
from driftlens.jobs.calibrate import job
from driftlens.jobs.calibrate.job import solve
from driftlens.runs.run import DriftRun
from tests.pipeline.calibrating import NAME, VARIANT, copied, request

WANTED = request(method="residual", parameters={"folds": 2, "ridge": 0.1})


class _Poison:
    """Labels and other samples that nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    def __iter__(self) -> Any:
        raise AssertionError("they were read")


def test_a_run_tells_ridges_and_shares_and_neither_labels_nor_test_samples_are_read(
    light: DriftRun, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[ProgressEvent] = []
    run = job.calibrate(copied(light, tmp_path / "run"), WANTED, Context(on_progress=said.append))
    solving = [(event.done, event.total or 0, event.label) for event in said if event.phase == "calibrate"]
    done = [at for at, _, _ in solving]
    assert done == sorted(done) and done[-1] == solving[-1][1] and all(at <= of for at, of, _ in solving)
    # Layers that gradients go back through are not taken for solved ones.
    weighing = {at / of for at, of, label in solving if label.startswith("weighing tokens")}
    assert len(weighing) > 1 and max(weighing) < 0.5
    rows = run.calibration(NAME)
    assert rows["upstream_share"].between(0, 1).all() and (rows["lam"] > 0).all()
    assert (rows["upstream_ridge"] > 0).all() and set(rows["kind"]) == {"linear"}
    assert "Upstream repair supported" in (run.path / f"calibrations/{NAME}/README.md").read_text()
    assert VARIANT in set(run.layers()["variant"])

    def blind(writer: Any, study: Any, plan: Any, *rest: Any) -> Any:
        samples = {task: dataclasses.replace(of, labels=_Poison()) for task, of in plan.samples.items()}
        tasks = {
            task: dataclasses.replace(at, diagnosis=_Poison(), test=_Poison(), calibration=samples[task])
            for task, at in study.tasks.items()
        }
        shown = dataclasses.replace(study, tasks=tasks)
        return solve(writer, shown, dataclasses.replace(plan, samples=samples), *rest)

    monkeypatch.setattr(job, "solve", blind)
    poisoned = job.calibrate(copied(light, tmp_path / "poisoned"), WANTED)
    weights = [
        load_file(found.path / f"calibrations/{NAME}/weights.safetensors") for found in (run, poisoned)
    ]
    assert all(bool((weights[0][key] == value).all()) for key, value in weights[1].items())
