"""What the studies of embedding models share: tasks of retrieval by class, scored by sentence-transformers too."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from benchmarks.studies.packages import read_rows, require_installed, write_texts
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


def nearest_is_right(model: pathlib.Path, folder: pathlib.Path) -> list[float]:
    """Return 1 for each test text whose nearest passage, by sentence-transformers, is of its class."""
    require_installed("sentence-transformers")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model), device="cpu")
    queries, passages = read_rows(folder / "test.jsonl"), read_rows(folder / "passages.jsonl")
    found, kept = (
        encoder.encode([row["text"] for row in rows], normalize_embeddings=True) for rows in (queries, passages)
    )
    nearest = np.argmax(found @ kept.T, axis=1)
    return [
        float(passages[at]["target"] == query["target"]) for at, query in zip(nearest.tolist(), queries, strict=True)
    ]


embedding_study = functools.partial(
    Study,
    experts="Each expert is a fine-tune of all weights by a supervised contrastive loss, {steps} steps of 16 pairs of "
    "texts. The ten passages nearest to a test text are rated by nDCG@10, which counts those of its class; the text is "
    "right if the nearest one is of its class (accuracy@1).",
    libraries=("sentence-transformers",),
    metric="ndcg@10",
    second="accuracy@1",
    write_texts=write_texts,
    train=train_embedding,
    task_data=task_data,
    score_in_library=nearest_is_right,
    of_library="second",
)
"""A study scored by nearest-neighbour classification and by retrieval."""
