"""`dl.FeatCal().fit` beside the authors' own code, by turns in one process.

`DRIFTLENS_FEATCAL=CLONE python -m benchmarks authors`, where CLONE is one of github.com/egangu/featcal. Both get pixels
that are decoded already, batches of 16 and the same settings; `DRIFTLENS_BLOCKS` makes the towers shallower than 12.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import driftlens as dl

CASES = ((2, 16), (8, 16))  # tasks, samples of each
ROUNDS, BATCH = 2, 16


def run(device: str) -> str:
    """A line per case: processor seconds of both, the least of some rounds."""
    folder = os.environ.get("DRIFTLENS_FEATCAL")
    if folder is None:
        return "authors: DRIFTLENS_FEATCAL names no clone of github.com/egangu/featcal"
    sys.path.insert(0, f"{folder}/src")
    return "\n".join(_case(tasks, samples, device) for tasks, samples in CASES)


def _case(tasks: int, samples: int, device: str) -> str:
    blocks = int(os.environ.get("DRIFTLENS_BLOCKS", "12"))
    base, merged, *others = _towers(blocks, 2 + tasks)
    experts = {str(task): expert for task, expert in enumerate(others)}
    generator = torch.Generator().manual_seed(0)
    pixels = {task: torch.randn(samples, 3, 224, 224, generator=generator) for task in experts}
    ours, theirs = [], []
    for _ in range(ROUNDS):
        started = time.process_time()
        dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3).fit(
            merged, base, experts, pixels, batch_size=BATCH, device=device
        )
        ours.append(time.process_time() - started)
        calibrator, calibrated = _authors(pixels, device), copy.deepcopy(merged)
        started = time.process_time()
        calibrator.calibrate(
            merged_model=calibrated, base_model=base, expert_models=experts, tasks=list(experts)
        )
        theirs.append(time.process_time() - started)
    return (
        f"FeatCal.fit, {tasks} tasks x {samples}, {blocks} blocks of ViT-B/32: {min(ours):.1f} s of the processors, "
        f"{min(theirs) / min(ours):.2f} times faster than the authors' {min(theirs):.1f}"
    )


def _authors(pixels: dict[str, Any], device: str) -> Any:
    """Their calibrator, with samples that lie ready, and called as towers of transformers 5 want it."""
    theirs: Any = importlib.import_module("featcal.featcal")
    theirs._forward_clip_layer = lambda layer, x: theirs._extract_hidden_state(layer(x, attention_mask=None))
    theirs._clip_layers = lambda model: getattr(model, "vision_model", model).encoder.layers

    @torch.no_grad()
    def first_inputs(
        *, merged_model: nn.Module, expert_models: dict[str, nn.Module], tasks: list[str]
    ) -> Any:
        def of(model: Any, task: str) -> list[Any]:
            tower = getattr(model, "vision_model", model)
            return [tower.pre_layrnorm(tower.embeddings(part)) for part in pixels[task].split(BATCH)]

        return {task: of(merged_model, task) for task in tasks}, {
            task: of(expert_models[task], task) for task in tasks
        }

    settings = theirs.FeatCalConfig(lambda_ratio=0.05, anchor_blend_rho=2.0, teacher_interp_alpha=0.3)
    calibrator = theirs.CLIPFeatCalibrator(settings, processor=None, device=torch.device(device))
    calibrator.prepare_first_layer_inputs = first_inputs
    return calibrator


@torch.no_grad()
def _towers(blocks: int, count: int) -> list[nn.Module]:
    """A random tower of transformers and others near it."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(num_hidden_layers=blocks)
    towers = [copy.deepcopy(first) for first in [CLIPVisionModel(config).eval()] for _ in range(count)]
    for seed, tower in enumerate(towers):
        generator = torch.Generator().manual_seed(seed)
        for parameter in tower.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return towers
