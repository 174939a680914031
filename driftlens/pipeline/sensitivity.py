"""Path-averaged Jacobians, contributions and prefix swaps of one task, as columns of the layer and sample tables."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.diagnostics.attribution import Contributions, LayerSensitivity, PrefixSwaps
from driftlens.engine.walk import walk
from driftlens.pipeline.study import Study

BATCH = 8
"""Samples per batch: every vector carried so far is alive at once, so batches are small."""


@dataclass(frozen=True)
class Sensitivity:
    """Columns of the layer table by layer, and `final_share` per sample [L, n] of the first n diagnosis samples."""

    layers: dict[int, dict[str, float | int]]
    final_shares: NDArray[np.float64]


@torch.no_grad()
def sensitivities(study: Study, task: str, variant: str, tick: Callable[[int], None]) -> Sensitivity:
    """Why one variant's features drift on the first samples of one task; `tick` hears which layer is at hand.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        Cancelled: somebody asked to stop.
    """
    settings = study.settings.jacobian
    assert settings is not None
    samples = dataclasses.replace(study.tasks[task].diagnosis, batch_size=BATCH)
    count = min(settings.samples, len(samples))
    followed: dict[int, Contributions] = defaultdict(lambda: Contributions(settings))
    swapped: dict[int, PrefixSwaps] = defaultdict(PrefixSwaps)
    for view in walk(study.pool, task, [variant], samples.batches(0, count), ids=samples.ids):
        tick(view.layer.index)
        followed[view.start].add(view)
        if settings.prefix:
            swapped[view.start].add(view)
    return _columns(list(followed.values()), list(swapped.values()), count)


def _columns(followed: list[Contributions], swapped: list[PrefixSwaps], count: int) -> Sensitivity:
    energy = _joined([part.energy() for part in followed])
    layers: dict[int, dict[str, float | int]] = {
        index: {"jacobian_samples": count} for index in range(1, followed[0].seen + 1)
    }
    for index in followed[0].sensitivities:
        layers[index] |= _sensitivity_columns([part.sensitivities[index] for part in followed])
    per_sample = np.full((len(layers), count), np.nan)
    if followed[0].settings.contributions:
        shares = _joined([part.shares() for part in followed])
        _fill(layers, "final_share", shares, energy)
        layers[len(layers)]["remainder_share"] = 1 - sum(layers[index]["final_share"] for index in layers)
        per_sample = np.divide(shares, energy, out=per_sample, where=energy > 0)
    if swapped:
        _fill(layers, "prefix_share", _joined([part.shares() for part in swapped]), energy)
    return Sensitivity(layers, per_sample)


def _fill(
    layers: dict[int, dict[str, float | int]],
    column: str,
    shares: NDArray[np.float64],
    energy: NDArray[np.float64],
) -> None:
    """Ratios of sums over samples; NaN without drift."""
    total = float(energy.sum())
    for index in layers:
        layers[index][column] = float(shares[index - 1].sum()) / total if total > 0 else np.nan


def _sensitivity_columns(parts: list[LayerSensitivity]) -> dict[str, float | int]:
    error, size = (_joined([getattr(part, name) for part in parts]) for name in ("error", "size"))
    columns: dict[str, float | int] = {
        "jacobian_error": float(error.sum() / size.sum()) if size.sum() > 0 else np.nan,
        "nodes": max(part.nodes for part in parts),
    }
    gains = [part.random_gain for part in parts if part.random_gain is not None]
    if gains:
        columns["random_gain_mean"] = float(_joined(gains).mean())
    norms = [part.spectral_norm for part in parts if part.spectral_norm is not None]
    residuals = [part.spectral_residual for part in parts if part.spectral_residual is not None]
    if norms:
        columns["spectral_norm_mean"] = float(np.nanmean(_joined(norms)))
        columns["spectral_residual_max"] = float(np.nanmax(_joined(residuals)))
    return columns


def _joined(parts: list[Tensor]) -> NDArray[np.float64]:
    return torch.cat(parts, dim=-1).double().cpu().numpy()
