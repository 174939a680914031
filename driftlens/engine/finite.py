"""Watches features for NaN and infinity without making a device wait for every batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlens.errors import NumericsError
from driftlens.models.chain import Layer


class FiniteWatch:
    """Remembers the streams of one task and layer as one number per sample, and looks at them all at once.

    Args:
        layer: whose output is watched.
        task: whose samples they are.
        ids: names of the samples, where they are known.
    """

    def __init__(self, layer: Layer, task: str, ids: Sequence[str]) -> None:
        self._layer = layer
        self._task = task
        self._ids = ids
        self._totals: dict[str, list[Tensor]] = {}

    def see(self, model: str, stream: Tensor) -> None:
        """Remember the next batch of a model's features, [n, ...]."""
        # A sum is NaN or infinite as soon as one entry is, and is cheaper than looking at each.
        self._totals.setdefault(model, []).append(stream.flatten(1).sum(dim=1, dtype=torch.float64))

    def check(self) -> None:
        """Refuse what was seen.

        Raises:
            NumericsError: some entry is NaN or infinite; names the layer, the task and the first sample.
        """
        for model, totals in self._totals.items():
            bad = (~torch.isfinite(torch.cat(totals))).nonzero()
            if len(bad):
                row = int(bad[0])
                sample = self._ids[row] if row < len(self._ids) else str(row)
                raise NumericsError(
                    f"features of {model} are NaN or infinite after layer {self._layer.index} "
                    f"({self._layer.path}), task {self._task!r}, first in sample {sample!r}",
                    hint="Look at that input and at the layer's weights; "
                    "in a half-precision dtype, try compute.dtype: float32.",
                    layer=self._layer.index,
                    task=self._task,
                    sample=sample,
                )
