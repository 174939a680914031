"""Drift and accuracy come first, where the drift comes from afterwards: at once, later, or after an interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.pipelines.analyze import measure_missing_parts, thumbnail
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.drift import TracedFeatures
from driftlens.results.listing import find_runs
from driftlens.runs.manifest import THUMB_SIDE as SIDE
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import Cancelled, SpecError
from driftlens.utils.progress import CancelToken, ProgressEvent
from driftlens.utils.registry import diagnostics
from driftlens_reports.terminal import run_summary_text
from tests.pipelines.calibrating import CONTROL, NAME, TABLES, VARIANT, copied, request
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.world import TASKS, World

pytestmark = pytest.mark.slow

METRICS = {"jacobian": {"samples": 2}, "cka": True}
BY_ATTRIBUTION = [
    column.name
    for entry in diagnostics.values()
    if (entry.needs, entry.table) == ("jacobian", "layers")
    for column in entry.columns
]


@pytest.fixture(scope="module")
def at_once(finished: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run and a calibration of it in one go; read-only."""
    return calibrate(copied(finished, tmp_path_factory.mktemp("at-once") / "run"), request())


def finished_phases(run: DriftRun) -> list[str]:
    """Names of phases in the order in which they were done, by the events."""
    events = map(json.loads, (run.path / "events.jsonl").read_text().splitlines())
    return [event["name"] for event in events if event["event"] == "phase" and event["state"] == "done"]


def same(found: DriftRun, expected: DriftRun) -> None:
    """Every row of every table, in the same order, bit for bit."""
    assert found.variants == expected.variants
    for table in TABLES:
        frames = [getattr(run, table)() for run in (found, expected)]
        keys = [name for name in ("variant", "task", "layer", "scope", "path") if name in frames[0]]
        rows = [frame.sort_values(keys, kind="stable").reset_index(drop=True) for frame in frames]
        pd.testing.assert_frame_equal(*rows, check_exact=True, obj=table)


def unexplained(run: DriftRun, variant: str) -> bool:
    rows = run.layers(variant=variant)
    assert len(rows) and rows["drift_l2_mean"].notna().all()
    return bool(rows[BY_ATTRIBUTION].isna().all(axis=None))


def test_an_analysis_measures_all_tasks_before_it_explains_one(finished: DriftRun) -> None:
    phases = finished_phases(finished)
    firsts = [phases.index(f"{kind}:{task}") for task in TASKS for kind in ("analyze", "evaluate")]
    assert max(firsts) < min(phases.index(f"explain:{task}") for task in TASKS)


def test_a_calibration_is_there_with_drift_and_accuracy_before_it_is_explained(
    finished: DriftRun, at_once: DriftRun, tmp_path: Path
) -> None:
    seen: list[tuple[list[str], DriftRun, pd.DataFrame, pd.DataFrame]] = []

    def look(run: DriftRun) -> None:
        assert {VARIANT, CONTROL} <= set(run.variants) and NAME in run.manifest.calibrations
        assert unexplained(run, VARIANT) and unexplained(run, CONTROL)
        seen.append((finished_phases(run), run, run.layers(), run.accuracy()))

    run = calibrate(copied(finished, tmp_path / "run"), request(), on_measured=look)
    ((phases, early, layers, accuracy),) = seen
    own = [name for name in phases if name.startswith("calibrate:")]
    steps = [f"calibrate:{NAME}:{kind}:{task}" for kind in ("analyze", "evaluate") for task in TASKS]
    assert own == [f"calibrate:{NAME}", *steps]
    later = [name for name in finished_phases(run) if name.startswith("calibrate:")][len(own) :]
    explained = [f"calibrate:{NAME}:explain:{task}" for task in TASKS]
    assert later == [f"calibrate:{NAME}:digests", f"calibrate:{NAME}:params", *explained]
    columns = [name for name in layers if name not in BY_ATTRIBUTION]
    pd.testing.assert_frame_equal(layers[columns], run.layers()[columns], check_exact=True)
    pd.testing.assert_frame_equal(accuracy, run.accuracy(), check_exact=True)
    assert early.path == run.path and not unexplained(run, VARIANT)
    same(run, at_once)


@pytest.mark.slow
def test_an_attribution_that_comes_later_is_the_one_that_comes_at_once(
    world: World, at_once: DriftRun, tmp_path: Path
) -> None:
    run = dl.analyze(world.spec(metrics=METRICS), out=tmp_path / "run", progress="none", attribution=False)
    calibrate(run.path, request(attribution=False))
    left = open_run(run.path)
    assert unexplained(left, "merged") and unexplained(left, VARIANT)
    assert find_runs(run.path)[0].state == "done" and not any("explain" in name for name in left.manifest.phases)
    same(dl.open_run(run.path).measure(), at_once)
    before = open_run(run.path).manifest
    measure_missing_parts(run.path)  # nothing is missing any more
    assert open_run(run.path).manifest.phases == before.phases and verify_files(run.path).ok


def test_a_run_that_was_explained_as_it_was_measured_is_left_as_it_is(finished: DriftRun, tmp_path: Path) -> None:
    """Older runs have the attribution in their rows and no phase of their own for it."""
    folder = copied(finished, tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["phases"] = {name: at for name, at in manifest["phases"].items() if "explain" not in name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    same(measure_missing_parts(folder), finished)
    assert not any("explain" in name for name in open_run(folder).manifest.phases)


def test_samples_run_through_all_layers_once_unless_the_feature_budget_is_too_small(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[str] = []
    walk = TracedFeatures.walk

    def count(self: TracedFeatures, *arguments: Any) -> None:
        walks.append(self.pull_back.task)
        walk(self, *arguments)

    monkeypatch.setattr(TracedFeatures, "walk", count)
    metrics = {"jacobian": {"samples": 3}, "prefix": True}
    kept = dl.analyze(world.spec(metrics=metrics), out=tmp_path / "kept", progress="none")
    calibrate(kept.path, request())
    assert not walks
    small = world.spec(metrics=metrics, compute={"feature_budget": 4096})
    again = dl.analyze(small, out=tmp_path / "again", progress="none")
    calibrate(again.path, request())
    assert walks == [*TASKS, *TASKS]
    runs = map(open_run, (again.path, kept.path))
    found, expected = (run.layers()[BY_ATTRIBUTION].to_numpy(dtype=float) for run in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_run_without_jacobians_is_explained_with_their_defaults(light: DriftRun, tmp_path: Path) -> None:
    run = measure_missing_parts(copied(light, tmp_path / "run"))
    rows = run.layers(variant="merged")
    assert rows["jacobian_samples"].tolist() == [5] * len(rows)  # all diagnosis samples there are
    assert rows.groupby("task")["final_share"].sum().between(0.99, 1.01).all()


@pytest.mark.slow
def test_an_attribution_that_was_cancelled_goes_on(finished: DriftRun, at_once: DriftRun, tmp_path: Path) -> None:
    folder, token = copied(finished, tmp_path / "run"), CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "explain" and TASKS[1] in event.label:
            token.cancel()

    with pytest.raises(Cancelled) as caught:
        calibrate(folder, request(), JobContext(on_progress=stop, cancel=token))
    assert f"`driftlens analyze {folder}`" in caught.value.hint
    stopped = open_run(folder)
    assert VARIANT in stopped.variants and unexplained(dl.open_run(folder), VARIANT) is False
    (summary,) = find_runs(folder)
    assert summary.state == "done" and "ended early (cancelled)" in summary.left[0]
    again = copied(stopped, tmp_path / "again")
    same(measure_missing_parts(folder), at_once)
    same(calibrate(again, request(resume=True)), at_once)
    assert verify_files(folder).ok and not verify_files(folder).unlisted and find_runs(folder)[0].left == ()


KILLED = """
import os, sys
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.drift import TracedFeatures
from driftlens.config.requests import CalibrationRequest
calibrate(sys.argv[1], CalibrationRequest(name=sys.argv[2]), on_measured=lambda run: os._exit(9))
"""


@pytest.mark.slow
def test_a_calibration_that_is_killed_behind_its_first_numbers_goes_on(
    finished: DriftRun, at_once: DriftRun, tmp_path: Path
) -> None:
    folder = copied(finished, tmp_path / "run")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder), NAME], env=os.environ, check=False)
    assert ended.returncode == 9
    killed = open_run(folder)
    assert VARIANT in killed.variants and unexplained(killed, VARIANT)
    resumed = calibrate(folder, request(resume=True))
    same(resumed, at_once)
    assert resumed.manifest.models[VARIANT].digest == at_once.manifest.models[VARIANT].digest
    assert verify_files(folder).ok and not verify_files(folder).unlisted
    assert (folder / "calibrations" / NAME / "README.md").is_file()
    assert not any((folder / "scratch").iterdir())


@pytest.mark.slow
def test_what_was_left_out_is_added_to_the_run_bit_for_bit(world: World, tmp_path: Path) -> None:
    asked = {"cka": True, "adjoint": True, "contributions": True}
    whole, bare = (
        dl.analyze(
            world.one_task(metrics={"jacobian": {"samples": 2}, **metrics}),
            out=tmp_path / name,
            progress="none",
        )
        for name, metrics in (("whole", asked), ("bare", dict.fromkeys(asked, False)))
    )
    assert bare.layers()["cka"].isna().all() and bare.adjoint().empty
    told = bare.measure(add=[*asked])
    for table in ("layers", "adjoint"):
        found, expected = (getattr(run, table)() for run in (told, whole))
        pd.testing.assert_frame_equal(found, expected, check_exact=True, obj=table)
    times = [phase.started for phase in told.manifest.phases.values()]
    assert [phase.started for phase in told.measure(add=[*asked]).manifest.phases.values()] == times
    with pytest.raises(SpecError, match="no diagnostic 'ckA' to add") as caught:
        bare.measure(add="ckA")
    assert "cka" in caught.value.hint


def test_scores_may_be_left_out_and_added_later(world: World, tmp_path: Path) -> None:
    """Repairs alone are scored, for studies that know the scores of the other models."""
    run = dl.analyze(world.spec(metrics={"jacobian": False}), out=tmp_path / "run", progress="none", scores=False)
    assert run.accuracy().empty
    for name, lam in (("one", 0.1), ("two", 10.0)):
        run = dl.calibrate(run, name=name, method="featcal", parameters={"lam": lam}, progress="none")
    scored = set(run.accuracy()["variant"])
    assert {"calibrated:one", "calibrated:two"} <= scored and not {"base", "merged", "expert"} & scored
    shown = run_summary_text(run)
    assert "one" in shown and "two" in shown and f"Next: `driftlens analyze {run.path}`" in shown
    dl.Report(run).save(tmp_path / "report")
    whole = run.measure()
    assert scored | {"base", "merged", "expert"} == set(whole.accuracy()["variant"])


def test_a_picture_keeps_its_proportions_between_grey_bars() -> None:
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :, 0] = 255
    small = thumbnail(pixels)
    assert small.shape == (SIDE, SIDE, 3)
    assert (small[SIDE // 4 : 3 * SIDE // 4] == [255, 0, 0]).all()
    assert (small[: SIDE // 4] == 128).all() and (small[-SIDE // 4 :] == 128).all()


def test_an_analysis_keeps_a_picture_of_every_diagnosis_sample(light: DriftRun) -> None:
    for task in light.tasks:
        found = light.thumbs(task)
        assert found is not None and len(found) == len(light.sample_ids(task))
        assert f"thumbs/{task}.npz" in light.manifest.files


class Blocks(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), activation(), nn.Linear(12, 12)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def analysed(activation: type[nn.Module], out: Path) -> dl.DriftRun:
    base = with_seed(lambda: Blocks(activation))().double()
    data = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dl.analyze(
        base=base,
        merged=perturbed(base, 1, scale=0.4),
        experts={"a": perturbed(base, 2, scale=0.4)},
        data={"a": data},
        jacobian=dl.JacobianSettings(nodes=4, max_nodes=16, tolerance=1e-5, samples=6),
        out=out,
        progress="none",
    )


def test_a_kink_is_said_with_its_error(tmp_path: Path) -> None:
    run = analysed(nn.ReLU, tmp_path / "run")
    (warning,) = run.manifest.warnings
    worst = run.layers(variant="merged").set_index("layer")["jacobian_error"].astype(float)
    assert "misses the tolerance 1e-05" in warning and "after 16 nodes" in warning
    assert f"layer {worst.idxmax()} (error {worst.max():.1e})" in warning
    head = run.layers(variant="merged", layer="final")
    shares = run.layers(variant="merged")["final_share"].sum() + head["remainder_share"].sum()
    assert shares == pytest.approx(1, abs=1e-9)
    assert abs(float(head["remainder_share"].iloc[0])) > 1e-6


def test_a_smooth_activation_raises_nothing(tmp_path: Path) -> None:
    assert analysed(nn.Tanh, tmp_path / "run").manifest.warnings == []


METHODS = ("cpu", "numpy", "tolist")


"""Pictures are made tensors on the CPU, wherever models are."""
