"""`driftlens demo` on the small world in place of the embedded suite, which takes minutes to make."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace

import pytest

from driftlens.findings.verdict import verdict
from driftlens.runs.run import open_run
from driftlens.suites.text import text_suite
from tests.cli.conftest import Cli
from tests.pipeline.calibrating import CONTROL, VARIANT
from tests.suites.conftest import TINY_TEXT
from tests.zoo.world import TASKS, World


def test_the_demo_analyzes_calibrates_and_shows_before_and_after(
    world: World, tmp_path: pathlib.Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SimpleNamespace(spec=lambda: world.spec(metrics={"jacobian": False}))
    monkeypatch.setattr("driftlens.suites.embedded.embedded_suite", lambda **_: suite)
    result = run_cli("demo", "--out", tmp_path / "demo", "--progress", "none")
    assert result.code == 0
    run = open_run(tmp_path / "demo")
    assert run.manifest.synthetic and run.variants == ("base", "merged", CONTROL, VARIANT)
    settings = run.manifest.calibrations["featcal"].settings
    assert (settings["lam"], settings["rho"], settings["alpha"]) == (0.05, 2.0, 0.3)
    assert all(sentence in result.out for sentence in verdict(run).sentences)
    for task in TASKS:
        assert f"{100 * run.value('drift_rel', task=task, variant=VARIANT):.1f} %" in result.out
    assert "featcal, anchor only" in result.out and (tmp_path / "demo/reports/report.html").is_file()
    assert run_cli("demo", "--out", tmp_path / "demo").code == 2


@pytest.mark.slow
def test_the_demo_runs_on_the_text_suite(
    common: pathlib.Path, tmp_path: pathlib.Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_suite(cache=common / "suites", recipe=TINY_TEXT)
    monkeypatch.setattr("driftlens.suites.text.text_suite", lambda **_: text)
    result = run_cli("demo", "--suite", "text", "--out", tmp_path / "demo", "--progress", "none")
    assert result.code == 0, result.err
    run = open_run(tmp_path / "demo")
    settings = run.manifest.calibrations["featcal"].settings
    assert (settings["lam"], settings["rho"], settings["alpha"]) == (1e-5, 0.5, 0.15)
    experts = run.accuracy().query("variant == 'expert'").set_index("task")["value"]
    assert dict(experts) == pytest.approx(
        {name: each["expert"] for name, each in text.record()["test_accuracy"].items()}
    )
    final = run.layers(variant="calibrated:featcal", layer="final")
    assert len(final) == 4 and final["closure_error"].max() < 1e-4
    assert (tmp_path / "demo/reports/report.html").is_file()
