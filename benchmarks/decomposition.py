"""What the exact decomposition costs beyond the forward passes it can't do without."""

from __future__ import annotations

import torch

from benchmarks.models import images, vit_b32_pool
from benchmarks.timing import best_of
from driftlens.engine.walk import drift_columns, forward, walk

VARIANTS = 2
IMAGES = 64


@torch.no_grad()
def run(device: str) -> str:
    """Time of the walk with all columns over that of 1 + 2V plain forwards of our own chain."""
    pool, batches = vit_b32_pool(VARIANTS, device), images(IMAGES)
    variants = ["merged", *(f"merged{i}" for i in range(1, VARIANTS))]

    def decomposition() -> None:
        for view in walk(pool, "a", variants, batches):
            torch.stack(list(drift_columns(view, "cls").values())).cpu()

    def bare() -> None:
        for model in ["expert:a", *variants, *variants]:
            for _ in forward(pool, model, batches):
                pass

    seconds = best_of({"decomposition": decomposition, "bare": bare}, rounds=3)
    ratio = seconds["decomposition"] / seconds["bare"]
    return (
        f"decomposition of {VARIANTS} variants, ViT-B/32 shape, {IMAGES} images: {seconds['decomposition']:.2f} s, "
        f"{1 + 2 * VARIANTS} bare forwards: {seconds['bare']:.2f} s, ratio {ratio:.2f} (wanted: at most 1.25)"
    )
