"""Towers that look like CLIP's and are not: refused by name, whatever the library calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError
from driftlens.models.families.hf_clip_vit import HfClipViT
from driftlens.models.families.open_clip_vit import OpenClipViT
from tests.refusing import refusing
from tests.zoo.towers import HF_VISION, hf_tower, hf_whole, open_clip_tower


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
        OpenClipViT(),
        lambda: open_clip_tower(attentional_pool=True),
        "pools by attention",
    ),
    "no_pooling": (OpenClipViT(), lambda: open_clip_tower(pool_type="none"), "pools by 'none'"),
    "norms_on_queries": (OpenClipViT(), lambda: open_clip_tower(qk_norm=True), "attn.ln_q.weight"),
    "scaled_heads": (OpenClipViT(), lambda: open_clip_tower(scale_heads=True), "attn.head_scale"),
    "norm_in_the_mlp": (OpenClipViT(), lambda: open_clip_tower(scale_fc=True), "mlp.ln.weight"),
    "cosine_attention": (OpenClipViT(), lambda: open_clip_tower(scaled_cosine_attn=True), "attn.logit_scale"),
    "unknown_activation": (OpenClipViT(), lambda: open_clip_tower(act_layer=Cubic), "activation Cubic()"),
    "resnet": (OpenClipViT(), resnet, "ResNet"),
    "timm": (OpenClipViT(), timm_trunk, "timm trunk"),
    "transformers_given_to_open_clip": (OpenClipViT(), hf_tower, "CLIPVisionModelWithProjection is no CLIP"),
    "open_clip_given_to_transformers": (HfClipViT(), open_clip_tower, "VisionTransformer is no CLIP"),
    "siglip": (
        HfClipViT(),
        lambda: hf_other("SiglipVisionModel", "SiglipVisionConfig"),
        "SiglipVisionModel is no CLIP",
    ),
    "blip": (
        HfClipViT(),
        lambda: hf_other("BlipVisionModel", "BlipVisionConfig"),
        "BlipVisionModel is no CLIP",
    ),
    "classifier": (HfClipViT(), lambda: hf_whole("CLIPForImageClassification"), "classifier of its own"),
    "plain_module": (HfClipViT(), lambda: nn.Linear(2, 2), "Linear is no CLIP"),
}


@pytest.mark.parametrize(("adapter", "build", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_towers_are_refused_by_name(
    adapter: Any, build: Callable[[], nn.Module], words: str
) -> None:
    module = build()
    with refusing(IncompatibleModelsError, words):
        adapter.chain(module)
    assert not adapter.matches(module)
