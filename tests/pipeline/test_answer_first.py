"""Drift and accuracy come first, where the drift comes from afterwards: at once, later, or after an interruption."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import driftlens as dl
from driftlens.base.access import Context
from driftlens.base.diagnostic import diagnostics
from driftlens.base.errors import Cancelled, NumericsError, SpecError
from driftlens.base.progress import CancelToken, ProgressEvent
from driftlens.findings.listing import find_runs
from driftlens.jobs.analyze.job import add_to_run, thumb
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest import merges as merges_module
from driftlens.merging.method import Merge
from driftlens.runs.layout import THUMB_SIDE as SIDE
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from tests.pipeline.calibrating import CONTROL, NAME, TABLES, VARIANT, copied, request
from tests.quick import few
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.world import SCALING, TASKS, World, merged_weights, write_spec

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

    def hear(text: str) -> None:
        assert not seen
        said.append(text)

    said: list[str] = []
    run = calibrate(copied(finished, tmp_path / "run"), request(), on_first=hear, on_measured=look)
    (sentence,) = said
    assert_told_of(run, sentence)
    ((phases, early, layers, accuracy),) = seen
    own = [name for name in phases if name.startswith("calibrate:")]
    steps = [f"calibrate:{NAME}:{kind}:{task}" for kind in ("analyze", "evaluate") for task in TASKS]
    assert own == [f"calibrate:{NAME}", f"calibrate:{NAME}:look", *steps]
    later = [name for name in finished_phases(run) if name.startswith("calibrate:")][len(own) :]
    explained = [f"calibrate:{NAME}:explain:{task}" for task in TASKS]
    assert later == [f"calibrate:{NAME}:digests", f"calibrate:{NAME}:params", *explained]
    columns = [name for name in layers if name not in BY_ATTRIBUTION]
    pd.testing.assert_frame_equal(layers[columns], run.layers()[columns], check_exact=True)
    pd.testing.assert_frame_equal(accuracy, run.accuracy(), check_exact=True)
    assert early.path == run.path and not unexplained(run, VARIANT)
    same(run, at_once)


def assert_told_of(run: DriftRun, sentence: str) -> None:
    """The first look's numbers are those that the tables hold of the same samples."""
    drift, right, size, n = {"merged": 0.0, VARIANT: 0.0}, {"merged": 0, VARIANT: 0, "expert": 0}, 0.0, 0
    for task in run.tasks:
        few = list(run.sample_ids(task))[: run.manifest.calibrations[NAME].samples[task]]
        features = run.features(task, "expert", "final")[: len(few)].astype(np.float64)
        size, n = size + float(np.linalg.norm(features, axis=1).sum()), n + len(few)
        for variant in drift:
            rows = run.samples(task, variant, layer="final").set_index("sample_id").loc[few]
            drift[variant] += rows["drift_l2"].sum()
            outputs = run.outputs(task, variant).set_index("sample_id").loc[few]
            right[variant] += int((outputs["pred"] == outputs["label"]).sum())
        right["expert"] += int((outputs["expert_pred"] == outputs["label"]).sum())
    told = re.fullmatch(
        rf"first look, {n} samples of {len(run.tasks)} tasks: relative drift merged ([\d.]+), {NAME} ([\d.]+); "
        rf"accuracy with 95 % interval \(n = {n}\) merged ([\d.]+) % .*, {NAME} ([\d.]+) % .*, expert ([\d.]+) % .*",
        sentence,
    )
    assert told is not None, sentence
    wanted = [value / size for value in drift.values()]
    assert [float(value) for value in told.groups()[:2]] == pytest.approx(wanted, abs=2e-3)
    assert list(told.groups()[2:]) == [f"{count / n:.1%}".rstrip("%") for count in right.values()]


@pytest.mark.slow
def test_an_attribution_that_comes_later_is_the_one_that_comes_at_once(
    world: World, at_once: DriftRun, tmp_path: Path
) -> None:
    run = dl.analyze(world.spec(metrics=METRICS), out=tmp_path / "run", progress="none", attribution=False)
    calibrate(run.path, request(attribution=False))
    left = open_run(run.path)
    assert unexplained(left, "merged") and unexplained(left, VARIANT)
    assert find_runs(run.path)[0].state == "done" and not any(
        "explain" in name for name in left.manifest.phases
    )
    same(dl.open_run(run.path).measure(), at_once)
    before = open_run(run.path).manifest
    add_to_run(run.path)  # nothing is missing any more
    assert open_run(run.path).manifest.phases == before.phases and verify(run.path).ok


def test_a_run_that_was_explained_as_it_was_measured_is_left_as_it_is(
    finished: DriftRun, tmp_path: Path
) -> None:
    """Older runs have the attribution in their rows and no phase of their own for it."""
    folder = copied(finished, tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["phases"] = {name: at for name, at in manifest["phases"].items() if "explain" not in name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    same(add_to_run(folder), finished)
    assert not any("explain" in name for name in open_run(folder).manifest.phases)


@pytest.mark.slow
def test_a_run_without_jacobians_is_explained_with_their_defaults(light: DriftRun, tmp_path: Path) -> None:
    run = add_to_run(copied(light, tmp_path / "run"))
    rows = run.layers(variant="merged")
    assert rows["jacobian_samples"].tolist() == [5] * len(rows)  # all diagnosis samples there are
    assert rows.groupby("task")["final_share"].sum().between(0.99, 1.01).all()


@pytest.mark.slow
def test_an_attribution_that_was_cancelled_goes_on(
    finished: DriftRun, at_once: DriftRun, tmp_path: Path
) -> None:
    folder, token = copied(finished, tmp_path / "run"), CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "explain" and TASKS[1] in event.label:
            token.cancel()

    with pytest.raises(Cancelled) as caught:
        calibrate(folder, request(), Context(on_progress=stop, cancel=token))
    assert f"`driftlens analyze {folder}`" in caught.value.hint
    stopped = open_run(folder)
    assert VARIANT in stopped.variants and unexplained(dl.open_run(folder), VARIANT) is False
    (summary,) = find_runs(folder)
    assert summary.state == "done" and "driftlens analyze" in summary.left[0]
    again = copied(stopped, tmp_path / "again")
    same(add_to_run(folder), at_once)
    same(calibrate(again, request(resume=True)), at_once)
    assert verify(folder).ok and not verify(folder).unlisted and find_runs(folder)[0].left == ()


KILLED = """
import os, sys
from driftlens.jobs.calibrate.job import calibrate
from driftlens.spec.requests import CalibrationRequest
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
    assert verify(folder).ok and not verify(folder).unlisted
    assert (folder / "calibrations" / NAME / "README.md").is_file()
    assert not any((folder / "scratch").iterdir())


@pytest.mark.slow
def test_no_attribution_leaves_out_what_the_spec_asks_for(world: World, tmp_path: Path) -> None:
    run = dl.analyze(
        world.one_task(metrics={"jacobian": {"samples": 2}, "adjoint": True, "groups": True}),
        out=tmp_path / "run",
        progress="none",
        attribution=False,
    )
    assert unexplained(run, "merged") and run.adjoint().empty and not run.accuracy().empty
    told = run.measure()
    assert len(told.adjoint()) > 0 and len(told.group_contributions()) > 0


@pytest.mark.slow
def test_what_was_left_out_is_added_to_the_run_bit_for_bit(world: World, tmp_path: Path) -> None:
    asked = {"cka": True, "adjoint": True, "groups": True, "contributions": True}
    whole, bare = (
        dl.analyze(
            world.one_task(metrics={"jacobian": {"samples": 2}, **metrics}),
            out=tmp_path / name,
            progress="none",
        )
        for name, metrics in (("whole", asked), ("bare", dict.fromkeys(asked, False)))
    )
    assert bare.layers()["cka"].isna().all() and bare.adjoint().empty and bare.group_contributions().empty
    told = bare.measure(add=[*asked])
    for table in ("layers", "adjoint", "group_contributions"):
        found, expected = (getattr(run, table)() for run in (told, whole))
        pd.testing.assert_frame_equal(found, expected, check_exact=True, obj=table)
    times = [phase.started for phase in told.manifest.phases.values()]
    assert [phase.started for phase in told.measure(add=[*asked]).manifest.phases.values()] == times
    with pytest.raises(SpecError, match="no diagnostic 'ckA' to add") as caught:
        bare.measure(add="ckA")
    assert "cka" in caught.value.hint


def test_a_picture_keeps_its_proportions_between_grey_bars() -> None:
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :, 0] = 255
    small = thumb(pixels)
    assert small.shape == (SIDE, SIDE, 3)
    assert (small[SIDE // 4 : 3 * SIDE // 4] == [255, 0, 0]).all()
    assert (small[: SIDE // 4] == 128).all() and (small[-SIDE // 4 :] == 128).all()


def test_grey_arrays_and_images_give_the_same_picture() -> None:
    grey = np.arange(SIDE * SIDE, dtype=np.uint32).reshape(SIDE, SIDE).astype(np.uint8)
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(thumb(grey), expected)
    np.testing.assert_array_equal(thumb(Image.fromarray(grey)), expected)


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


ASKING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
METHODS = ("cpu", "numpy", "tolist")
OF_DATA = "preprocessing.py"
"""Pictures are made tensors on the CPU, wherever models are."""


class Waits(TorchDispatchMode):
    """Counts them by line of the product, while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        for name in METHODS:
            monkeypatch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(entry, Tensor) and entry.dtype is torch.bool for entry in args[1] or ()
        )
        if name in ASKING or by_mask:
            self._count(name)
        return func(*args, **(kwargs or {}))

    def _counting(self, name: str, method: Any) -> Any:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._count(name)
            return method(tensor, *args, **kwargs)

        return counted

    def _count(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and "/driftlens/" not in frame.f_code.co_filename:
            frame = frame.f_back
        # `lengths` asks of what lies on the host alone, as the pretended accelerator shows.
        if frame is None or frame.f_code.co_name == "lengths":
            return
        if not frame.f_code.co_filename.endswith(OF_DATA):
            self.lines[f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1


@pytest.mark.parametrize("method", few(["featcal", "residual"], quick=["featcal"], some=()))
@pytest.mark.slow
def test_more_batches_don_t_make_a_device_wait_more_often(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    waits = Waits(monkeypatch)
    found: dict[tuple[str, int], Counter[str]] = {}
    for batch_size in (4, 2):
        spec = world.one_task(metrics={"jacobian": {"samples": 2}})
        defaults = {"n": 4, "n_diagnosis": 4, "batch_size": batch_size}
        spec["data"] = {"flowers": spec["data"]["flowers"], "defaults": defaults}
        out = tmp_path / f"run-{batch_size}"
        for step in ("analyze", method):
            waits.lines = found[step, batch_size] = Counter()
            with waits:
                if step == "analyze":
                    dl.analyze(spec, out=out, progress="none")
                else:
                    dl.calibrate(out, method=step, name=step, progress="none")
    for (step, batch_size), lines in found.items():
        assert lines.total() > 0
        assert lines == found[step, 4], (step, batch_size)


@pytest.mark.slow
def test_calibrate_takes_the_commands_options_by_name(world: World, light: DriftRun, tmp_path: Path) -> None:
    settings = {"lam": 0.2, "rho": 2.0, "alpha": 0.5}
    wanted = calibrate(copied(light, tmp_path / "wanted"), request(parameters=settings, samples=3))
    run = dl.calibrate(
        copied(light, tmp_path / "run"),
        name="featcal",
        preset="paper-clip",
        parameters={"lam": 0.2, "alpha": 0.5},
        samples=3,
        progress="none",
    )
    assert run.manifest.calibrations["featcal"].settings == wanted.manifest.calibrations["featcal"].settings
    found = run.calibrated_state("featcal")
    for key, value in load_file(wanted.path / "calibrations/featcal/weights.safetensors").items():
        assert torch.equal(found[key], value), key
    with pytest.raises(SpecError, match="made from a spec"):
        dl.calibrate(run, name="other", data={"flowers": torch.zeros(2, 3, 16, 16)})


@pytest.mark.slow
def test_sweep_adds_the_rows_of_its_command(light: DriftRun, tmp_path: Path) -> None:
    given = {"accuracy": False, "samples": 3, "progress": "none"}
    rows = dl.sweep(copied(light, tmp_path / "run"), param={"lam": [0.2, 0.4]}, **given).sweeps()
    assert sorted(set(rows["lam"])) == [0.2, 0.4] and rows["accuracy"].isna().all()


def test_merge_and_validate_take_a_spec_in_every_form(world: World, tmp_path: Path) -> None:
    file = dl.merge(
        write_spec(tmp_path / "run.yaml", world.spec()),
        method="task_arithmetic",
        parameters={"scaling": SCALING},
        out=tmp_path / "merged.safetensors",
    )
    for key, value in merged_weights(world).items():
        torch.testing.assert_close(load_file(file)[key], value, rtol=1e-6, atol=1e-7)
    assert not dl.validate(world.spec()).problems
    broken = dl.validate(world.spec(base={"weights": str(tmp_path / "nowhere.safetensors")}), device="cpu")
    assert [finding.subject for finding in broken.problems] == ["base"] and broken.exit_code == 4


@pytest.mark.slow
def test_compared_merges_are_a_table_that_says_what_was_not_made(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, out = world.spec(), tmp_path / "out"
    merges = ["average", ("task_arithmetic", {"scaling": 0.5})]
    merged = merges_module.merged_source

    def overflowing(models: Any, merge: Merge, *arguments: Any, **options: Any) -> Any:
        if merge.method.name == "task_arithmetic":
            raise NumericsError("a weight is infinite")
        return merged(models, merge, *arguments, **options)

    monkeypatch.setattr(merges_module, "merged_source", overflowing)
    found = dl.compare_merges(values, merges, out=out, progress="none")
    rows = json.loads((out / "merges.json").read_text())["merges"]
    frame = found.frame()
    assert list(frame["merge"]) == [row["merge"] for row in rows if row["place"]]
    assert list(frame["Hellinger distance to the experts"]) == [
        row["hellinger"] for row in rows if row["place"]
    ]
    assert "task_arithmetic scaling=0.5: not made, as a weight is infinite" in found.notes()
    assert html.escape(found.notes()) in found._repr_html_() and "<td>average</td>" in found._repr_html_()
    assert not [child for child in out.iterdir() if child.is_dir()]
