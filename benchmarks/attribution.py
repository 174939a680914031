"""What contributions cost, in bare forward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.models import images, vit_b32_pool
from benchmarks.timing import seconds_of
from driftlens.data.samples import Batch
from driftlens.diagnostics.attribution import Contributions, JacobianSettings, PrefixSwaps
from driftlens.engine.walk import forward, walk
from driftlens.pipelines.attribution import BATCH

IMAGES = 32
BARE = 5
SETTINGS = JacobianSettings(nodes=4, max_nodes=4, random=False)


@torch.no_grad()
def run(device: str) -> str:
    """Time of contributions as forward vectors (4 nodes), of random directions and of the prefix split."""
    pool = vit_b32_pool(1, device)

    def follow(make: Callable[[], Contributions | PrefixSwaps], batch: Batch) -> None:
        follower = make()
        for view in walk(pool, "a", ["merged"], [batch]):
            follower.add(view)

    def bare(batch: Batch) -> None:
        for _ in forward(pool, "merged", [batch]):
            pass

    candidates: dict[str, Callable[[], Contributions | PrefixSwaps]] = {
        "contributions": lambda: Contributions(SETTINGS),
        "with random": lambda: Contributions(replace(SETTINGS, random=True)),
        "prefixes": PrefixSwaps,
    }
    # torch.func compiles its rules on first use; one sample is enough for that.
    follow(lambda: Contributions(SETTINGS), images(1, batch_size=1)[0])
    seconds: dict[str, float] = defaultdict(float)
    for batch in images(IMAGES, batch_size=BATCH):
        # A batch takes seconds, a forward pass a fraction of one: both means, in turn, so that neither is favoured.
        for name, make in candidates.items():
            seconds["bare"] += seconds_of(partial(bare, batch), times=BARE) / len(candidates)
            seconds[name] += seconds_of(partial(follow, make, batch))
    ratios = {name: seconds[name] / seconds["bare"] for name in candidates}
    return (
        f"contributions, ViT-B/32 shape, {IMAGES} images, {SETTINGS.nodes} nodes: {seconds['contributions']:.1f} s, "
        f"{ratios['contributions']:.1f} bare forwards (wanted: at most 40); apart: random directions "
        f"{ratios['with random'] - ratios['contributions']:.1f}, prefix split {ratios['prefixes']:.1f}"
    )
