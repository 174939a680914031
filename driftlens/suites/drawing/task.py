"""A drawn task: class names, words for them, a function that draws one scene of a class, and the camera."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageFilter

from driftlens.registry import Registry
from driftlens.suites.drawing.canvas import SIZE, Pixels

Split = Literal["train", "test"]
Purpose = Literal["base", "train", "test"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
Draw = Callable[[np.random.Generator, int, Split], Image.Image]
"""(random numbers, class, split) -> one scene. What is not random (a photograph's regions, collected handwriting)
is divided between the splits."""


@dataclass(frozen=True)
class Camera:
    """How light becomes pixels.

    Attributes:
        light: smallest and largest brightness, relative to the scene.
        contrast: smallest and largest contrast, relative to the scene.
        blur: largest radius, in final pixels.
        noise: smallest and largest standard deviation of the grain, of 255.
    """

    light: tuple[float, float]
    contrast: tuple[float, float]
    blur: float
    noise: tuple[float, float]

    def shot(self, scene: Image.Image, rng: np.random.Generator) -> Pixels:
        """A photograph [SIZE, SIZE, 3] of `scene`, which is an RGB picture with a multiple of its side."""
        picture = scene.reduce(scene.width // SIZE) if scene.width != SIZE else scene
        radius = rng.uniform(0, self.blur)
        if radius > 0.3:  # less than that changes nothing that can be seen
            picture = picture.filter(ImageFilter.GaussianBlur(radius))
        light = np.asarray(picture, dtype=np.float32)
        middle = light.mean(axis=(0, 1))
        light = (middle + (light - middle) * rng.uniform(*self.contrast)) * rng.uniform(*self.light)
        grain = rng.standard_normal(light.shape, dtype=np.float32) * rng.uniform(*self.noise)
        pixels: Pixels = (light + grain).clip(0, 255).astype(np.uint8)
        return pixels


CAMERA = Camera(light=(0.85, 1.15), contrast=(0.85, 1.1), blur=0.5, noise=(1.0, 5.0))
"""The one all pictures are taken with."""


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
