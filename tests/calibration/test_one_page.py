"""The algorithms on one page against the engine, which streams them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.calibration.featcal import featcal_blocks
from tests.calibration.helpers import TASKS, subject

Blocks = Callable[[nn.Module], Sequence[nn.Module]]
TOLERANCE = 1e-9  # of |dW|_F / |W|_F, in float64


def pixels(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)}


def words(generator: torch.Generator, *names: str) -> dict[str, Tensor]:
    return {name: torch.randint(3, 40, (6, 5), generator=generator) for name in ("input_ids", *names)}


FAMILIES: dict[str, tuple[Callable[[torch.Generator], dict[str, Tensor]], Blocks, Sequence[str]]] = {
    "hf_clip_vit": (
        pixels,
        lambda model: model.vision_model.encoder.layers,
        ("linear", "bias", "norm"),
    ),
    "llama": (words, lambda model: model.model.layers, ("linear", "bias")),
    "t5": (
        lambda generator: words(generator, "decoder_input_ids"),
        lambda model: [*model.encoder.block, *model.decoder.block],
        ("linear", "bias"),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_featcal_on_one_page_equals_the_streamed_engine(name: str) -> None:
    draw, blocks_of, update = FAMILIES[name]
    modules = subject(name).modules
    merged, base = modules["merged"], modules["base"]
    experts = {task: modules[f"expert:{task}"] for task in TASKS}
    inputs = {task: draw(torch.Generator().manual_seed(seed)) for seed, task in enumerate(TASKS)}
    settings: dict[str, Any] = {"lam": 0.03, "rho": 1.7, "alpha": 0.4}
    page = featcal_blocks(merged, base, experts, inputs, blocks_of, **settings)
    streamed = (
        dl.FeatCal(**settings, update=update)
        .fit(merged, base, experts, {task: [batch] for task, batch in inputs.items()})
        .model_
    )
    before, found, want = (model.state_dict() for model in (merged, page, streamed))
    for key, value in want.items():
        assert float((found[key] - value).norm()) <= TOLERANCE * float(value.norm()), key
    moved = {key for key in want if not torch.equal(want[key], before[key])}
    assert moved == {key for key in want if not torch.equal(found[key], before[key])} and len(moved) > 10
