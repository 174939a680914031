"""Drift, local mismatch, propagation and growth: numbers per sample, and their summary per layer.

Norms and cosines use pooled vectors; amplification and growth use the full state.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.engine.walk import drift_columns
from driftlens.linalg.measures import linear_cka
from driftlens.runs.schema import LAYERS, SAMPLES
from driftlens.utils.diagnostic import Seen, diagnostic
from driftlens.utils.intervals import RESAMPLES

QUANTILES = (10, 25, 75, 90)


_AS_SEEN = ("drift_l2", "cos", "mismatch_l2", "propagation_l2")
_OF_LAYERS = (
    *(name for name in LAYERS.names if name.startswith(("drift_", "amplification"))),
    *("cos_mean", "cos_std", "mismatch_l2_mean", "propagation_l2_mean", "cross_term", "residual_l2_mean"),
    *("gain_excess_mean", "mismatch_ratio_mean", "growth_holds"),
    *("rerouted", "rerouted_l2_mean", "rerouted_share"),
)


@diagnostic(
    "sample_drift",
    table="samples",
    columns=SAMPLES.only(*_AS_SEEN, "amplification"),
    needs="view",
    option="",
    per_view=drift_columns,
)
def sample_values(seen: Seen) -> dict[str, NDArray[np.float64]]:
    """Return the columns of the sample table. A ratio over zero is NaN."""
    columns = seen.columns
    amplification = _ratio(columns["state_propagation"], columns["state_in"])
    return {name: columns[name] for name in _AS_SEEN} | {"amplification": amplification}


@diagnostic("drift", columns=LAYERS.only(*_OF_LAYERS), needs="view", option="", per_view=drift_columns)
def layer_values(seen: Seen) -> dict[str, float]:
    """Compute the columns of the layer table that follow from drift alone.

    Means, standard deviations (divided by n) and quantiles are over samples; ratios are ratios of sums over samples.
    Undefined values are NaN: ratios over zero, and growth without incoming drift or in a layer that is not residual.
    """
    columns, base = seen.columns, seen.base
    drift = columns["drift_l2"]
    gain_excess = _ratio(columns["state_propagation"], columns["state_in"]) - 1
    mismatch_ratio = _ratio(columns["state_mismatch"], columns["state_in"])
    defined = ~np.isnan(gain_excess)
    ends = share_intervals(columns["state_propagation"][None], columns["state_in"])[:, 0]
    values = {
        "drift_l2_mean": drift.mean(),
        "drift_l2_std": drift.std(),
        "drift_l2_median": np.median(drift),
        **{f"drift_l2_q{q}": np.quantile(drift, q / 100) for q in QUANTILES},
        "drift_rel": _total_ratio(drift, columns["expert_l2"]),
        "drift_vs_base": np.nan if base is None else _total_ratio(drift, base["drift_l2"]),
        "cos_mean": _mean(columns["cos"]),
        "cos_std": _std(columns["cos"]),
        "mismatch_l2_mean": columns["mismatch_l2"].mean(),
        "propagation_l2_mean": columns["propagation_l2"].mean(),
        "cross_term": _total_ratio(columns["mixed"] * columns["unit"] ** 2, drift**2),
        "amplification": _total_ratio(columns["state_propagation"], columns["state_in"]),
        **dict(zip(("amplification_low", "amplification_high"), ends, strict=True)),
    }
    if "residual_l2" in columns:
        holds = (gain_excess > 0) & (mismatch_ratio < gain_excess)
        values |= {
            "residual_l2_mean": columns["residual_l2"].mean(),
            "gain_excess_mean": _mean(gain_excess),
            "mismatch_ratio_mean": _mean(mismatch_ratio),
            "growth_holds": holds[defined].mean() if defined.any() else np.nan,
        }
    if "rerouted" in columns:
        values |= {
            "rerouted": columns["rerouted"].mean(),
            "rerouted_l2_mean": columns["rerouted_l2"].mean(),
            "rerouted_share": _total_ratio(columns["rerouted_along"] * columns["unit"] ** 2, drift**2),
        }
    return {name: float(value) for name, value in values.items()}


def share_intervals(parts: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute 95 % intervals of sum(parts) / sum(whole) by the percentile bootstrap.

    Numerator and denominator are resampled together, `RESAMPLES` times with replacement and with fixed random
    numbers. Resamples whose denominator is 0 are left out.

    Args:
        parts: numerators, [rows, n].
        whole: denominators, [n], at least 0.

    Returns:
        Lower and upper ends, [2, rows]; NaN for a single sample.
    """
    rows, n = parts.shape
    if n < 2 or not whole.sum() > 0:
        return np.full((2, rows), np.nan)
    # Resamples as counts of each sample turn all sums into one matrix product.
    counts = _drawn_again(n)
    sums = counts @ whole
    ratios = (counts @ parts.T)[sums > 0] / sums[sums > 0, None]
    return np.quantile(ratios, (0.025, 0.975), axis=0)


# All layers of a task have as many samples and share their resamples.
@functools.lru_cache(maxsize=1)
def _drawn_again(n: int) -> NDArray[np.int64]:
    """Return the count of each of n samples in every bootstrap resample, [RESAMPLES, n]."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def _ratio(over: NDArray[np.float64], under: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(over, under, out=np.full_like(over, np.nan), where=under > 0)


def _total_ratio(over: NDArray[np.float64], under: NDArray[np.float64]) -> float:
    total = under.sum()
    return float(over.sum() / total) if total > 0 else np.nan


def _mean(values: NDArray[np.float64]) -> float:
    # Not `nanmean`, which warns if all values are NaN.
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else np.nan


def _std(values: NDArray[np.float64]) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.std()) if len(defined) else np.nan


@diagnostic("cka", columns=LAYERS.only("cka"))
def cka(seen: Seen) -> dict[str, float]:
    """Compute debiased linear CKA between the variant's and the expert's features, in float64."""
    return {
        "cka": float(linear_cka(*(torch.from_numpy(rows).double() for rows in (seen.variant, seen.expert))))
    }
