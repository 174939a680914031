"""What a calibration leaves as it was although the experts moved it: stem, final norm, projection."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from driftlens.engine.pool import ModelPool
from driftlens.models.chain import Layer


def untouched_but_moved(pool: ModelPool, calibrated: Collection[tuple[int, str]]) -> list[str]:
    """One notice per layer outside the blocks that differs between base and experts but was not calibrated.

    Args:
        pool: base and experts; without a base, the experts are compared with one another.
        calibrated: layer index and own name of every parameter that was solved for.
    """
    experts = [name for name in pool.names if name.startswith("expert:")]
    first, *others = [*(["base"] if "base" in pool else []), *experts]
    notices = []
    for layer in (pool.chain.layers[0], pool.chain.layers[-1]):
        moved = list(_moved(pool, layer, first, others, calibrated))
        if moved:
            notices.append(
                f"the {layer.role} ({', '.join(moved)}) differs between "
                f"{'base and experts' if first == 'base' else 'experts'} and was not calibrated: "
                "it stays as in the merged model"
            )
    return notices


def _moved(
    pool: ModelPool, layer: Layer, first: str, others: list[str], calibrated: Collection[tuple[int, str]]
) -> Iterator[str]:
    keys = {
        slot.key for name, slot in pool.chain.owned(layer).items() if (layer.index, name) not in calibrated
    }
    for key in sorted(keys):
        start = pool.source(first).read(key)
        if any(not torch.equal(start.double(), pool.source(other).read(key).double()) for other in others):
            yield key
