"""A drawn task: class names, words for them, and a function that draws one picture of a class."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from driftlens.registry import Registry
from driftlens.suites.drawing.camera import CAMERA
from driftlens.suites.drawing.canvas import Pixels

Split = Literal["train", "test"]
Purpose = Literal["base", "train", "test"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
Draw = Callable[[np.random.Generator, int, Split], Image.Image]
"""(random numbers, class, split) -> one scene. What is not random (a photograph's regions, collected handwriting)
is divided between the splits."""


@dataclass(frozen=True)
class DrawnTask:
    """One classification task whose pictures come from code and from images that scikit-learn ships.

    Attributes:
        name: the task's name.
        class_names: what the classes are called in captions, in label order.
        templates: captions with a place for the class name; the zero-shot head averages over them.
        subject: what every picture of the task shows, for captions that give a catalogue number.
        draw: draws one scene.
    """

    name: str
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    subject: str
    draw: Draw

    def pictures(self, purpose: Purpose, count: int, seed: int) -> Iterator[tuple[Pixels, int]]:
        """`count` pictures with their labels: classes equally often (to within one), in random order.

        Each purpose has random numbers of its own; base pictures share the train split's sources.
        """
        stream = zlib.crc32(f"{self.name}/{purpose}".encode())
        rng = np.random.default_rng([seed, stream])
        labels = rng.permutation(np.arange(count) % len(self.class_names))
        split: Split = "test" if purpose == "test" else "train"
        for label in labels.tolist():
            yield CAMERA.shot(self.draw(rng, label, split), rng), label


tasks: Registry[DrawnTask] = Registry("task", "driftlens.suites.tasks")


def drawn_task(
    name: str, *, class_names: tuple[str, ...], templates: tuple[str, ...], subject: str
) -> Callable[[Draw], Draw]:
    """Decorator that files the function drawing one picture as the task `name`."""

    def file(draw: Draw) -> Draw:
        tasks.register(name)(DrawnTask(name, class_names, templates, subject, draw))
        return draw

    return file
