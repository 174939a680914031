"""What a run checks about itself: claims that are exact in theory, and up to which error they count as holding.

This is the one home of those limits; reports, the app and `driftlens check` without a file all read them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from driftlens.records.run import DriftRun


@dataclass(frozen=True)
class SelfCheck:
    """The largest error of one exact claim over all rows; NaN when it was not measured.

    Attributes:
        name: short name.
        claim: what is exact in theory.
        largest: the largest error found.
        limit: up to which the claim counts as holding; beyond what rounding and quadrature explain, it does not.
        where: the row with the largest error.
        n: rows behind it.
    """

    name: str
    claim: str
    largest: float
    limit: float
    where: str
    n: int = 0

    @property
    def holds(self) -> bool:
        """Whether the claim was checked and holds."""
        return self.largest <= self.limit  # false for NaN


def self_checks(run: DriftRun) -> list[SelfCheck]:
    """The largest error of each claim that a run checks about itself.

    Raises:
        RunError: a table can't be read.
    """
    layers, outputs = run.layers(), run.outputs()
    sums = _share_sums(layers)
    return [
        _largest(layers, "closure_error", 1e-4, "closure", "drift equals that of ordinary forward passes"),
        _largest(
            layers, "jacobian_error", 1e-2, "Jacobian", "propagation equals Jacobian times incoming drift"
        ),
        _largest(sums, "remainder", 1e-2, "contributions", "shares of the final drift sum to 1"),
        _largest(
            outputs, "softmax_integral_error", 1e-9, "softmax", "its change is the integral of its Jacobian"
        ),
        _largest(
            outputs, "ce_integral_error", 1e-6, "cross-entropy", "its change is the integral of its gradient"
        ),
    ]


def _share_sums(layers: pd.DataFrame) -> pd.DataFrame:
    """How far the shares of each task and variant are from their exact sum, at the head's row.

    Those by prefix swaps telescope to the very drift that they are divided by, whatever a layer does: no check.
    """
    last = layers.groupby(["task", "variant"], sort=False).tail(1)
    return last.assign(remainder=last["remainder_share"].astype(float).abs())


def _largest(rows: pd.DataFrame, column: str, limit: float, name: str, claim: str) -> SelfCheck:
    measured = rows[rows[column].notna()]
    if measured.empty:
        return SelfCheck(name, claim, math.nan, limit, "")
    worst = measured.iloc[int(measured[column].to_numpy(dtype=float).argmax())]
    place = f"layer {worst['layer']}" if "layer" in measured else f"sample {worst['sample_id']}"
    where = f"task {worst['task']}, {worst['variant']}, {place}"
    return SelfCheck(name, claim, float(worst[column]), limit, where, len(measured))
