"""Checkpoints as other tools write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Weights = dict[str, Tensor]


def write_mergekit(folder: Path, weights: Weights) -> Path:
    """As mergekit leaves a small merge: one shard that is numbered all the same, an index, its recipe, a README."""
    shard = "model-00001-of-00001.safetensors"
    save_file(weights, folder / shard, metadata={"format": "pt"})
    size = sum(value.nbytes for value in weights.values())
    index = {
        "metadata": {"mergekit_version": "0.1.0", "total_size": size},
        "weight_map": dict.fromkeys(weights, shard),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "mergekit_config.yml").write_text("merge_method: linear\n")
    (folder / "README.md").write_text("# merge\n")
    (folder / "config.json").write_text("{}")
    return folder


def train(module: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Weights after peft merged random adapters into `module`; the adapters are saved in `folder`."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(module, LoraConfig(**options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        model.save_pretrained(folder)
        return model.merge_and_unload().state_dict()
