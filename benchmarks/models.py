"""Random models of published shapes, for benchmarks."""

from __future__ import annotations

import torch
from torch import nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.models.chain import adapters


def vit_b32(seed: int) -> nn.Module:
    """open_clip's image tower of ViT-B/32 shape (12 blocks, width 768, 50 tokens) with random weights."""
    from open_clip.transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer(224, 32, 768, 12, 12, 4.0, output_dim=512).eval()


def vit_b32_pool(variants: int, device: str) -> ModelPool:
    """An expert of one task `a` and some variants called `merged`, `merged1`, ... in one pool."""
    names = ["expert:a", "merged", *(f"merged{i}" for i in range(1, variants))]
    modules = {name: vit_b32(seed).to(device) for seed, name in enumerate(names)}
    skeleton = modules["expert:a"]
    return ModelPool(
        adapters["open_clip_vit"].chain(skeleton),
        skeleton,
        {name: module_source(module, name) for name, module in modules.items()},
        device=torch.device(device),
        dtype=torch.float32,
        modules=modules,
    )


def images(n: int, batch_size: int = 32) -> list[Batch]:
    """Random pixels of 224 x 224."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(n, 3, 224, 224, generator=generator)
    return [Batch(i, min(i + batch_size, n), pixels[i : i + batch_size]) for i in range(0, n, batch_size)]
