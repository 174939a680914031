"""Vision-language models taken apart with their images, against their library's own forward pass in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.models.architecture import build_on_meta
from driftlens.models.architectures.encoders import build_model
from driftlens.models.architectures.language import PADDED, causal_chain
from driftlens.models.architectures.module_list import find_blocks
from driftlens.models.architectures.vlm import decoder_path, vision_blocks_path, vision_language_chain
from driftlens.models.chain import LayerChain
from driftlens.models.texts import unpad_image_rows
from driftlens.utils.errors import IncompatibleModelsError
from tests.quick import few
from tests.refusing import refusing
from tests.zoo.cases import perturbed
from tests.zoo.vlm_batches import batch_of
from tests.zoo.vlms import IMAGE_TOKEN, VLMS, in_double, model_of, vlms

IN_SPACE = "Gemma 3n with images"
"""The vision tower of this one is a convolutional network."""


def whole_of(name: str) -> Any:
    return in_double(perturbed(model_of(name), 0, 0.2))


def taken_apart(module: Any, batch: Any) -> LayerChain:
    """As from files: the skeleton has shapes only."""
    shell = build_on_meta(partial(build_model, type(module), copy.deepcopy(module.config)), "shell")
    decoder = decoder_path(shell)
    blocks, _ = find_blocks(shell.get_submodule(decoder), None)
    blind, _ = causal_chain(shell, PADDED, f"{decoder}.{blocks}")
    return vision_language_chain(shell, batch, vision_blocks_path(shell), blind)


def walked(chain: LayerChain, module: Any, batch: Any) -> list[dict[str, Tensor]]:
    """The states at all boundaries."""
    weights, (state, side), states = module.state_dict(), chain.start(batch), []
    for layer in chain.layers:
        own = {
            name: slot.to_layer_layout(slot.take_rows(weights[slot.key])) for name, slot in layer.parameters.items()
        }
        state = layer.call(own, state, side)
        states.append(state)
    return states


def largest_error(states: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> float:
    """Of all entries of all states, against the norm of what was wanted."""
    assert [state.keys() for state in states] == [state.keys() for state in wanted]
    return max(
        float((state[name] - want[name]).norm() / want[name].norm())
        for state, want in zip(states, wanted, strict=True)
        for name in want
    )


@pytest.mark.shows("drift")
@pytest.mark.parametrize("name", vlms("LLaVA", "Qwen3-VL", only=[name for name in VLMS if name != IN_SPACE]))
def test_a_chain_is_the_librarys_forward_pass(name: str) -> None:
    """Deepstack, windows, mrope, images of several sizes or tiles: boundary by boundary, and to what the head reads."""
    module, batch = whole_of(name), batch_of(name, torch.Generator().manual_seed(0))
    chain = taken_apart(module, batch)
    states = walked(chain, module, batch)
    assert largest_error(states, chain.library_states(module, batch)) < 1e-12
    counts, read = batch["attention_mask"].bool(), list[Tensor]()
    hook = module.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad(), hook:
        module(**unpad_image_rows(batch))
    torch.testing.assert_close(states[-1]["hidden"][counts], read[0][counts], rtol=1e-9, atol=1e-9)
    # Every weight that moves a score belongs to a layer, but the head's own.
    keys = set(chain.parameter_keys())
    module.zero_grad()
    module(**unpad_image_rows(batch)).logits[counts].square().sum().backward()
    moving = {key for key, value in module.named_parameters() if value.grad is not None and value.grad.any()}
    assert moving - {"lm_head.weight"} <= keys


@pytest.mark.parametrize("name", few(["LLaVA", "Gemma 4 with images", "Qwen3-VL", "Idefics 3"], ["Qwen3-VL"]))
def test_sites_of_a_projector_hear_of_image_tokens_alone(name: str) -> None:
    """What they are given is what their library gives them, and another output that they hear of goes on."""
    module, batch = whole_of(name), batch_of(name, torch.Generator().manual_seed(0))
    chain = taken_apart(module, batch)
    before = next(at for at, layer in enumerate(chain.layers) if (layer.stream, layer.pool) == ("hidden", "mean"))
    layer, state, (_, side) = (
        chain.layers[before],
        walked(chain, module, batch)[before - 1],
        chain.start(batch),
    )
    own = {key: slot.take_rows(module.state_dict()[slot.key]) for key, slot in layer.parameters.items()}
    at_images, heard = batch["input_ids"] == IMAGE_TOKEN, dict[str, Tensor]()
    last = [site.name for site in layer.sites if site.kind == "linear"][-1]

    def tap(site: str, x: Tensor) -> Any:
        heard[site] = x
        return (lambda y: 2 * y) if site == last else None

    doubled = layer.call(own, state, side, tap)
    for site in layer.sites:
        read: list[Tensor] = []
        part = module.get_submodule(f"{layer.path}.{site.name}")
        with torch.no_grad(), part.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0])):
            module(**unpad_image_rows(batch))
        torch.testing.assert_close(heard[site.name][at_images], read[0].flatten(0, -2), rtol=1e-12, atol=1e-12)
        assert not heard[site.name][~at_images].any()
    for leaf in ("weight", "bias"):
        if f"{last}.{leaf}" in own:
            own[f"{last}.{leaf}"] = 2 * own[f"{last}.{leaf}"]
    torch.testing.assert_close(doubled["hidden"], layer.call(own, state, side)["hidden"], rtol=1e-12, atol=1e-12)


def dropped(chain: LayerChain, batch: Any) -> LayerChain:
    """The fault: image tokens are read as zeros."""
    at_images = (batch["input_ids"] == IMAGE_TOKEN)[..., None]

    def blind(call: Any, *given: Any) -> Any:
        state = call(*given)
        return {**state, "hidden": state["hidden"].masked_fill(at_images, 0)}

    first = next(layer.index for layer in chain.layers if layer.stream == "hidden")
    layers = [
        replace(layer, call=partial(blind, layer.call)) if layer.index == first else layer for layer in chain.layers
    ]
    return replace(chain, layers=tuple(layers))


@pytest.mark.parametrize("name", few(["LLaVA", "Gemma 4 with images", "Qwen2.5-VL"], ["LLaVA"]))
def test_dropped_image_tokens_are_found(name: str) -> None:
    module, batch = whole_of(name), batch_of(name, torch.Generator().manual_seed(0))
    chain = taken_apart(module, batch)
    wanted = chain.library_states(module, batch)
    assert largest_error(walked(chain, module, batch), wanted) < 1e-12
    assert largest_error(walked(dropped(chain, batch), module, batch), wanted) > 0.1


@pytest.mark.slow
def test_a_tower_that_keeps_features_in_space_is_refused_by_name() -> None:
    batch = batch_of(IN_SPACE, torch.Generator().manual_seed(0))
    with refusing(IncompatibleModelsError, "a gemma3n model", "in space", hint="tasks of texts", code=4):
        taken_apart(model_of(IN_SPACE), batch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("LLaVA"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("Gemma 4 with images", "Qwen3-VL")),
    ],
)
def test_of_texts_alone_the_tower_passes_nothing_on(name: str) -> None:
    module, batch = whole_of(name), batch_of(name, torch.Generator().manual_seed(0))
    chain = taken_apart(module, batch)
    words = {"input_ids": batch["input_ids"] % IMAGE_TOKEN, "attention_mask": batch["attention_mask"]}
    states = walked(chain, module, words)
    assert largest_error(states[-1:], chain.library_states(module, words)[-1:]) < 1e-12
    assert [state.keys() for state in states] == [state.keys() for state in chain.library_states(module, words)]
    for layer, state in zip(chain.layers, states, strict=True):
        assert (layer.stream == "vision") == ("vision" in state and not state["vision"].numel())
