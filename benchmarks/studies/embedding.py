"""What the studies of embedding models share: tasks of retrieval by class, scored by sentence-transformers too."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from benchmarks.studies.packages import read_rows, write_texts
from benchmarks.studies.study import Study
from benchmarks.studies.training import train_embedding


def task_data(folder: pathlib.Path) -> dict[str, Any]:
    """Return a task whose query is answered by the passages of its class."""
    return {
        "input": "text",
        "calibration": str(folder / "calibration.jsonl"),
        "test": str(folder / "test.jsonl"),
        "positive": "target",
        "corpus": {"file": str(folder / "passages.jsonl"), "key": "target"},
    }


def nearest_is_right(model: pathlib.Path, folder: pathlib.Path, n: int) -> list[float]:
    """Return 1 for each test text whose nearest passage, by sentence-transformers, is of its class."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise SystemExit("the package sentence-transformers is not installed; it scores the saved models") from None

    encoder = SentenceTransformer(str(model), device="cpu")
    queries, passages = read_rows(folder / "test.jsonl")[:n], read_rows(folder / "passages.jsonl")
    found, kept = (
        encoder.encode([row["text"] for row in rows], normalize_embeddings=True) for rows in (queries, passages)
    )
    nearest = np.argmax(found @ kept.T, axis=1)
    return [
        float(passages[at]["target"] == query["target"]) for at, query in zip(nearest.tolist(), queries, strict=True)
    ]


embedding_study = functools.partial(
    Study,
    metric="accuracy@1",
    write_texts=write_texts,
    train=train_embedding,
    task_data=task_data,
    score_in_library=nearest_is_right,
)
"""A study scored by nearest-neighbour classification; runs also hold precision@5, nDCG@10 and MRR@10."""
