"""Models that no loader takes: refused from their configuration or names of keys, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from driftlens.checkpoints import weight_files
from driftlens.checkpoints.sources import SafetensorsSource
from tests.cli.conftest import Cli
from tests.zoo.towers import hf_folder, hf_tower
from tests.zoo.world import write_spec

FAMILIES: dict[str, tuple[str, str | dict[str, Any], str, str]] = {
    "wrong_family": ("hf-clip", {"model_type": "vit"}, "a vit model", "hf-vit"),
    "RN50": ("open-clip", "RN50", "ResNet", "live modules"),
    "EVA": ("open-clip", "EVA02-B-16", "timm trunk (eva02", "live modules"),
    "CoCa": ("open-clip", "coca_ViT-B-32", "pools by attention", "live modules"),
    "mixture": (
        "hf-vit",
        {"model_type": "mixtral", "num_local_experts": 4},
        "a mixture of 4 experts",
        "hf-decoder",
    ),
    "remote_code": (
        "hf-auto",
        {"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}},
        "code of its own, which is never run (auto_map: modeling_own.Own)",
        "python:module:function",
    ),
    "unknown": ("hf-vit", {"model_type": "own"}, "a own model", "python:module:function"),
}


def spec_of(loader: str, source: str, weights: Path, data: Path) -> dict[str, Any]:
    entry = {"weights": str(weights)}
    return {
        "version": 1,
        "architecture": {"loader": loader, "source": source},
        "base": entry,
        "merged": entry,
        "experts": {"task": entry},
        "data": {"task": {"kind": "imagefolder", "calibration": str(data), "test": str(data)}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "merge", "validate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_no_loader_takes_is_refused_with_its_route_and_no_weights_opened(
    name: str, command: str, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model weighs, this takes as long as a small one: opening its files would be an error here."""
    loader, source, what, way = FAMILIES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"never opened")
    if isinstance(source, dict):
        (folder / "config.json").write_text(json.dumps(source))
    (folder / "modeling_own.py").write_text("raise SystemExit")

    def opened(*_arguments: Any) -> None:
        raise AssertionError("weights were opened")

    monkeypatch.setattr(weight_files, "open_file", opened)
    spec = spec_of(loader, source if isinstance(source, str) else str(folder), folder, tmp_path)
    options: tuple[object, ...] = ("--out", tmp_path / "out")
    if command == "merge":
        options += ("--method", "average")
    result = run_cli(
        command, write_spec(tmp_path / "spec.yaml", spec), *(options if command != "validate" else ())
    )
    said = result.out + result.err
    assert result.code == 4, said
    plain = " ".join(said.split())
    assert what in plain and way in plain and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_an_expert_of_another_family_is_told_by_its_keys_and_none_is_read(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "base")
    state = hf_tower().state_dict()
    odd = {f"vit.{key}".replace("vision_model.", ""): value for key, value in state.items()}
    odd = {key.replace("class_embedding", "cls_token"): value for key, value in odd.items()}
    save_file({key: torch.ones(1) for key in odd}, tmp_path / "expert.safetensors")
    spec = spec_of("hf-clip", str(folder), folder, tmp_path)
    spec["experts"]["task"]["weights"] = str(tmp_path / "expert.safetensors")

    def read(*_arguments: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsSource, "read", read)
    result = run_cli("analyze", write_spec(tmp_path / "spec.yaml", spec), "--out", tmp_path / "out")
    assert result.code == 4, result.err
    assert "expert.safetensors" in result.message and "a ViT, DeiT or DINOv2" in result.message
    assert "hf-vit" in result.hint and not (tmp_path / "out").exists()
