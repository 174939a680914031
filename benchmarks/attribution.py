"""What contributions cost, in bare forward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.models import images, vit_b32_pool
from benchmarks.timing import best_of
from driftlens.data.samples import Batch
from driftlens.diagnostics.attribution import Contributions, JacobianSettings, PrefixSwaps
from driftlens.engine.walk import forward, walk
from driftlens.pipeline.sensitivity import BATCH

IMAGES = 32
SETTINGS = JacobianSettings(nodes=4, max_nodes=4, random=False)


@torch.no_grad()
def run(device: str) -> str:
    """Time of contributions as forward vectors (4 nodes), of random directions and of the prefix split."""
    pool = vit_b32_pool(1, device)

    def follow(make: Callable[[], Contributions | PrefixSwaps], batches: list[Batch]) -> None:
        followers = {batch.start: make() for batch in batches}
        for view in walk(pool, "a", ["merged"], batches):
            followers[view.start].add(view)

    def bare() -> None:
        for _ in forward(pool, "merged", batches):
            pass

    batches = images(IMAGES, batch_size=BATCH)
    candidates: dict[str, Callable[[], object]] = {
        "contributions": lambda: follow(lambda: Contributions(SETTINGS), batches),
        "with random": lambda: follow(lambda: Contributions(replace(SETTINGS, random=True)), batches),
        "prefixes": lambda: follow(PrefixSwaps, batches),
    }
    # torch.func compiles its rules on first use; one sample is enough for that.
    follow(lambda: Contributions(SETTINGS), images(1, batch_size=1))
    seconds = best_of({"bare": bare}, rounds=5)
    for name, candidate in candidates.items():
        seconds[name] = best_of({name: candidate}, rounds=1, warm_up=False)[name]
    seconds["bare"] = min(seconds["bare"], best_of({"bare": bare}, rounds=5)["bare"])
    ratios = {name: seconds[name] / seconds["bare"] for name in candidates}
    return (
        f"contributions, ViT-B/32 shape, {IMAGES} images, {SETTINGS.nodes} nodes: {seconds['contributions']:.1f} s, "
        f"{ratios['contributions']:.1f} bare forwards (wanted: at most 40); apart: random directions "
        f"{ratios['with random'] - ratios['contributions']:.1f}, prefix split {ratios['prefixes']:.1f}"
    )
