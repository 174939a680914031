"""Beside the button of Calibrate: what the last work took, and what would stop a calibration, without asking."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from driftlens.records.lock import RunLock
from driftlens.records.run import DriftRun, open_run
from driftlens.records.writer import RunWriter
from driftlens_app import outlook
from driftlens_app.jobs import processes
from driftlens_app.outlook import obstacles, past_cost
from tests.app.conftest import Open
from tests.app.test_calibrate import press
from tests.app.test_pages import said

pytestmark = pytest.mark.usefixtures("worker")
START = "A calibration can't begin: "


@pytest.fixture
def run(root: Path) -> Path:
    """A run whose spec names weights that are there."""
    run = root / "full"
    for name in ("base", "expert"):
        (root / f"{name}.safetensors").write_bytes(b"x" * 1_500_000)
    spec = {
        "version": 1,
        "architecture": {"loader": "open-clip", "source": "ViT-tiny"},
        "base": {"weights": str(root / "base.safetensors")},
        "experts": {task: {"weights": str(root / "expert.safetensors")} for task in ("cars", "mnist")},
        "merge": {"method": "average"},
    }
    (run / "spec.yaml").write_text(json.dumps(spec))
    with RunWriter.resume(run) as writer:
        for task in writer.manifest.tasks:
            with writer.phase(f"analyze:{task}"):
                pass
    return run


def edit(run: Path, entry: str, **values: Any) -> DriftRun:
    """The run after values of one entry of its manifest were replaced or added."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest[entry] |= values
    (run / "manifest.json").write_text(json.dumps(manifest))
    return open_run(run)


def phases(**seconds: float | None) -> dict[str, Any]:
    """Finished phases of calibrations, `featcal_params` for "calibrate:featcal:params"."""
    return {
        f"calibrate:{name.replace('_', ':')}": {"state": "done", "seconds": value, "started": ""}
        for name, value in seconds.items()
    }


def test_the_page_says_what_the_analysis_took_and_asks_nobody(open_app: Open, root: Path, run: Path) -> None:
    app = open_app(root, "calibrate")
    resources = open_run(run).resources()
    peak = f"{resources['peak_rss_bytes'].max() / 1e6:,.1f} MB"
    assert "The analysis of this run took" in said(app) and f"up to {peak} of memory" in said(app)
    assert START not in said(app) and not processes._CHILDREN


def test_the_newest_calibration_says_more_than_the_analysis(open_app: Open, root: Path, run: Path) -> None:
    edit(run, "phases", **phases(featcal=60, featcal_params=5, other=900))
    assert "The calibration featcal of this run took 1 min 05 s." in said(open_app(root, "calibrate"))
    other = dict(open_run(run).manifest.calibrations["featcal"].__dict__)
    assert past_cost(edit(run, "calibrations", other=other)).startswith(
        "The calibration other of this run took 15 min 00 s"
    )


def test_a_calibration_that_took_anothers_place_is_told_with_its_solving(run: Path) -> None:
    """Its phase began after that; its entry says 12.5 s."""
    opened = edit(run, "phases", **phases(featcal=0.1, featcal_params=5))
    assert "took 18 s." in past_cost(opened)


def test_a_sweep_is_no_part_of_the_analysis(run: Path) -> None:
    before = past_cost(open_run(run))
    swept = edit(run, "phases", **{"sweep:0": {"state": "done", "seconds": 9000, "started": ""}})
    assert past_cost(swept) == before and before.startswith("The analysis of this run took")


@pytest.mark.parametrize("seconds", [None, "x", float("nan"), float("inf")], ids=str)
def test_seconds_that_are_no_number_leave_the_cost_out(
    open_app: Open, root: Path, run: Path, seconds: Any
) -> None:
    edit(run, "phases", **phases(featcal=60, featcal_params=seconds))
    app = open_app(root, "calibrate")
    assert not app.error and "of this run took" not in said(app) and "Press Estimate for" in said(app)


@pytest.mark.parametrize("state", ["failed", "running", None])
def test_of_an_unfinished_run_no_time_is_told_but_what_is_still_to_be_done(
    run: Path, state: str | None
) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    if state is None:
        del manifest["phases"]["analyze:mnist"]
    else:
        manifest["phases"]["analyze:mnist"]["state"] = state
    (run / "manifest.json").write_text(json.dumps(manifest | {"finished": ""}))
    unfinished = open_run(run)
    assert past_cost(unfinished) == "Press Estimate for the settings above."
    assert obstacles(unfinished) == [
        "the run is unfinished; still to be done: analyze:mnist. `driftlens analyze --resume` goes on"
    ]


def test_an_estimate_takes_the_place_of_what_was_known(open_app: Open, root: Path, run: Path) -> None:
    app = press(open_app(root, "calibrate"), "Estimate")
    assert "about 500.0 MB" in said(app) and "The analysis of this run took" not in said(app)


def test_weights_that_have_moved_are_named(open_app: Open, root: Path, run: Path) -> None:
    (root / "expert.safetensors").unlink()
    assert f"{START}there is no file {root / 'expert.safetensors'}; the run's spec" in said(
        open_app(root, "calibrate")
    )
    (root / "base.safetensors").unlink()
    assert f"{START}there is no file {root / 'base.safetensors'} and 1 more" in said(
        open_app(root, "calibrate")
    )
    assert START not in said(open_app(root, "calibrate", read_only=True))


def test_other_obstacles_are_named(run: Path) -> None:
    opened = open_run(run)
    assert obstacles(opened) == []
    lock = RunLock(run)
    lock.acquire()
    (text,) = obstacles(opened)
    assert "is being written to by" in text and str(os.getpid()) in text
    lock.release()
    (run / "spec.yaml").write_text("version: 99\n")
    (text,) = obstacles(opened)
    assert "a newer DriftLens" in text


def test_live_modules_are_an_obstacle(run: Path) -> None:
    opened = edit(run, "architecture", loader="live")
    assert obstacles(opened) == [
        "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    ]


def respecified(run: Path, **values: Any) -> DriftRun:
    """The run with values of its spec replaced."""
    file = run / "spec.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return open_run(run)


def test_calibrated_weights_need_as_much_room_as_the_base_or_the_smallest_expert(
    root: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "free_bytes", lambda _path: 1_400_000)
    assert obstacles(open_run(run)) == ["its weights need 1.5 MB, and the disk has 1.4 MB free"]
    (root / "base.safetensors").write_bytes(b"x" * 1_300_000)  # of smaller numbers than the experts
    assert obstacles(open_run(run)) == []
    (root / "small.safetensors").write_bytes(b"x" * 1_450_000)
    experts = {"cars": {"weights": str(root / "small.safetensors")}}
    experts["mnist"] = {"weights": str(root / "expert.safetensors")}
    without_base = respecified(run, base=None, experts=experts)
    assert obstacles(without_base) == ["its weights need 1.4 MB, and the disk has 1.4 MB free"]


def test_weights_that_can_not_be_looked_at_are_named(open_app: Open, root: Path, run: Path) -> None:
    name = str(root / ("x" * 300))
    respecified(run, base={"weights": name})
    assert f"{START}{name} can't be looked at: File name too long" in said(open_app(root, "calibrate"))
    (text,) = obstacles(respecified(run, base={"weights": f"{root}/\0"}))
    assert text.startswith("there is no file")


def test_a_spec_that_would_block_its_reader_or_is_too_long_is_not_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "load_spec", lambda file: pytest.fail(f"{file} was read"))
    file = run / "spec.yaml"
    file.write_text("#" * 1_000_001)
    assert obstacles(open_run(run)) == ["the run's spec.yaml is larger than 1.0 MB, which no spec needs"]
    file.unlink()
    os.mkfifo(file)
    (text,) = obstacles(open_run(run))
    assert text.startswith("the run's spec.yaml is missing, or no file in the folder")
