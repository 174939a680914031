"""Patches of scikit-learn's two sample photographs: which part of the scene is seen, in colour or in grey.

Train and test patches come from different parts of the photographs, a margin apart (mostly the left and the right
half of the same thing), so that no pixel is seen twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from driftlens.suites.drawing import CANVAS, Split, drawn_task, from_values

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in the photograph's pixels."""

MARGIN = 10
"""Pixels between any train box and any test box of a photograph."""
SMALLEST, LARGEST = 24, 44
"""Sides of a patch before it is scaled."""


@dataclass(frozen=True)
class Scene:
    """One class: where it is seen in which photograph."""

    photograph: str
    train: tuple[Box, ...]
    test: tuple[Box, ...]


SCENES: dict[str, Scene] = {
    "sky": Scene("china.jpg", train=((340, 4, 460, 180),), test=((480, 4, 620, 125),)),
    "tiled roof": Scene(
        "china.jpg",
        train=((70, 243, 190, 283), (88, 156, 190, 188), (120, 76, 190, 120)),
        test=((206, 243, 346, 283), (206, 156, 325, 188), (206, 345, 310, 392)),
    ),
    "balcony": Scene(
        "china.jpg",
        train=((98, 190, 190, 234), (82, 286, 175, 338)),
        test=((206, 190, 318, 234), (206, 288, 335, 332)),
    ),
    "foliage": Scene(
        "china.jpg",
        train=((0, 352, 190, 427), (568, 170, 640, 300)),
        test=((405, 330, 555, 427), (568, 312, 640, 427)),
    ),
    "lake": Scene("china.jpg", train=((358, 196, 448, 300),), test=((462, 196, 545, 275),)),
    "petals": Scene("flower.jpg", train=((185, 130, 255, 320),), test=((365, 130, 435, 300),)),
    "flower heart": Scene("flower.jpg", train=((265, 165, 301, 275),), test=((313, 165, 353, 275),)),
    "blurred leaves": Scene("flower.jpg", train=((4, 40, 160, 420),), test=((455, 40, 620, 380),)),
}


@functools.cache
def photograph(name: str) -> Image.Image:
    """One of scikit-learn's sample photographs, RGB."""
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(name))


def window(rng: np.random.Generator, box: Box) -> Box:
    """A random square inside `box`."""
    left, top, right, bottom = box
    side = int(rng.integers(SMALLEST, min(LARGEST, right - left, bottom - top) + 1))
    x, y = int(rng.integers(left, right - side + 1)), int(rng.integers(top, bottom - side + 1))
    return x, y, x + side, y + side


@drawn_task(
    "photos",
    class_names=tuple(SCENES),
    templates=("a photo of {}.", "a close view of {}.", "{} in a photograph."),
    subject="a photograph",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One patch of a photograph in its own light: mirrored, tinted or without colour."""
    scene = list(SCENES.values())[label]
    boxes = scene.train if split == "train" else scene.test
    patch = photograph(scene.photograph).crop(window(rng, boxes[rng.integers(len(boxes))]))
    patch = patch.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        patch = ImageOps.mirror(patch)
    patch = ImageEnhance.Color(patch).enhance(0.0 if rng.random() < 0.2 else rng.uniform(0.6, 1.3))
    # Below 1: a brightened sky would be white all over, and two of its patches the same picture.
    tint = rng.uniform(0.7, 0.9, 3)
    return from_values(np.asarray(patch) * tint)
