"""Table rows as plain values, for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One dict per row, of numbers, text, booleans and None; what was not measured is None, never NaN."""
    columns = {str(name): [plain(value) for value in frame[name]] for name in frame.columns}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def plain(value: Any) -> Any:
    """One value as JSON knows it; what is missing or not finite is None."""
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
