"""Views: land seen from the air, at any heading and in any season, and patches of scikit-learn's two photographs.

Train and test patches come from different parts of the photographs, a margin apart (mostly the left and the right
half of the same thing), so that no pixel is seen twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from tools.build_demo import drawing

SIDE = 92
"""Side of the land that is drawn before it is turned and cut to the canvas; a little over CANVAS * sqrt(2)."""

GRASS, CROP, SOIL, WOOD = (104, 128, 72), (150, 146, 84), (142, 116, 88), (48, 74, 46)
WATER, SAND, ASPHALT, CONCRETE = (58, 88, 112), (204, 180, 136), (96, 96, 98), (168, 168, 164)
ROOFS: tuple[drawing.Colour, ...] = ((166, 92, 72), (132, 124, 120), (190, 182, 170), (110, 74, 62))

Landscape = Callable[[np.random.Generator], Image.Image]


def _pick(rng: np.random.Generator, *colours: drawing.Colour, spread: int = 22) -> drawing.Colour:
    return drawing.near(rng, colours[rng.integers(len(colours))], spread)


def _land(rng: np.random.Generator, *colours: drawing.Colour) -> Image.Image:
    """Ground in a shade of one of `colours`, mottled."""
    ground = np.asarray(drawing.backdrop(rng, _pick(rng, *colours), spread=18, side=SIDE), dtype=np.float32)
    return drawing.from_values(ground + 14 * drawing.smooth_field(rng, 12, SIDE)[..., None])


def _speckle(rng: np.random.Generator, land: Image.Image, count: int, size: float, of: drawing.Colour) -> None:
    """Scatter `count` round crowns with their shadows."""
    pen = ImageDraw.Draw(land)
    for _ in range(count):
        x, y = rng.uniform(0, SIDE, 2).tolist()
        radius = size * rng.uniform(0.7, 1.3)
        _crown(pen, x, y, radius, drawing.near(rng, of, 18))


def _crown(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, of: drawing.Colour) -> None:
    dark: drawing.Colour = (of[0] // 2, of[1] // 2, of[2] // 2)
    pen.ellipse([x - radius + 1, y - radius + 1, x + radius + 1, y + radius + 1], fill=dark)
    pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=of)


def _band(rng: np.random.Generator, bend: float) -> list[tuple[float, float]]:
    """Draw a line across the land from left to right that varies by about `bend` pixels."""
    across = np.linspace(-4, SIDE + 4, 16)
    phase, waves = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.7)
    along = SIDE / 2 + rng.uniform(-10, 10) + bend * np.sin(phase + waves * 2 * np.pi * across / SIDE)
    return list(zip(across.tolist(), along.tolist(), strict=True))


def _fields(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, CROP, SOIL)
    pen = ImageDraw.Draw(land)
    edges = [0, *sorted(rng.integers(18, SIDE - 18, 2).tolist()), SIDE]
    for top, bottom in itertools.pairwise(edges):
        crop = _pick(rng, CROP, SOIL, GRASS)
        furrow, pitch = drawing.near(rng, crop, 35), int(rng.integers(4, 8))
        pen.rectangle([0, top, SIDE, bottom], fill=crop)
        for y in range(top, bottom, pitch):
            pen.line([0, y, SIDE, y], fill=furrow, width=2)
    return land


def _forest(rng: np.random.Generator) -> Image.Image:
    canopy = np.asarray(_land(rng, WOOD, (66, 88, 50)), dtype=np.float32)
    crowns = 38 * drawing.smooth_field(rng, int(rng.integers(18, 30)), SIDE)
    return drawing.from_values(canopy + crowns[..., None])


def _pasture(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, GRASS, (130, 142, 82))
    _speckle(rng, land, int(rng.integers(2, 8)), 3.0, _pick(rng, WOOD))
    return land


def _orchard(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, SOIL, CROP, GRASS)
    pen = ImageDraw.Draw(land)
    crown, pitch = _pick(rng, WOOD), rng.uniform(9, 13)
    for y in np.arange(2, SIDE, pitch):
        for x in np.arange(2, SIDE, pitch):
            dx, dy = rng.uniform(-0.8, 0.8, 2)
            _crown(pen, x + dx, y + dy, 0.28 * pitch, drawing.near(rng, crown, 12))
    return land


def _river(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, GRASS, WOOD, SOIL)
    course, width = _band(rng, rng.uniform(9, 16)), int(rng.integers(11, 18))
    pen = ImageDraw.Draw(land)
    pen.line(course, fill=_pick(rng, SAND, GRASS), width=width + 4, joint="curve")
    pen.line(course, fill=_pick(rng, WATER, (92, 100, 84)), width=width, joint="curve")
    _speckle(rng, land, 12, 2.5, _pick(rng, WOOD))
    return land


def _lake(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, GRASS, WOOD, SAND)
    depth = drawing.smooth_field(rng, 5, SIDE) * 0.6 + np.linspace(-0.6, 1.2, SIDE)
    shore = Image.fromarray(((depth * 8).clip(0, 1) * 255).astype(np.uint8))
    land.paste(_land(rng, WATER, (44, 74, 88)), mask=shore)
    return land


def _highway(rng: np.random.Generator) -> Image.Image:
    land = _land(rng, GRASS, CROP, SOIL)
    course, width = _band(rng, rng.uniform(0, 5)), int(rng.integers(14, 20))
    pen = ImageDraw.Draw(land)
    pen.line(course, fill=_pick(rng, ASPHALT), width=width, joint="curve")
    pen.line(course, fill=_pick(rng, GRASS, CONCRETE), width=3)
    for lane in (-width / 4, width / 4):
        for (x, y), (u, v) in zip(course[::2], course[1::2], strict=True):
            pen.line([x, y + lane, u, v + lane], fill=(220, 220, 214), width=1)
    for _ in range(int(rng.integers(2, 6))):
        x, y = course[rng.integers(len(course))]
        y += rng.choice([-width / 3, width / 3])
        pen.rectangle([x, y - 1, x + 4, y + 1], fill=_pick(rng, (200, 60, 50), (235, 235, 235), (40, 50, 90)))
    return land


def _roofs(
    rng: np.random.Generator, pitch: float, share: tuple[float, float], *colours: drawing.Colour
) -> Image.Image:
    """Streets in a grid with one building on each lot, `share` of the lot's side."""
    land = _land(rng, GRASS if pitch < 20 else CONCRETE)
    pen = ImageDraw.Draw(land)
    for street in np.arange(rng.uniform(0, pitch), SIDE, 2 * pitch):
        pen.line([0, street, SIDE, street], fill=_pick(rng, ASPHALT, spread=12), width=3)
    for y in np.arange(rng.uniform(-pitch / 2, 0), SIDE, pitch):
        for x in np.arange(rng.uniform(-pitch / 2, 0), SIDE, pitch):
            width, depth = (pitch * rng.uniform(*share, 2)).tolist()
            pen.rectangle([x + 1, y + 1, x + width + 1, y + depth + 1], fill=(60, 60, 58))
            pen.rectangle([x, y, x + width, y + depth], fill=_pick(rng, *colours))
            pen.line([x, y + depth / 2, x + width, y + depth / 2], fill=_pick(rng, *colours), width=1)
    return land


def _residential(rng: np.random.Generator) -> Image.Image:
    land = _roofs(rng, rng.uniform(11, 15), (0.4, 0.6), *ROOFS)
    _speckle(rng, land, 25, 2.0, _pick(rng, WOOD))
    return land


def _desert(rng: np.random.Generator) -> Image.Image:
    land = np.asarray(_land(rng, SAND), dtype=np.float32)
    along = np.arange(SIDE)[:, None] / rng.uniform(9, 15)
    ridges = np.sin(2 * np.pi * (along + 0.5 * drawing.smooth_field(rng, 4, SIDE)))
    return drawing.from_values(land + 16 * ridges[..., None])


LANDSCAPES: dict[str, Landscape] = {
    "ploughed fields": _fields,
    "forest": _forest,
    "pasture": _pasture,
    "orchard": _orchard,
    "river": _river,
    "lake shore": _lake,
    "highway": _highway,
    "residential area": _residential,
    "industrial area": lambda rng: _roofs(
        rng, rng.uniform(28, 40), (0.5, 0.8), CONCRETE, (206, 208, 210), (128, 142, 158)
    ),
    "desert": _desert,
}


@drawing.drawn_task(
    "aerial",
    class_names=tuple(LANDSCAPES),
    templates=("an aerial photo of {}.", "a satellite image of {}.", "{} from above."),
    subject="land from above",
)
def draw_land(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One piece of land at a random heading, through a tinted sky."""
    land = list(LANDSCAPES.values())[label](rng)
    turned = land.rotate(rng.uniform(0, 360), resample=Image.Resampling.BILINEAR)
    edge = (SIDE - drawing.CANVAS) // 2
    seen = turned.crop((edge, edge, edge + drawing.CANVAS, edge + drawing.CANVAS))
    tint = rng.uniform(0.8, 1.2, 3)
    return drawing.from_values(np.asarray(seen) * tint)


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
    """Draw a random square inside `box`."""
    left, top, right, bottom = box
    side = int(rng.integers(SMALLEST, min(LARGEST, right - left, bottom - top) + 1))
    x, y = int(rng.integers(left, right - side + 1)), int(rng.integers(top, bottom - side + 1))
    return x, y, x + side, y + side


@drawing.drawn_task(
    "photos",
    class_names=tuple(SCENES),
    templates=("a photo of {}.", "a close view of {}.", "{} in a photograph."),
    subject="a photograph",
)
def draw_photo(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One patch of a photograph in its own light: mirrored, tinted or without colour."""
    scene = list(SCENES.values())[label]
    boxes = scene.train if split == "train" else scene.test
    patch = photograph(scene.photograph).crop(window(rng, boxes[rng.integers(len(boxes))]))
    patch = patch.resize((drawing.CANVAS, drawing.CANVAS), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        patch = ImageOps.mirror(patch)
    patch = ImageEnhance.Color(patch).enhance(0.0 if rng.random() < 0.2 else rng.uniform(0.6, 1.3))
    # Below 1: a brightened sky would be white all over, and two of its patches the same picture.
    tint = rng.uniform(0.7, 0.9, 3)
    return drawing.from_values(np.asarray(patch) * tint)
