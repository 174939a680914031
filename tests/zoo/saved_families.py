"""Families of classifiers, made small by their own libraries and saved as these save them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from timm.models import save_for_hf

from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import small

SIZE = 16
IMAGES: dict[str, Any] = {"image_size": SIZE, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """A kind of classifier: how its library builds one with so many classes, and how a spec reads it."""

    loader: str
    build: Callable[[int], Any]
    blocks: str | None = None
    size: int = SIZE
    args: dict[str, Any] = field(default_factory=dict)


def of_transformers(loader: str, name: str, blocks: str | None = None, **settings: Any) -> Family:
    """A small model of transformers by the name of its class."""
    size = settings.get("image_size", SIZE)
    return Family(loader, lambda classes: small(name, num_labels=classes, **settings), blocks, size)


def of_timm(name: str, *, blocks: str | None = None, size: int = 32, **args: Any) -> Family:
    """A model of timm with its own weights' format, made small by arguments where it isn't."""
    return Family("timm", lambda classes: timm.create_model(name, num_classes=classes, **args), blocks, size, args)


FAMILIES = {
    "ResNet": of_transformers(
        "hf-auto",
        "ResNetForImageClassification",
        "resnet.encoder.stages",
        **{"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
    ),
    "ConvNeXt": of_transformers(
        "hf-auto",
        "ConvNextForImageClassification",
        "convnext.encoder.stages",
        **{"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
    ),
    "Swin": of_transformers(
        "hf-auto",
        "SwinForImageClassification",
        **{"image_size": 32, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
    ),
    "ViT": of_transformers("hf-vit", "ViTForImageClassification", **IMAGES),
    "DeiT": of_transformers("hf-vit", "DeiTForImageClassification", **IMAGES),
    "DINOv2": of_transformers("hf-vit", "Dinov2ForImageClassification", **IMAGES, mlp_ratio=2),
    "SigLIP vision": of_transformers(
        "hf-vit",
        "SiglipForImageClassification",
        vision_config=IMAGES
        | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "timm ViT": of_timm(
        "vit_tiny_patch16_224", size=SIZE, img_size=SIZE, patch_size=8, embed_dim=24, depth=2, num_heads=2
    ),
    "timm ResNet": of_timm("test_resnet"),
    "timm ConvNeXt": of_timm("test_convnext"),
    "timm EfficientNet": of_timm("test_efficientnet"),
    "timm NFNet": of_timm("test_nfnet", blocks="stages"),
    "timm Swin": of_timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
    ),
}


def trained(family: Family, classes: int, seed: int) -> Any:
    """A model like a fine-tuned one: everything but its classifier is near the base, which is seed 0."""
    base = perturbed(with_seed(lambda: family.build(classes))().eval(), 0, 0.1)
    model = perturbed(base, seed, 0.05)
    generator = torch.Generator().manual_seed(seed)
    for key, value in model.state_dict().items():
        if "running_" in key:  # what normalisation has seen in training
            value.add_(0.1 * torch.rand(value.shape, generator=generator))
    return model


def save(family: Family, model: Any, folder: Path, names: tuple[str, ...] = ()) -> Path:
    """As the family's library saves it."""
    if family.loader == "timm":
        pixels = {"input_size": (3, family.size, family.size), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        model.pretrained_cfg = {**model.pretrained_cfg, **pixels, "crop_pct": 1.0}
        save_for_hf(model, folder, model_args=dict(family.args), safe_serialization=True)
        return folder
    if names:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: row for row, name in enumerate(names)}
    model.save_pretrained(folder)
    size = {"height": family.size, "width": family.size}
    transformers.ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    return folder


WORDS = ("a", "b", "c", "red", "green", "blue", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert(classes: int) -> Any:
    sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "pad_token_id": WORDS.index("[PAD]")}
    return small("BertForSequenceClassification", num_labels=classes, **sizes)


def spelling_tokenizer() -> Any:
    return transformers.BertTokenizerFast(vocab={word: row for row, word in enumerate(WORDS)})
