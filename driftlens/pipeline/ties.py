"""Weights that stand in two places of a model."""

from __future__ import annotations

from collections import defaultdict

from driftlens.models.chain import LayerChain
from driftlens.pipeline.findings import Collector


def check_ties(chain: LayerChain, collect: Collector) -> None:
    """Say which weights stand in two places: whoever calibrates or swaps one of them changes the other."""
    places: defaultdict[tuple[str, tuple[int, int] | None], list[str]] = defaultdict(list)
    for layer in chain.layers:
        for name, slot in layer.parameters.items():
            places[slot.key, slot.rows].append(f"{name} of layer {layer.index}")
    tied = {key: found for (key, _), found in places.items() if len(found) > 1}
    for key, found in tied.items():
        collect.notice(
            "ties", f"{key} is {' and '.join(found)}", "To calibrate one of them changes the others too."
        )
    if not tied:
        collect.ok("ties", "none: every weight stands in one place")
