"""A run of live modules calibrated: by the `Run` that remembers them, and where they are handed in again."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import driftlens as dl
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import Cancelled, CheckpointError, DataError, DriftLensError, RunError, SpecError
from driftlens_reports.terminal import calibration_text
from tests.families import STACK
from tests.pipelines.calibrating import CONTROL, VARIANT, files_of, same_rows
from tests.zoo.cases import Stack, perturbed, with_seed

TASKS = ("a", "b")
SETTINGS = {"lam": 0.05, "rho": 2.0, "alpha": 0.3}
CLASSES = ("cat", "dog", "fox")


def inputs(seed: int, n: int = 12) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))


def given() -> dict[str, Any]:
    """What an analysis is given: two experts, labelled samples whose numbers mean classes, heads."""
    base = with_seed(Stack)().eval()
    heads = nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(9)), dim=1)
    return {
        "base": base,
        "merged": perturbed(base, 1),
        "experts": {task: perturbed(base, seed) for seed, task in enumerate(TASKS, 2)},
        "data": {task: TensorDataset(inputs(seed), torch.arange(12) % 3) for seed, task in enumerate(TASKS)},
        "heads": {task: dl.Head(CLASSES, heads, 10.0) for task in TASKS},
        "blocks": "blocks",
        "n": 10,
    }


def others() -> dict[str, Tensor]:
    return {task: inputs(seed, 16) for seed, task in enumerate(TASKS, 20)}


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """A run of these modules; tests add to it under names of their own."""
    return dl.analyze(**given(), out=tmp_path_factory.mktemp("live") / "run", progress="none")


def calibrate(run: Any, name: str, **options: Any) -> Any:
    return run.calibrate(dl.FeatCal(**SETTINGS), name=name, **options)


@pytest.mark.slow
@STACK
@pytest.mark.shows("live", reloads="as a state dict")
def test_a_calibrated_variant_is_measured_like_any_other_and_its_weights_are_at_hand(
    tmp_path: Path,
) -> None:
    modules = given()
    before = dl.analyze(**modules, out=tmp_path / "run", progress="none")
    run = calibrate(before, "featcal", data=others(), save_weights=tmp_path / "out.safetensors")
    same_rows(run, before)
    model = copy.deepcopy(modules["merged"])
    model.load_state_dict(run.calibrated_state("featcal"))
    fitted = dl.FeatCal(**SETTINGS).fit(
        *(modules[name] for name in ("merged", "base", "experts")), others(), blocks="blocks", n=None
    )
    control = copy.deepcopy(modules["merged"])
    with torch.no_grad():
        for name, value in control.named_parameters():
            if name.startswith("blocks."):
                value.mul_(2).sub_(modules["base"].get_parameter(name))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, fitted.model_.state_dict()[key], rtol=1e-5, atol=1e-6)
    table = run.before_after("featcal").set_index(["task", "variant"])
    for task in TASKS:
        rows = [int(at) for at in run.sample_ids(task)]
        x, labels = modules["data"][task][rows]
        expert = modules["experts"][task](x)
        for variant, module in {"merged": modules["merged"], VARIANT: model, CONTROL: control}.items():
            found = module(x)
            drift = torch.linalg.vector_norm(found - expert, dim=1).mean()
            hits = modules["heads"][task].scores(found).argmax(dim=1) == labels
            assert table.loc[(task, variant), "drift"] == pytest.approx(drift.item(), rel=1e-4)
            assert table.loc[(task, variant), "accuracy"] == pytest.approx(hits.double().mean().item())
        assert table.loc[(task, VARIANT), "drift"] < table.loc[(task, "merged"), "drift"]
    assert not any("diagnosis" in text for text in run.manifest.calibrations["featcal"].notices)
    saved = dl.open_checkpoint(tmp_path / "out.safetensors")
    assert all(torch.equal(saved.read(key), value) for key, value in model.state_dict().items())
    for verbose in (False, True):
        assert ("featcal, anchor only" in calibration_text(run, "featcal", verbose=verbose)) == verbose
    with pytest.raises(DataError, match="no calibration 'other'; it has featcal"):
        run.calibrated_state("other")


@pytest.mark.slow
def test_modules_that_are_handed_in_again_are_calibrated_alike(analyzed: Any) -> None:
    """With what the run's settings say, whatever the defaults are."""
    remembered = calibrate(analyzed, "remembered", data=others()).calibrated_state("remembered")
    modules = {name: value for name, value in given().items() if name not in ("n", "blocks")}
    again = calibrate(dl.open_run(analyzed.path), "again", modules=modules, data=others())
    for key, value in again.calibrated_state("again").items():
        assert torch.equal(value, remembered[key]), key
    with_path = dl.calibrate(
        analyzed.path, name="path", parameters=SETTINGS, modules=modules, data=others(), progress="none"
    )
    assert with_path.manifest.models["calibrated:path"] == dataclasses.replace(
        again.manifest.models["calibrated:again"],
        source=with_path.manifest.models["calibrated:path"].source,
    )


@pytest.mark.slow
def test_samples_that_serve_twice_are_stamped(analyzed: Any) -> None:
    told = calibrate(analyzed, "same").manifest.calibrations["same"].notices[:2]
    assert [text.partition(",")[0] for text in told] == [
        f"task {task}: 10 of 10 diagnosis samples are calibration samples" for task in TASKS
    ]
    few = {"a": analyzed_inputs(analyzed)[:3], "b": inputs(30)}
    text, *moved = calibrate(analyzed, "few", data=few).manifest.calibrations["few"].notices
    assert all("was not calibrated" in other or "anchor" in other for other in moved)
    assert text.startswith("task a: 3 of 10 diagnosis samples are calibration samples")
    run = dl.open_run(analyzed.path)
    assert any(text in notice for notice in run.manifest.notices)
    assert text in calibration_text(run, "few") and text in run.before_after("few").attrs["notices"]
    card = (run.path / "calibrations/few/README.md").read_text(encoding="utf-8")
    assert "3 of 10 diagnosis samples" in card and "no test sample" not in card and "RUN" not in card


def analyzed_inputs(run: DriftRun) -> Tensor:
    return inputs(0)[[int(at) for at in run.sample_ids("a")]]


def changed(name: str) -> dict[str, Any]:
    """The modules again, but one of their parameters, samples or heads."""
    modules = given()
    if name == "merged":
        with torch.no_grad():
            modules["merged"].blocks[1][0].bias[0] += 1e-6
    if name == "data":
        modules["data"]["b"] = TensorDataset(inputs(7), torch.arange(12) % 3)
    if name == "one sample":
        modules["data"]["b"].tensors[0][8] += 1  # drawn, and none of those that `origin` looks at
    if name == "labels":
        modules["data"]["a"] = TensorDataset(inputs(0), (torch.arange(12) + 1) % 3)
    head = modules["heads"]["a"]
    if name == "heads":
        modules["heads"]["a"] = dataclasses.replace(head, classes=head.classes[::-1])
    if name == "scores":
        modules["heads"]["a"] = dataclasses.replace(head, embeddings=head.embeddings.flip(0))
    return modules


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        (changed("merged"), CheckpointError, "merged differs from the run's"),
        (changed("data"), DataError, "diagnosis samples of task b are not those of the run"),
        (changed("one sample"), DataError, "diagnosis samples of task b are not those of the run"),
        (changed("labels"), DataError, "diagnosis labels of task a are not those of the run"),
        (changed("heads"), DataError, "diagnosis labels of task a are not those of the run"),
        (changed("scores"), SpecError, "the head of a differs from the run's"),
        (given() | {"pool": "mean"}, SpecError, "pool='mean', the run was made with pool=None"),
        ({"merged": given()["merged"]}, SpecError, "missing: experts, heads of a, heads of b, base"),
        (given() | {"expert": {}}, SpecError, "modules has no 'expert'; it takes merged, experts"),
        (None, SpecError, "made in Python from models in memory"),
    ],
    ids=[
        "weights",
        "samples",
        "sample",
        "labels",
        "classes",
        "scores",
        "settings",
        "incomplete",
        "unknown",
        "nothing",
    ],
)
def test_what_is_not_the_runs_own_is_refused_and_the_run_stays_as_it_is(
    analyzed: Any, modules: dict[str, Any] | None, error: type[DriftLensError], words: str
) -> None:
    before = files_of(analyzed.path)
    with pytest.raises(error, match=words):
        calibrate(dl.open_run(analyzed.path), "other", modules=modules, data=others())
    assert files_of(analyzed.path) == before


@pytest.mark.slow
def test_repairs_of_live_modules_compete_where_these_are_at_hand(analyzed: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(analyzed.path, tmp_path / "run"))
    with pytest.raises(SpecError, match="made in Python from models in memory"):
        dl.sweep(path, methods=["featcal"], progress="none")
    run = dl.sweep(path, methods=["featcal", "residual"], modules=given(), data=others(), progress="none")
    assert {"featcal", "residual"} <= {*run.repairs().frame()["model"]}


def test_inference_mode_around_a_calibration_changes_nothing() -> None:
    made = {key: value for key, value in given().items() if key in ("merged", "base", "experts")}
    plain = dl.ResidualCal().fit(**made, data=others())
    with torch.inference_mode():
        same = dl.ResidualCal().fit(**made, data=others())
    for key, value in plain.model_.state_dict().items():
        torch.testing.assert_close(same.model_.state_dict()[key], value, rtol=0, atol=0)


@pytest.mark.slow
def test_an_interrupted_analysis_goes_on_with_the_same_modules_alone(analyzed: DriftRun, tmp_path: Path) -> None:
    token, out = dl.CancelToken(), tmp_path / "run"

    def stop(event: dl.ProgressEvent) -> None:
        if event.phase == "analyze" and event.label.startswith("task b"):
            token.cancel()

    with pytest.raises(Cancelled):
        dl.analyze(**given(), out=out, progress="none", on_progress=stop, cancel=token)
    begun = dl.open_run(out)
    with pytest.raises(RunError, match="unfinished") as caught:
        calibrate(begun, "x", modules=given())
    assert "dl.analyze(..., resume=True)" in caught.value.hint
    for other, error, words in (
        (given() | {"n": 9}, SpecError, "begun with other settings"),
        (changed("labels"), DataError, "labels of task a"),
        (changed("scores"), SpecError, "the head of a"),
        (changed("merged"), CheckpointError, "merged differs from the run's"),
    ):
        with pytest.raises(error, match=words):
            dl.analyze(**other, out=out, progress="none", resume=True)
    run = dl.analyze(**given(), out=out, progress="none", resume=True)
    same_rows(dl.open_run(analyzed.path), run)
    assert run.manifest.id == begun.manifest.id


@pytest.mark.slow
def test_a_calibration_goes_on_with_the_same_samples_alone(analyzed: Any) -> None:
    """They are numbered, so that their ids say nothing; nor do a few of them say what the others are."""
    token, data, other = dl.CancelToken(), others(), others()
    other["b"][5] += 1

    def stop(event: dl.ProgressEvent) -> None:
        if event.phase == "calibrate" and event.label.startswith("layer 3 of"):
            token.cancel()

    with pytest.raises(Cancelled):
        calibrate(analyzed, "begun", data=data, on_progress=stop, cancel=token)
    with pytest.raises(SpecError, match=r"interrupted calibration had another samples\.b"):
        calibrate(analyzed, "begun", data=other, resume=True)
    run = calibrate(analyzed, "begun", data=data, resume=True)
    with pytest.raises(SpecError, match="is finished, with other settings"):
        calibrate(run, "begun", data=other, resume=True)
    calibrate(run, "begun", data=data, resume=True)
    assert "SHA-256 of their contents" in (run.path / "calibrations/begun/README.md").read_text("utf-8")


@pytest.mark.slow
def test_baselines_stand_beside_the_merged_model(tmp_path: Path) -> None:
    modules = given()
    run = dl.analyze(
        **modules,
        baselines={"twin": modules["merged"], "own": modules["experts"]["a"]},
        out=tmp_path / "run",
        progress="none",
    )
    assert run.variants == ("base", "merged", "baseline:twin", "baseline:own")
    assert run.value("drift_l2_mean", task="a", variant="baseline:own") == 0
    twin, merged = (run.layers(variant=name)["drift_l2_mean"] for name in ("baseline:twin", "merged"))
    assert twin.tolist() == merged.tolist()


@pytest.mark.parametrize("rows", [1, 16])
def test_calibration_samples_that_are_all_equal_are_reported(rows: int, analyzed: DriftRun) -> None:
    equal = {"a": inputs(20, 1).repeat(rows, 1), "b": inputs(21, 16)}
    told = calibrate(analyzed, f"equal{rows}", data=equal).manifest.calibrations[f"equal{rows}"].notices
    (notice,) = [text for text in told if "different calibration sample" in text]
    assert f"task a has 1 different calibration sample among {rows}" in notice
