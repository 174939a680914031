"""One world in the forms of two libraries gives the same tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import driftlens as dl
from driftlens.config.requests import AnalysisRequest, CalibrationRequest
from driftlens.config.spec import load_spec
from driftlens.experiment.study_loading import open_study
from driftlens.merging.method import merge_methods
from driftlens.pipelines.analyze import analyze, reopen_study
from driftlens.pipelines.calibrate import calibrate
from driftlens.runs.run import DriftRun
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.merging.applying import FEW
from tests.quick import paced
from tests.zoo.towers import under_transformers_names
from tests.zoo.world import SIZE, TASKS, Form, World, tower


@pytest.fixture(scope="module")
def transformers_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    spec = world.spec("hf", metrics={"jacobian": {"samples": 2}, "cka": True})
    return dl.analyze(spec, out=tmp_path_factory.mktemp("hf") / "run", progress="none")


def numbers(frame: pd.DataFrame, *without: str) -> pd.DataFrame:
    return frame.drop(columns=["path", *without], errors="ignore")


@pytest.mark.parametrize("table", ["layers", "samples", "outputs", "accuracy"])
@OPEN_CLIP
@TRANSFORMERS_CLIP
@pytest.mark.shows("drift", "attribution")
def test_both_forms_give_the_same_tables(finished: DriftRun, transformers_run: DriftRun, table: str) -> None:
    # Errors of self-checks are differences of rounding; drift of the stem's class token is the same for all samples, so
    # that its deviation and its similarity are rounding too.
    noise = ("closure_error", "jacobian_error", "softmax_integral_error", "ce_integral_error")
    one, other = (numbers(getattr(run, table)(), *noise) for run in (finished, transformers_run))
    pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=2e-6, check_exact=False)


def test_both_forms_compare_the_same_parameters(finished: DriftRun, transformers_run: DriftRun) -> None:
    one, other = (run.params().query("scope != 'module'").drop(columns="path") for run in (finished, transformers_run))
    pd.testing.assert_frame_equal(one.reset_index(drop=True), other.reset_index(drop=True), rtol=1e-5, atol=1e-6)


def read(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the chain reads of the merged model."""
    study, _ = open_study(load_spec(spec))
    source = study.pool.source("merged")
    return {key: source.read(key) for key in study.pool.chain.parameter_keys()}


DROPPING = {"ties": {"trim_scope": "per_tensor", "drop_rate": 0.5}}
"""Settings with which more depends on what counts as one tensor."""


@pytest.mark.slow
@pytest.mark.parametrize("name", merge_methods)
def test_both_libraries_forms_of_one_model_are_merged_to_one_network(name: str, world: World, tmp_path: Path) -> None:
    saved = {}
    for form in ("open_clip", "hf"):
        file = tmp_path / f"{form}.safetensors"
        dl.merge(world.spec(form), out=file, method=name, parameters=(FEW | DROPPING).get(name, {}))
        saved[form] = load_file(file)
    expected = under_transformers_names(tower(saved["open_clip"]))
    assert expected.keys() == saved["hf"].keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        # The two libraries' features differ by rounding, which short directions of few tokens make visible.
        torch.testing.assert_close(saved["hf"][key], value, rtol=1e-3, atol=1e-4)


METHODS: dict[str, dict[str, Any]] = {
    "surgery": {"steps": 20, "lr": 0.05, "normalize": True},
    "prob_surgery": {"steps": 20, "lr": 0.05},
}


def python_of(folder: Path) -> str:
    """The lines that a card gives, without those behind the features."""
    text = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    lines = text.splitlines()
    last = next(at for at, line in enumerate(lines) if line.startswith("features"))
    return "\n".join(lines[: last + 1])


def own_features(run: Path, variant: str, task: str, samples: list[Any]) -> torch.Tensor:
    """The chain's final features, what is attached for the task among them."""
    study, models = reopen_study(run)
    assert models.architecture.preprocess is not None
    with torch.no_grad():
        state, side = study.pool.chain.start(models.architecture.preprocess(samples))
        for layer in study.pool.chain.layers:
            state = study.pool.layer_map(variant, layer, task)(state, side)
    return state["hidden"]


SHORT, SOME = {("surgery", "hf")}, {("prob_surgery", "open_clip")}
"""Which run in the fast line, and which in CI."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form"),
    [
        pytest.param(method, form, marks=paced((method, form), SHORT, SOME))
        for method in METHODS
        for form in ("open_clip", "hf")
    ],
)
def test_the_cards_own_lines_attach_what_was_learnt_for_a_task_to_the_librarys_model(
    form: Form, method: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = analyze(
        world.spec(form, metrics={"jacobian": False}),
        AnalysisRequest(out=tmp_path / "run", attribution=False),
    ).path
    out = tmp_path / "out"
    request = CalibrationRequest(name="maps", method=method, parameters=METHODS[method])
    done = calibrate(run, request.with_changes(save_weights=out, attribution=False))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))
    picture.save(out / "image.png")
    code = python_of(out)
    loader = code[code.index("def attach") :].split("\n\n\n")[0]
    assert "driftlens" not in code and len(loader.splitlines()) <= 10
    saved = load_file(out / "attachments.safetensors")
    info = done.manifest.calibrations["maps"]
    assert sum(value.numel() for value in saved.values() if value.dim()) == info.attached
    for task in TASKS:
        names: dict[str, Any] = {}
        with monkeypatch.context() as patch, torch.no_grad():
            patch.chdir(out)
            exec(code.replace(f"attach(model, {TASKS[0]!r})", f"attach(model, {task!r})"), names)
        wanted = own_features(run, "calibrated:maps", task, [picture])
        torch.testing.assert_close(names["features"], wanted, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(wanted, own_features(run, "merged", task, [picture]), atol=1e-4)
    card = (out / "README.md").read_text()
    assert f"{info.attached:,} additional numbers" in card and "closed form" not in card
