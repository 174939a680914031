"""What contributions cost, in bare forward passes."""

from __future__ import annotations

import torch

from benchmarks.models import images, vit_b32_pool
from benchmarks.timing import best_of
from driftlens.diagnostics.attribution import Contributions, JacobianSettings, PrefixSwaps
from driftlens.engine.walk import forward, walk

IMAGES = 32
SETTINGS = JacobianSettings(nodes=4, max_nodes=4)


@torch.no_grad()
def run(device: str) -> str:
    """Time of contributions as forward vectors (4 nodes) and of the prefix split, over one bare forward."""
    pool, batches = vit_b32_pool(1, device), images(IMAGES, batch_size=8)

    def contributions() -> None:
        followers = {batch.start: Contributions(SETTINGS) for batch in batches}
        for view in walk(pool, "a", ["merged"], batches):
            followers[view.start].add(view)

    def prefixes() -> None:
        followers = {batch.start: PrefixSwaps() for batch in batches}
        for view in walk(pool, "a", ["merged"], batches):
            followers[view.start].add(view)

    def bare() -> None:
        for _ in forward(pool, "merged", batches):
            pass

    seconds = best_of({"contributions": contributions, "prefixes": prefixes, "bare": bare}, rounds=2)
    ratios = {name: seconds[name] / seconds["bare"] for name in seconds}
    return (
        f"contributions, ViT-B/32 shape, {IMAGES} images, {SETTINGS.nodes} nodes: {seconds['contributions']:.1f} s, "
        f"{ratios['contributions']:.1f} bare forwards (wanted: at most 40); prefix split apart: "
        f"{ratios['prefixes']:.1f} bare forwards"
    )
