"""A mixture of experts from files: what a run tells of routes, and of experts that no token reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import driftlens as dl
from driftlens_reports.terminal import run_summary_text
from tests.zoo.decoders import MIXTURES
from tests.zoo.suite import TASKS, spec_of


@pytest.mark.slow
def test_a_run_tells_who_goes_where_and_names_experts_without_tokens(tmp_path: Path) -> None:
    spec = spec_of(MIXTURES["gpt-oss"], tmp_path) | {"metrics": {"jacobian": False}}
    for name in ("base", *TASKS):
        file = tmp_path / name / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.1.mlp.router.bias"][2] = -1000
        save_file(weights, file, {"format": "pt"})
    run = dl.analyze(spec, out=tmp_path / "run")
    routing = run.routing(task="a").set_index(["variant", "layer", "expert"])
    for model in ("expert", "merged"):
        counts = routing.loc[model]["tokens"]
        per_layer = counts.groupby("layer").sum()
        assert per_layer.nunique() == 1 and counts[3, 2] == 0  # two experts take every token
    layers = run.layers("a", "merged").set_index("layer")
    assert layers["rerouted"].notna().sum() == 3 and layers.loc[2:4, "rerouted"].between(0, 1).all()
    assert "Tokens routed to other experts" in run_summary_text(run, verbose=True)
    calibrator = dl.FeatCal(lam=1e-3, rho=1)
    run = run.calibrate(calibrator, name="small", save_weights=tmp_path / "out")
    kept = run.calibration("small").query("kind == 'kept'")
    assert set(kept["site"]) == {f"model.layers.1.mlp.experts.2.{matrix}" for matrix in ("gate_up_proj", "down_proj")}
    [notice] = [text for text in run.manifest.notices if "too few tokens" in text]
    assert "model.layers.1.mlp.experts.2 (0 tokens)" in notice
    merged, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    experts = [load_file(tmp_path / task / "model.safetensors") for task in TASKS]
    key = "model.layers.1.mlp.experts.gate_up_proj"
    wanted = merged[key] + 0.3 * sum(expert[key] - merged[key] for expert in experts)
    torch.testing.assert_close(saved[key][2], wanted[2])
    assert not torch.allclose(saved[key][0], wanted[0])


@pytest.mark.slow
def test_files_that_keep_experts_apart_are_checked(tmp_path: Path) -> None:
    spec = spec_of(MIXTURES["Mixtral"], tmp_path) | {"metrics": {"jacobian": False}}
    assert any("experts.0.w1" in key for key in load_file(tmp_path / "base" / "model.safetensors"))
    found = dl.validate(spec)
    assert found.needs["analyze"].memory_bytes and not found.problems, found.text()
