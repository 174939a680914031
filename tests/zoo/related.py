"""Sentences of a small vocabulary, files of rows, and how good a ranking is, in loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.zoo.tokenizers import WORDS

DRAW = np.random.default_rng(0)
SENTENCES = [" ".join(DRAW.choice(WORDS, size=2 + row % 4)) for row in range(60)]


def table(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows as a file of the kind that its name says."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        pd.DataFrame(rows).to_parquet(path)
    return str(path)


def rows_of(entry: dict[str, Any], key: str = "test") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(entry[key]).read_text().split("\n")]


def by_hand(ranked: list[bool], wanted: int) -> dict[str, float]:
    """The metrics of one query in loops."""
    gain = ideal = first = 0.0
    for rank in range(1, 11):
        hit = rank <= len(ranked) and ranked[rank - 1]
        gain += hit / np.log2(rank + 1)
        ideal += (rank <= wanted) / np.log2(rank + 1)
        first = first or (1 / rank if hit else 0.0)
    return {
        "ndcg@10": gain / ideal,
        "accuracy@1": float(ranked[0]),
        "precision@5": sum(ranked[:5]) / 5,
        "mrr@10": first,
    }
