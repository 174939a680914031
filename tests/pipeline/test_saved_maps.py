"""Repairs with maps leave the run as a checkpoint and attachments, which the original library alone puts together."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.study.reopening import reopened
from driftlens.spec.requests import AnalysisRequest, CalibrationRequest
from tests.pipeline.fixtures import world
from tests.zoo.suite import PAIRS, Suite
from tests.zoo.world import SIZE, TASKS, Form, World

__all__ = ["world"]

METHODS: dict[str, dict[str, Any]] = {
    "react": {},
    "surgery": {"steps": 20, "lr": 0.05, "normalize": True},
    "surgery_v2": {"steps": 5, "lr": 0.05},
    "interv_merge": {"steps": 5, "lr": 0.05},
}


def python_of(folder: pathlib.Path) -> str:
    """The lines that a card gives, without those behind the features."""
    text = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    lines = text.splitlines()
    last = next(at for at, line in enumerate(lines) if line.startswith("features"))
    return "\n".join(lines[: last + 1])


def own_features(run: pathlib.Path, variant: str, task: str, samples: list[Any]) -> torch.Tensor:
    """The chain's final features, what is attached for the task among them."""
    study, models = reopened(run)
    assert models.architecture.preprocess is not None
    with torch.no_grad():
        state, side = study.pool.chain.start(models.architecture.preprocess(samples))
        for layer in study.pool.chain.layers:
            state = study.pool.layer_map(variant, layer, task)(state, side)
    return state["hidden"]


FEW = {("react", "open_clip"), ("interv_merge", "hf")}
"""Which run in the fast line: behind the last layer and inside blocks, in one library each."""


@pytest.mark.parametrize(
    ("method", "form"),
    [
        pytest.param(method, form, marks=[] if (method, form) in FEW else pytest.mark.slow)
        for method in METHODS
        for form in ("open_clip", "hf")
    ],
)
def test_the_cards_own_lines_attach_what_was_learnt_for_a_task_to_the_librarys_model(
    form: Form, method: str, world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = analyze(
        world.spec(form, metrics={"jacobian": False}),
        AnalysisRequest(out=tmp_path / "run", attribution=False),
    ).path
    out = tmp_path / "out"
    request = CalibrationRequest(name="maps", method=method, parameters=METHODS[method])
    done = calibrate(run, request.changed(save_weights=out, attribution=False))
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
    assert f"{info.attached:,} numbers beside the weights" in card and "closed form" not in card


@pytest.mark.slow
@pytest.mark.parametrize("method", ["react", "interv_merge"])
def test_the_same_with_a_llama(method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite("decoder", tmp_path, learns=False)
    with torch.no_grad():
        for parameter in suite.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    suite.save("expert")
    data = {"free": suite.data("free", PAIRS[:3])}
    run = analyze(suite.spec(data), AnalysisRequest(out=tmp_path / "run", attribution=False)).path
    request = CalibrationRequest(name="maps", method=method, parameters=METHODS[method])
    calibrate(run, request.changed(save_weights=tmp_path / "out", attribution=False))
    names: dict[str, Any] = {}
    with monkeypatch.context() as patch, torch.no_grad():
        patch.chdir(tmp_path / "out")
        exec(python_of(tmp_path / "out").replace("a question", "is it red"), names)
    wanted = own_features(run, "calibrated:maps", "free", [("is it red", "")])
    torch.testing.assert_close(
        names["features"][0], wanted[0, : len(names["features"][0])], rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(wanted, own_features(run, "merged", "free", [("is it red", "")]), atol=1e-4)


def test_beside_a_state_dict_lie_the_attachments(world: World, tmp_path: pathlib.Path) -> None:
    run = analyze(
        world.one_task(metrics={"jacobian": False}), AnalysisRequest(out=tmp_path / "run", attribution=False)
    ).path
    request = CalibrationRequest(name="maps", method="react")
    calibrate(run, request.changed(save_weights=tmp_path / "out.safetensors", attribution=False))
    found = load_file(tmp_path / "out.attachments.safetensors")
    assert [*found] == [f"/matrix/{TASKS[0]}"] and (tmp_path / "out.safetensors").is_file()
    assert torch.equal(
        found[f"/matrix/{TASKS[0]}"],
        next(iter(load_file(run / "calibrations/maps/attachments.safetensors").values())),
    )
