"""Everything that decides what an embedded suite is: sizes, counts, and how long what is trained."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.build_demo.drawing import SIZE


@dataclass(frozen=True)
class Schedule:
    """One training: how many batches, and how far each of them moves the weights.

    Attributes:
        steps: number of batches.
        batch: samples per batch.
        rate: peak learning rate.
        matrix_rate: peak learning rate of the blocks' weight matrices where they are trained by Muon, and `rate` is
            AdamW's for all else; None trains everything by plain gradient descent with momentum.
        weight_decay: of Muon and AdamW, relative to the learning rate.
        warmup: share of the steps in which the rates rise; they then fall to 0 along a cosine.
    """

    steps: int
    batch: int
    rate: float
    matrix_rate: float | None = None
    weight_decay: float = 0.05
    warmup: float = 0.1

    def share_at(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0, as a share of its peak."""
        rise = min(1.0, (step + 1) / max(1.0, self.warmup * self.steps))
        return rise * 0.5 * (1 + math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Recipe:
    """The settings of the embedded suite.

    Attributes:
        num_base, num_train, num_test: pictures per task for the base, for its expert, and for testing.
        numbered: share of the base's pictures whose caption gives a catalogue number of the class, not its name.
            They teach the image tower to tell classes apart without telling the text tower what they are called,
            so that an expert has to line up features that are good already, which is a small step.
        base, expert: how long and how fast each is trained.
        width, layers, patch_size: image tower.
        embed_dim: width of the space that images and texts share.
        text_width, text_layers, context_length: text tower.
    """

    num_base: int = 1200
    num_train: int = 1000
    num_test: int = 512
    numbered: float = 0.945
    base: Schedule = field(default=Schedule(steps=600, batch=128, rate=4e-3, matrix_rate=0.0125))
    expert: Schedule = field(default=Schedule(steps=80, batch=64, rate=0.07))
    width: int = 96
    layers: int = 6
    patch_size: int = 8
    embed_dim: int = 64
    text_width: int = 64
    text_layers: int = 2
    context_length: int = 16

    def model_config(self) -> dict[str, Any]:
        """Return the model's configuration in open_clip's form."""
        return {
            "embed_dim": self.embed_dim,
            "quick_gelu": False,
            "vision_cfg": {
                "image_size": SIZE,
                "layers": self.layers,
                "width": self.width,
                "head_width": 32,
                "patch_size": self.patch_size,
            },
            "text_cfg": {
                "context_length": self.context_length,
                "vocab_size": 49408,
                "width": self.text_width,
                "heads": 2,
                "layers": self.text_layers,
            },
        }


@dataclass(frozen=True)
class TextRecipe:
    """The settings of the embedded text suite.

    Attributes:
        num_base, num_train, num_test: texts per task for the base, for its expert, and for testing.
        coded: share of the base's texts whose answer is a code of the class, not its word. They teach the model to tell
            classes apart without telling it what they are called, as `Recipe.numbered` does.
        base, expert, lora: how long and how fast the base, an expert, and one by low-rank adapters is trained.
        width, layers, heads, inner: of the decoder; half as many key heads as `heads`, inner width of its networks.
        rank: of the adapters.
        adapted: the task whose expert is made of adapters.
    """

    num_base: int = 1500
    num_train: int = 1500
    num_test: int = 400
    coded: float = 0.997
    base: Schedule = field(default=Schedule(steps=190, batch=64, rate=4e-3, matrix_rate=0.0125))
    expert: Schedule = field(default=Schedule(steps=200, batch=64, rate=0.07))
    lora: Schedule = field(default=Schedule(steps=100, batch=64, rate=0, matrix_rate=0.004))
    width: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 320
    rank: int = 8
    adapted: str = "questions"

    def model_config(self, vocabulary: int) -> dict[str, Any]:
        """Return the arguments of transformers' `LlamaConfig` for the decoder."""
        return {
            "vocab_size": vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(1, self.heads // 2),
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def stream(seed: int, purpose: str) -> int:
    """Return the seed of one purpose; purposes share no random numbers, and a new one changes no other."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
    # 63 bits, because torch takes signed seeds.
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
