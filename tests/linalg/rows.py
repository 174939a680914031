"""Moments from rows that are all at hand."""

from __future__ import annotations

from torch import Tensor

from driftlens.linalg.ridge import LinearMoments


def moments_of(
    rows: Tensor, targets: Tensor, weights: Tensor | None = None, *, weight_sum: float | None = None
) -> LinearMoments:
    """Moments of inputs [T, k] and wanted outputs [T, o], each row counting as `weights` says, all `weight_sum`."""
    counts = rows.new_ones(len(rows)) if weights is None else weights
    total = counts.sum()
    share = counts / total
    weighted = rows * share[:, None]
    return LinearMoments(
        gram=weighted.mT @ rows,
        output_cross=targets.mT @ weighted,
        mean_in=share @ rows,
        mean_target=share @ targets,
        target_energy=share @ targets.square(),
        weight_sum=total if weight_sum is None else total.new_tensor(weight_sum),
    )
