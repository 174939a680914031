"""Whether probabilities can be believed: how often predictions of a given confidence are right."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.records.intervals import wilson

BINS = 10


def reliability(confidence: NDArray[np.float64], is_right: NDArray[np.bool_]) -> pd.DataFrame:
    """One row per tenth of confidence, (0, 0.1] to (0.9, 1]: samples, mean confidence, accuracy and its 95 % interval.

    Mean confidence and accuracy of an empty bin are null.

    Args:
        confidence: largest class probability of each sample, [n].
        is_right: whether that class is the sample's label, [n].
    """
    at = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(at, minlength=BINS)
    right = np.bincount(at, weights=is_right, minlength=BINS)
    whole = np.where(count > 0, count, np.nan)
    ends = [wilson(int(k), int(n)) if n else (np.nan, np.nan) for k, n in zip(right, count, strict=True)]
    return pd.DataFrame(
        {
            "from": np.arange(BINS) / BINS,
            "to": np.arange(1, BINS + 1) / BINS,
            "samples": count,
            "confidence": np.bincount(at, weights=confidence, minlength=BINS) / whole,
            "accuracy": right / whole,
            "low": [low for low, _ in ends],
            "high": [high for _, high in ends],
        }
    )


def expected_calibration_error(bins: pd.DataFrame) -> float:
    """Mean over samples of their bin's distance between accuracy and mean confidence, from rows of `reliability`."""
    distance = (bins["accuracy"] - bins["confidence"]).abs()
    return float((distance * bins["samples"]).sum() / bins["samples"].sum())
