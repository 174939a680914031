"""What other tools call and are called with, by their documented interfaces, which stand-ins have here."""

from __future__ import annotations

import sys
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.integrations import tracking
from driftlens.runs.run import DriftRun
from tests.pipelines.fixtures import light, world
from tests.quick import few
from tests.zoo.world import TASKS

__all__ = ["light", "world"]


class Logged:
    """Wandb's and trackio's calls, and TensorBoard's writer."""

    def __init__(self, *_: object) -> None:
        self.points: dict[tuple[str, int], float] = {}
        self.SummaryWriter = lambda _folder: self
        self.close = self.finish = lambda: None
        self.started: dict[str, Any] = {}

    def init(self, **given: Any) -> None:
        self.started = given

    def log(self, values: dict[str, float], step: int) -> None:
        self.points |= {(tag, step): value for tag, value in values.items()}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points[tag, step] = value


@pytest.mark.parametrize("library", few(["tensorboard", "wandb", "trackio"], ["tensorboard", "wandb"]))
def test_what_is_tracked_is_what_the_tables_hold(
    library: str, light: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: Any = Logged()
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(library, library), logged)
    if library == "tensorboard":
        count = tracking.to_tensorboard(light.path, tmp_path)
    else:
        count = tracking.to_run(light.path, "merges", library=library)
        assert logged.started["project"] == "merges" and logged.started["name"] == light.id
    rows = light.layers(TASKS[0], "merged")
    for layer, drift in zip(rows["layer"], rows["drift_l2_mean"], strict=True):
        assert logged.points[f"layers/drift_l2_mean/{TASKS[0]}/merged", layer] == drift
    assert len(logged.points) == count and any(tag.startswith("accuracy/") for tag, _ in logged.points)


@pytest.mark.slow
def test_fusion_bench_gets_the_merge_back_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """The part of FusionBench's BaseModelPool that is used; the real one was tried by hand."""

        has_pretrained, has_merged, model_names, train_dataset_names = True, False, ["a", "b"], ["a", "b"]

        def load_pretrained_model(self) -> nn.Module:
            return base

        def load_model(self, name: str) -> nn.Module:
            return experts[name]

        def load_train_dataset(self, name: str) -> list[tuple[torch.Tensor, int]]:
            return [(image, 0) for image in images[name]]

    stub: Any = ModuleType("fusion_bench")
    stub.BaseAlgorithm, stub.BaseModelPool = type("BaseAlgorithm", (), {}), Pool
    monkeypatch.setitem(sys.modules, "fusion_bench", stub)
    monkeypatch.delitem(sys.modules, "driftlens.integrations.fusion_bench", raising=False)
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from driftlens.integrations.fusion_bench import DriftLensMethod

    draw = torch.Generator().manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32}
    base = CLIPVisionModel(CLIPVisionConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
    experts = {name: deepcopy(base) for name in ("a", "b")}
    images = {name: torch.randn(40, 3, 16, 16, generator=draw) for name in experts}
    for expert in experts.values():
        for weight in expert.parameters():
            weight.data += 0.02 * torch.randn(weight.shape, generator=draw)
    repaired = DriftLensMethod("featcal", samples=24, out=str(tmp_path / "run")).run(Pool())
    run = dl.open_run(tmp_path / "run")
    assert {*run.variants} >= {"merged", "calibrated:featcal"} and isinstance(repaired, CLIPVisionModel)
    held = repaired.state_dict()
    for key, value in run.calibrated_state("featcal").items():
        assert torch.equal(held[key], value), key
    with pytest.raises(dl.errors.DataError, match=r"has 40 samples; expected more than `samples` \(64\)"):
        DriftLensMethod(samples=64, out=str(tmp_path / "other")).run(Pool())


def test_checkpoints_of_trainers_are_experts(tmp_path: Path) -> None:
    """Lightning's checkpoints and accelerate's folders are read as they are."""
    from accelerate import Accelerator

    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    weights = module.state_dict()
    kept = {"epoch": 3, "pytorch-lightning_version": "2.5.0", "hyper_parameters": Namespace(lr=0.1)}
    torch.save(
        {"state_dict": {f"model.{key}": value for key, value in weights.items()}, **kept},
        tmp_path / "last.ckpt",
    )
    lightning = open_checkpoint(tmp_path / "last.ckpt")
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(module, str(tmp_path / "saved"))
    accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    for is_safe in (True, False):
        accelerator.save_state(str(tmp_path / f"state-{is_safe}"), safe_serialization=is_safe)
    (tmp_path / "wrapped").mkdir()  # of several processes
    torch.save({f"module.{key}": value for key, value in weights.items()}, tmp_path / "wrapped/pytorch_model.bin")
    folders = [open_checkpoint(tmp_path / name) for name in ("saved", "state-True", "state-False", "wrapped")]
    for key, value in weights.items():
        assert torch.equal(lightning.read(f"model.{key}"), value), key
        assert all(torch.equal(folder.read(key), value) for folder in folders), key
