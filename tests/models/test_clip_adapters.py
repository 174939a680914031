"""Both CLIP adapters: every option of the libraries that is supported, by comparison; every other, by
refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.models.architectures.clip import HF_CLIP_VIT, OPEN_CLIP_VIT, activation_name
from driftlens.utils.errors import IncompatibleModelsError
from tests.refusing import refusing
from tests.zoo.towers import (
    HF_VISION,
    hf_tower,
    hf_whole,
    open_clip_tower,
    open_clip_whole,
    pixels,
    under_transformers_names,
)
from tests.zoo.walking import chain_states, largest_difference, parameters


class Nested(nn.Module):
    """A `CLIPVisionModel` as transformers 4 and 5.0 to 5.5 lay it out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.vision_model = inner

    def forward(self, pixel_values: Tensor) -> Any:
        return self.vision_model(pixel_values=pixel_values)


def norm(**options: Any) -> Callable[[int], nn.Module]:
    from open_clip.transformer import LayerNorm

    return partial(LayerNorm, **options)


def quick_gelu() -> nn.Module:
    from open_clip.transformer import QuickGELU

    return QuickGELU()


OPEN_CLIP: dict[str, Callable[[], nn.Module]] = {
    "gelu": open_clip_tower,
    "quick_gelu": lambda: open_clip_tower(act_layer=quick_gelu),
    "gelu_tanh": lambda: open_clip_tower(act_layer=partial(nn.GELU, approximate="tanh")),
    "relu": lambda: open_clip_tower(act_layer=nn.ReLU),
    "silu": lambda: open_clip_tower(act_layer=nn.SiLU),
    "layer_scale": lambda: open_clip_tower(ls_init_value=0.1),
    "average_pooling_of_normalised_tokens": lambda: open_clip_tower(pool_type="avg"),
    "average_pooling_before_the_norm": lambda: open_clip_tower(pool_type="avg", final_ln_after_pool=True),
    "class_token_pooling_before_the_norm": lambda: open_clip_tower(final_ln_after_pool=True),
    "no_norm_in_the_stem": lambda: open_clip_tower(no_ln_pre=True),
    "large_eps": lambda: open_clip_tower(norm_layer=norm(eps=0.1)),
    "norms_without_scale": lambda: open_clip_tower(norm_layer=norm(elementwise_affine=False)),
    "fixed_positions": lambda: open_clip_tower(pos_embed_type="sin_cos_2d"),
    "custom_block_without_options": lambda: open_clip_tower(block_type="custom"),
    "patch_dropout": lambda: open_clip_tower(patch_dropout=0.5),
    "tokens_returned_too": lambda: open_clip_tower(output_tokens=True),
    "one_block": lambda: open_clip_tower(layers=1),
    "whole_clip": open_clip_whole,
}


@pytest.mark.parametrize("build", OPEN_CLIP.values(), ids=OPEN_CLIP)
def test_open_clips_options_are_computed_as_open_clip_does(build: Callable[[], nn.Module]) -> None:
    module, inputs = build(), pixels()
    chain = OPEN_CLIP_VIT.chain(module)
    own = chain_states(chain, module, inputs)
    assert largest_difference(own, chain.library_states(module, inputs)) < 1e-12
    with torch.no_grad():
        returned = getattr(module, "visual", module)(inputs)
    feature = returned[0] if isinstance(returned, tuple) else returned
    torch.testing.assert_close(own[-1]["hidden"], feature, rtol=0, atol=1e-12)


def test_images_need_not_be_square() -> None:
    module, inputs = open_clip_tower(image_size=(8, 16)), pixels(8, 16)
    chain = OPEN_CLIP_VIT.chain(module)
    own = chain_states(chain, module, inputs)
    assert own[0]["hidden"].shape == (2, 1 + 2 * 4, 32)
    assert largest_difference(own, chain.library_states(module, inputs)) < 1e-12


HF: dict[str, Callable[[], nn.Module]] = {
    "with_projection": hf_tower,
    "gelu": lambda: hf_tower(hidden_act="gelu"),
    "large_eps": lambda: hf_tower(layer_norm_eps=0.1),
    "without_projection": lambda: hf_tower("CLIPVisionModel"),
    "nested_without_projection": lambda: Nested(hf_tower("CLIPVisionModel")),
    "whole_clip": hf_whole,
}


@pytest.mark.parametrize("build", HF.values(), ids=HF)
def test_transformers_layouts_are_computed_as_transformers_does(build: Callable[[], nn.Module]) -> None:
    module, inputs = build(), pixels()
    chain = HF_CLIP_VIT.chain(module)
    own = chain_states(chain, module, inputs)
    assert largest_difference(own, chain.library_states(module, inputs)) < 1e-12
    run = getattr(module, "get_image_features", module)
    with torch.no_grad():
        returned = (
            run(pixel_values=inputs, output_hidden_states=True) if not isinstance(module, Nested) else module(inputs)
        )
    feature = returned.image_embeds if "image_embeds" in returned else returned.pooler_output
    torch.testing.assert_close(own[-1]["hidden"], feature, rtol=0, atol=1e-12)
    for state, hidden in zip(own, returned.hidden_states or (), strict=False):
        torch.testing.assert_close(state["hidden"], hidden, rtol=0, atol=1e-12)


def test_one_set_of_weights_gives_one_feature_in_both_libraries() -> None:
    ours, theirs = open_clip_tower(act_layer=quick_gelu), hf_tower()
    theirs.load_state_dict(under_transformers_names(ours.state_dict()))
    inputs = pixels()
    assert (
        largest_difference(
            chain_states(OPEN_CLIP_VIT.chain(ours), ours, inputs),
            chain_states(HF_CLIP_VIT.chain(theirs), theirs, inputs),
        )
        < 1e-12
    )


def test_norms_without_scale_are_no_sites() -> None:
    chain = OPEN_CLIP_VIT.chain(open_clip_tower(norm_layer=norm(elementwise_affine=False)))
    assert {site.kind for layer in chain.layers for site in layer.sites} == {"linear"}


def test_class_token_emphasis_is_the_published_rule() -> None:
    chain = HF_CLIP_VIT.chain(hf_tower(image_size=224, patch_size=32))  # 50 tokens, as ViT-B/32
    state = {"hidden": torch.zeros(3, 50, 32)}
    weights = chain.token_weights["cls_emphasis"](state, {})
    assert weights.shape == (3, 50)
    assert weights[:, 0].tolist() == [1, 1, 1]
    torch.testing.assert_close(weights[:, 1:], torch.full((3, 49), 0.01))
    assert (weights[0, 0] / weights[0].sum()).item() == pytest.approx(0.67, abs=0.005)
    assert chain.token_weights["uniform"](state, {}).unique().tolist() == [1]


def test_rows_that_reach_no_feature_weigh_nothing() -> None:
    module = open_clip_tower(pool_type="avg")
    chain = OPEN_CLIP_VIT.chain(module)
    head = chain.layers[-1]
    hidden = chain_states(chain, module, pixels())[-2]["hidden"]
    moved = hidden.clone()
    moved[:, 0] += 1
    given = parameters(head, module.state_dict())
    assert (
        largest_difference([head.call(given, {"hidden": hidden}, {})], [head.call(given, {"hidden": moved}, {})]) == 0
    )
    rule = chain.token_weights[head.sites[0].token_weights]
    assert rule({"hidden": hidden}, {})[0].tolist() == [0, *[1] * 16]


def test_settings_name_what_shapes_do_not_show() -> None:
    settings = OPEN_CLIP_VIT.chain(open_clip_tower(norm_layer=norm(eps=0.1), pool_type="avg")).settings
    assert settings == {
        "activation": "gelu",
        "eps": 0.1,
        "num_heads": 4,
        "patch_size": [4, 4],
        "image_size": [16, 16],
        "pooling": "patch_mean",
        "norm_before_pooling": True,
    }


def test_an_activation_that_only_nearly_fits_is_none_of_ours() -> None:
    assert activation_name(lambda x: F.gelu(x) + 1e-6) is None


def hf_other(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    small = {key: value for key, value in HF_VISION.items() if key != "projection_dim"}
    return getattr(transformers, name)(getattr(transformers, config)(**{**small, **options})).eval()


def resnet() -> nn.Module:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet([1, 1, 1, 1], output_dim=8, heads=4, image_size=32, width=8)


def timm_trunk() -> nn.Module:
    from open_clip.timm_model import TimmModel

    return TimmModel("vit_tiny_patch16_224", embed_dim=8, image_size=32)


class Cubic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


REFUSED: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    "attention_pooling": (
        OPEN_CLIP_VIT,
        lambda: open_clip_tower(attentional_pool=True),
        "pools by attention",
    ),
    "no_pooling": (OPEN_CLIP_VIT, lambda: open_clip_tower(pool_type="none"), "pools by 'none'"),
    "norms_on_queries": (OPEN_CLIP_VIT, lambda: open_clip_tower(qk_norm=True), "attn.ln_q.weight"),
    "scaled_heads": (OPEN_CLIP_VIT, lambda: open_clip_tower(scale_heads=True), "attn.head_scale"),
    "norm_in_the_mlp": (OPEN_CLIP_VIT, lambda: open_clip_tower(scale_fc=True), "mlp.ln.weight"),
    "cosine_attention": (OPEN_CLIP_VIT, lambda: open_clip_tower(scaled_cosine_attn=True), "attn.logit_scale"),
    "unknown_activation": (OPEN_CLIP_VIT, lambda: open_clip_tower(act_layer=Cubic), "activation is Cubic()"),
    "resnet": (OPEN_CLIP_VIT, resnet, "ResNet"),
    "timm": (OPEN_CLIP_VIT, timm_trunk, "timm trunk"),
    "transformers_given_to_open_clip": (OPEN_CLIP_VIT, hf_tower, "CLIPVisionModelWithProjection is no CLIP"),
    "open_clip_given_to_transformers": (HF_CLIP_VIT, open_clip_tower, "VisionTransformer is no CLIP"),
    "siglip": (
        HF_CLIP_VIT,
        lambda: hf_other("SiglipVisionModel", "SiglipVisionConfig"),
        "SiglipVisionModel is no CLIP",
    ),
    "blip": (
        HF_CLIP_VIT,
        lambda: hf_other("BlipVisionModel", "BlipVisionConfig"),
        "BlipVisionModel is no CLIP",
    ),
    "classifier": (HF_CLIP_VIT, lambda: hf_whole("CLIPForImageClassification"), "ends in a classifier"),
    "plain_module": (HF_CLIP_VIT, lambda: nn.Linear(2, 2), "Linear is no CLIP"),
}


@pytest.mark.parametrize(("adapter", "build", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_towers_are_refused_by_name(adapter: Any, build: Callable[[], nn.Module], words: str) -> None:
    module = build()
    with refusing(IncompatibleModelsError, words):
        adapter.chain(module)
    assert not adapter.matches(module)
