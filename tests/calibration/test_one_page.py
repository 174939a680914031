"""The algorithms on one page against the engine, which streams them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.calibration.featcal import featcal_blocks
from driftlens.calibration.residual import residual_blocks
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


def models_and_inputs(name: str, draw: Callable[[torch.Generator], dict[str, Tensor]]) -> Any:
    modules = subject(name).modules
    experts = {task: modules[f"expert:{task}"] for task in TASKS}
    inputs = {task: draw(torch.Generator().manual_seed(seed)) for seed, task in enumerate(TASKS)}
    return modules["merged"], modules["base"], experts, inputs


def batches(inputs: dict[str, dict[str, Tensor]]) -> dict[str, list[dict[str, Tensor]]]:
    return {task: [batch] for task, batch in inputs.items()}


def assert_equal(page: nn.Module, streamed: nn.Module, merged: nn.Module) -> None:
    before, found, want = (model.state_dict() for model in (merged, page, streamed))
    for key, value in want.items():
        assert float((found[key] - value).norm()) <= TOLERANCE * float(value.norm()), key
    moved = {key for key in want if not torch.equal(want[key], before[key])}
    assert moved == {key for key in want if not torch.equal(found[key], before[key])} and len(moved) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_featcal_on_one_page_equals_the_streamed_engine(name: str) -> None:
    draw, blocks_of, update = FAMILIES[name]
    merged, base, experts, inputs = models_and_inputs(name, draw)
    settings: dict[str, Any] = {"lam": 0.03, "rho": 1.7, "alpha": 0.4}
    page = featcal_blocks(merged, base, experts, inputs, blocks_of, **settings)
    streamed = dl.FeatCal(**settings, update=update).fit(merged, base, experts, batches(inputs)).model_
    assert_equal(page, streamed, merged)


BLOCKS: dict[str, tuple[Sequence[Sequence[str]], dict[str, str]]] = {
    "hf_clip_vit": (
        [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.out_proj"],
            ["mlp.fc1"],
            ["mlp.fc2"],
        ],
        {"self_attn.out_proj": "layer_norm1", "mlp.fc2": "layer_norm2"},
    ),
    "llama": (
        [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ],
        {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_residual_calibration_on_one_page_equals_the_streamed_engine(name: str) -> None:
    draw, blocks_of, _ = FAMILIES[name]
    merged, base, experts, inputs = models_and_inputs(name, draw)
    page = residual_blocks(merged, experts, inputs, blocks_of, *BLOCKS[name], ridge=0.1, share=0.7)
    streamed = dl.ResidualCal(weights="uniform", cv="off", ridge=0.1, residual=0.7)
    assert_equal(page, streamed.fit(merged, base, experts, batches(inputs)).model_, merged)
