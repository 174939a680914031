"""`driftlens demo` on the small world in place of the embedded suite, and the numbers of the embedded one."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from driftlens.results.verdict import verdict
from driftlens.runs.run import open_run
from tests.cli.conftest import Cli
from tests.pipelines.calibrating import CONTROL, VARIANT
from tests.published import has_published_numbers
from tests.zoo.world import TASKS, World, write_spec

RESIDUAL = "calibrated:residual"


@pytest.mark.slow
def test_the_demo_analyzes_calibrates_and_shows_before_and_after(
    world: World, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(tmp_path / "run.yaml", world.spec(metrics={"jacobian": False}))
    monkeypatch.setattr("driftlens.demo.spec_file", lambda _: spec)
    result = run_cli("demo", "--suite", "image", "--out", tmp_path / "demo")
    assert result.code == 0
    told = re.findall(r"^(.+?): ([a-z ]+): done in", result.err, re.MULTILINE)
    assert {("merged model", "measuring drift"), ("featcal", "solving"), ("residual", "measuring drift")} < {*told}
    assert [*dict.fromkeys(whom for whom, _ in told)] == ["merged model", "featcal", "residual"]
    run = open_run(tmp_path / "demo")
    assert run.manifest.synthetic and run.variants == ("base", "merged", CONTROL, VARIANT, RESIDUAL)
    settings = run.manifest.calibrations["featcal"].settings
    assert (settings["lam"], settings["rho"], settings["alpha"]) == (0.05, 2.0, 0.3)
    assert all(sentence in result.out for sentence in verdict(run).sentences)
    for task in TASKS:
        assert f"{100 * run.value('drift_rel', task=task, variant=RESIDUAL):.1f} %" in result.out
    models = result.out[result.out.index("All models, means over tasks") :].splitlines()
    assert [line.split()[0] for line in models[2:7]] == ["base", "merged", "featcal", "residual", "expert"]
    assert all("%" in line for line in models[2:7])
    assert "featcal, anchor only" not in result.out and (tmp_path / "demo/reports/report.html").is_file()
    assert run_cli("demo", "--suite", "image", "--out", tmp_path / "demo").code == 2


@pytest.mark.slow
def test_attribution_is_left_out_and_added_later(world: World, spec_file: Path, tmp_path: Path, run_cli: Cli) -> None:
    spec, out = write_spec(spec_file, world.one_task(metrics={"jacobian": {"samples": 2}})), tmp_path / "run"
    assert run_cli("analyze", spec, "--out", out, "--no-attribution", "--progress", "none").code == 0
    assert open_run(out).layers()["final_share"].isna().all()
    done = run_cli("calibrate", out, "--name", "featcal", "--no-attribution", "--progress", "none")
    task, run = world.tasks[0], open_run(out)
    first = next(line for line in done.err.splitlines() if line.startswith(task))
    values = [run.accuracy(task, name)["value"].iloc[0] for name in ("base", "expert", "merged", VARIANT)]
    drift = run.value("drift_rel", task=task, variant=VARIANT)
    told = re.findall(r"([\d.]+) %", first)
    assert told == [f"{100 * value:.1f}" for value in (*values, drift)], first
    assert open_run(out).layers()["final_share"].isna().all()
    shown = run_cli("analyze", out, "--json", "--progress", "none")
    assert shown.code == 0 and json.loads(shown.out)
    rows = open_run(out).layers()
    assert {*rows.loc[rows["drift_rel"].notna(), "variant"]} == {"base", "merged", CONTROL, VARIANT}
    shares = rows.groupby("variant")["final_share"].sum(min_count=1).dropna()
    assert shares.between(0.99, 1.01).all() and {*shares.index} == {"merged", VARIANT}


@pytest.mark.slow
def test_readme_and_docs_have_the_demos_numbers(tmp_path: Path, run_cli: Cli) -> None:
    """Of the images, in a new run or the one that is made as DRIFTLENS_DEMO; of the texts, in that of the notebooks."""
    made = Path(os.environ.get("DRIFTLENS_DEMO", tmp_path / "demo"))
    if "DRIFTLENS_DEMO" in os.environ:
        while not made.exists():
            time.sleep(1)
    else:
        result = run_cli("demo", "--suite", "image", "--out", made, "--progress", "none")
        assert result.code == 0, result.err
    has_published_numbers(open_run(made), "image")
