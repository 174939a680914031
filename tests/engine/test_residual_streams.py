"""To which stream of features a site's output is added, in models made by their own libraries' code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.engine.pool import ModelPool
from driftlens.engine.sequential import linear_site_groups
from driftlens.engine.sites import find_residual_streams, select_sites
from driftlens.models.architectures.language import causal_chain
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import LayerChain, adapters
from tests.zoo.cases import CASES, perturbed, with_seed
from tests.zoo.decoders import CONFIGS
from tests.zoo.hand_made import two_texts
from tests.zoo.live_families import FAMILIES, batch
from tests.zoo.small import TINY

Opened = tuple[LayerChain, nn.Module, Any]
ENTERS = ""
"""What enters the block."""


def moved(build: Callable[[], nn.Module]) -> nn.Module:
    return perturbed(with_seed(build)().double().eval(), 1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def clip(name: str) -> Opened:
    model = moved(CASES[name].build)
    return CASES[name].chain(model), model, CASES[name].inputs(generator(), 3)


def live(name: str) -> Opened:
    family = FAMILIES[name]
    model, inputs = moved(family.build), batch(family, 3)
    return sequential_chain(model, inputs, blocks=family.blocks), model, inputs


def decoder(name: str) -> Opened:
    model = moved(lambda: transformers.AutoModelForCausalLM.from_config(CONFIGS[name]))
    inputs = {name: value for name, value in two_texts(generator(), 3).items() if "decoder" not in name}
    return causal_chain(model, inputs)[0], model, inputs


def t5() -> Opened:
    model = moved(TINY["seq2seq"])
    return adapters["seq2seq"].chain(model), model, two_texts(generator(), 3)


PRE_NORM_DECODER = {"self_attn.o_proj": ENTERS, "mlp.down_proj": "post_attention_layernorm"}
BERT = {"attention.output.dense": ENTERS, "output.dense": "intermediate.dense"}
STREAMS: dict[str, tuple[Callable[[], Opened], list[Mapping[str, str]]]] = {
    "CLIP (open_clip)": (
        lambda: clip("open_clip_vit"),
        [{"attn.out_proj": ENTERS, "mlp.c_proj": "ln_2"}] * 3,
    ),
    "CLIP (transformers)": (
        lambda: clip("hf_clip_vit"),
        [{"self_attn.out_proj": ENTERS, "mlp.fc2": "layer_norm2"}] * 3,
    ),
    "ViT (timm), fused": (lambda: live("ViT (timm)"), [{"attn.proj": ENTERS, "mlp.fc2": "norm2"}] * 6),
    "ViT (transformers)": (
        lambda: live("ViT (transformers)"),
        [{"attention.o_proj": ENTERS, "mlp.fc2": "layernorm_after"}] * 2,
    ),
    "BERT, post-norm": (lambda: live("BERT"), [BERT] * 2),
    "DeBERTa-v3, post-norm": (lambda: live("DeBERTa-v3"), [BERT] * 2),
    "GPT-2": (lambda: live("GPT-2"), [{"attn.c_proj": ENTERS, "mlp.c_proj": "ln_2"}] * 2),
    "T5": (
        t5,
        [{"layer.0.SelfAttention.o": ENTERS, "layer.1.DenseReluDense.wo": "layer.1.layer_norm"}] * 2
        + [
            {
                "layer.0.SelfAttention.o": ENTERS,
                "layer.1.EncDecAttention.o": "layer.1.layer_norm",
                "layer.2.DenseReluDense.wo": "layer.2.layer_norm",
            }
        ]
        * 2,
    ),
    "Llama": (lambda: decoder("Llama"), [PRE_NORM_DECODER] * 3),
    "Phi-3, fused": (lambda: decoder("Phi-3"), [PRE_NORM_DECODER] * 3),
    "Gemma": (lambda: decoder("Gemma"), [PRE_NORM_DECODER] * 3),
    # Norms behind attention and MLP, a scale or a batch norm: what is added is no site's output.
    "Gemma 2": (lambda: decoder("Gemma 2"), [{}] * 3),
    "Gemma 3": (lambda: decoder("Gemma 3"), [{}] * 3),
    "OLMo 2": (lambda: decoder("OLMo 2"), [{}] * 3),
    "DINOv2": (lambda: live("DINOv2 (transformers)"), [{}] * 2),
    "ResNet": (lambda: live("ResNet (torchvision)"), [{}] * 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_sites_are_found_to_be_added_to_the_stream_that_their_family_adds_them_to(name: str) -> None:
    """In every block; padded texts of unequal lengths, where there are texts."""
    make, wanted = STREAMS[name]
    chain, model, inputs = make()
    source = module_source(model, "merged")
    pool = ModelPool(
        chain,
        model,
        {"merged": source},
        device=torch.device("cpu"),
        dtype=torch.float64,
        modules={"merged": model},
    )
    sites, found = select_sites(chain), []
    state, side = chain.start(inputs)
    for layer in chain.layers:
        parameters = pool.parameters("merged", layer)
        if layer.index in sites:
            groups = linear_site_groups(layer, sites[layer.index])
            assert any(group.sites for group in groups)
            found.append(
                find_residual_streams(
                    layer, parameters, state, side, [site.name for of in groups for site in of.sites]
                )
            )
        state = layer.call(parameters, state, side)
    assert found == wanted


def test_what_counts_for_nothing_is_no_stream_and_two_sums_are_told_apart() -> None:
    """A site that gives 0 is added to nothing that could be told; and h + 2y is not h + y."""

    class Block(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale = scale

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h = h + self.first(h)
            return h + self.scale * self.second(h)

    def streams(scale: float, *, silent: bool) -> Mapping[str, str]:
        model = with_seed(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(scale)), nn.Linear(4, 4)))()
        model = model.double().eval()
        inputs = torch.randn(3, 4, generator=generator(), dtype=torch.float64)
        chain = sequential_chain(model, inputs, blocks="1")
        layer = chain.layers[1]
        parameters = {name: model.state_dict()[f"1.0.{name}"].clone() for name in layer.parameters}
        if silent:
            parameters |= {name: 0 * value for name, value in parameters.items() if "first" in name}
        state, side = chain.start(inputs)
        state = chain.layers[0].call(
            {name: model.state_dict()[f"0.{name}"] for name in ("weight", "bias")}, state, side
        )
        return find_residual_streams(layer, parameters, state, side, [site.name for site in layer.sites])

    assert streams(1.0, silent=False) == {"first": ENTERS, "second": "second"}
    assert streams(2.0, silent=False) == {"first": ENTERS}
    assert streams(1.0, silent=True) == {"second": ENTERS}
