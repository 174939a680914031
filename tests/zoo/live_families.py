"""Model families as people bring them, made small by their own libraries' code, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

from tests.zoo.small import DEBERTA, small

CLASSES, WORDS, WIDTH = 5, 40, 16


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        build: a small model with random weights.
        data: (generator, number of samples) -> a batch as the model takes it.
        blocks: what is passed as `blocks=`.
        found: the blocks that are taken, as the chain's settings name them.
        widths: of the features that enter the first block and that leave each block.
        of_blocks: share of the blocks' weights that is solved for, rounded down to percent.
        left_alone: words that the notice of what is left alone has to hold.
        refused: words of the refusal; empty where the family works.
        is_smooth: whether its layers can be differentiated.
    """

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator, int], Any]
    blocks: str | None = None
    found: str = ""
    widths: tuple[int, ...] = ()
    of_blocks: int = 100
    left_alone: tuple[str, ...] = ()
    refused: str = ""
    is_smooth: bool = True

    def param(self, name: str) -> ParameterSet:
        """Of a test that shows it; `tests.families` makes the table of these."""
        share = "all" if self.of_blocks == 100 else f"{self.of_blocks} %"
        live = f"with blocks={self.blocks!r}" if self.blocks else "yes"
        shows = pytest.mark.shows(
            "drift",
            live=live,
            attribution="yes" if self.is_smooth else "prefix swaps",
            sites=f"{share} of a tiny model's blocks",
        )
        family = pytest.mark.family(name.partition(" by ")[0])
        return pytest.param(self, id=name.replace(" ", "_"), marks=() if self.refused else (family, shows))


def pixels(generator: torch.Generator, n: int, size: int = 32) -> Tensor:
    return torch.randn(n, 3, size, size, generator=generator)


def pixel_values(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    return {"pixel_values": pixels(generator, n)}


def words(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(2, WORDS, (n, 7), generator=generator)}


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=CLASSES, width_per_group=2)


def torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 12, 2), CNBlockConfig(12, None, 3)], num_classes=CLASSES)


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=CLASSES)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, 2, 2, WIDTH, 24, num_classes=CLASSES)


def timm(name: str, **settings: Any) -> nn.Module:
    from timm import create_model

    return create_model(name, num_classes=CLASSES, **settings)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, img_size=32, patch_size=16, embed_dim=WIDTH, num_blocks=2)


def levit() -> nn.Module:
    from timm.models.levit import Levit

    return Levit(32, num_classes=CLASSES, embed_dim=(16, 24), key_dim=8, depth=(1, 1), num_heads=2, stem_type="s8")


FAMILIES = {
    "ResNet (torchvision)": Family(
        torchvision_resnet,
        pixels,
        found="layer[0-9]*",
        widths=(64, 256, 512, 1024, 2048),
        of_blocks=98,
        left_alone=("BatchNorm2d",),
    ),
    "ConvNeXt (torchvision)": Family(
        torchvision_convnext,
        pixels,
        found="features",
        widths=(3, 8, 8, 12, 12),
        of_blocks=68,
        left_alone=("Conv2d", "CNBlock.layer_scale"),
    ),
    "Swin (torchvision)": Family(
        torchvision_swin,
        pixels,
        found="features",
        widths=(3, 8, 8, 16, 16),
        of_blocks=67,
        left_alone=("Linear", "ShiftedWindowAttention.relative_position_bias_table"),
    ),
    "ViT (torchvision)": Family(
        torchvision_vit,
        pixels,
        found="encoder.layers",
        widths=(WIDTH,) * 3,
        of_blocks=44,
        left_alone=("MultiheadAttention",),
    ),
    "ResNet (timm)": Family(
        partial(timm, "test_resnet"),
        pixels,
        found="layer[0-9]*",
        widths=(32, 32, 48, 192, 96),
        of_blocks=98,
        left_alone=("BatchNorm2d",),
    ),
    "ConvNeXt (timm)": Family(
        partial(timm, "test_convnext"),
        pixels,
        found="stages",
        widths=(24, 24, 32, 48, 64),
        of_blocks=89,
        left_alone=("Conv2d", "ConvNeXtBlock.gamma"),
    ),
    "ViT (timm)": Family(partial(timm, "test_vit", img_size=32), pixels, found="blocks", widths=(64,) * 7),
    "EfficientNet (timm)": Family(
        partial(timm, "test_efficientnet"),
        pixels,
        found="blocks",
        widths=(24, 16, 24, 32, 48, 64),
        of_blocks=91,
        left_alone=("BatchNormAct2d", "Conv2d"),
    ),
    "NFNet (timm)": Family(partial(timm, "test_nfnet"), pixels, refused="several possible lists of blocks"),
    "NFNet (timm) by its stages": Family(
        partial(timm, "test_nfnet"),
        pixels,
        blocks="stages",
        found="stages",
        widths=(128, 32, 64, 96, 128),
        of_blocks=23,
        left_alone=("ScaledStdConv2d",),
    ),
    "Mixer (timm)": Family(mixer, pixels, found="blocks", widths=(WIDTH,) * 3),
    "LeViT (timm) by its stages": Family(
        levit,
        pixels,
        blocks="stages",
        found="stages",
        widths=(16, 16, 24),
        of_blocks=86,
        left_alone=("BatchNorm1d", "Attention.attention_biases"),
    ),
    "Swin (timm)": Family(
        partial(
            timm,
            "swin_tiny_patch4_window7_224",
            img_size=32,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 2),
            window_size=4,
        ),
        pixels,
        found="layers",
        widths=(8, 8, 16),
        of_blocks=95,
        left_alone=("WindowAttention.relative_position_bias_table",),
    ),
    "ResNet (transformers)": Family(
        partial(
            small,
            "ResNetModel",
            embedding_size=8,
            hidden_sizes=[8, 12, 16],
            depths=[1, 2, 1],
            layer_type="basic",
        ),
        pixel_values,
        found="encoder.stages",
        widths=(8, 8, 12, 16),
        of_blocks=95,
        left_alone=("BatchNorm2d",),
    ),
    "ConvNeXt (transformers)": Family(
        partial(small, "ConvNextModel", num_stages=2, hidden_sizes=[8, 12], depths=[1, 3]),
        pixel_values,
        found="encoder.stages",
        widths=(8, 8, 12),
        of_blocks=67,
        left_alone=("Conv2d",),
    ),
    "Swin (transformers)": Family(
        partial(small, "SwinModel", image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4),
        pixel_values,
        found="encoder.layers",
        widths=(8, 16, 16),
        of_blocks=95,
        left_alone=("SwinRelativePositionBias",),
    ),
    "ViT (transformers)": Family(
        partial(small, "ViTForImageClassification", image_size=32),
        pixel_values,
        found="vit.layers",
        widths=(WIDTH,) * 3,
    ),
    "DINOv2 (transformers)": Family(
        partial(small, "Dinov2Model", image_size=32, patch_size=16),
        pixel_values,
        found="encoder.layer",
        widths=(WIDTH,) * 3,
        of_blocks=99,
        left_alone=("Dinov2LayerScale",),
    ),
    "BERT": Family(
        partial(small, "BertModel", vocab_size=WORDS),
        words,
        found="encoder.layer",
        widths=(WIDTH,) * 3,
    ),
    "DeBERTa-v3": Family(
        partial(small, "DebertaV2Model", vocab_size=WORDS, **DEBERTA),
        words,
        found="encoder.layer",
        widths=(WIDTH,) * 3,
        of_blocks=69,
        left_alone=("Linear",),
    ),
    "GPT-2": Family(
        partial(small, "GPT2Model", vocab_size=WORDS),
        words,
        found="h",
        widths=(WIDTH,) * 3,
    ),
    "Llama": Family(
        partial(small, "LlamaModel", vocab_size=WORDS, num_key_value_heads=1),
        words,
        found="layers",
        widths=(WIDTH,) * 3,
    ),
    "Mixtral": Family(
        partial(small, "MixtralModel", vocab_size=WORDS, num_key_value_heads=1, num_local_experts=4),
        words,
        found="layers",
        widths=(WIDTH,) * 3,
        of_blocks=98,
        left_alone=("MixtralTopKRouter",),
    ),
    "T5, its encoder": Family(
        partial(small, "T5EncoderModel", vocab_size=WORDS),
        words,
        found="encoder.block",
        widths=(WIDTH,) * 3,
        of_blocks=98,
        left_alone=("Embedding",),
    ),
    "LongT5, its encoder": Family(
        partial(small, "LongT5EncoderModel", vocab_size=WORDS), words, refused="compute_bias"
    ),
}


def batch(family: Family, n: int) -> Any:
    return _wide(family.data(torch.Generator().manual_seed(3), n))


def _wide(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _wide(value) for name, value in data.items()}
    return data.double() if data.is_floating_point() else data
