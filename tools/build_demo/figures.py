"""What is told apart by its form: shapes among strokes, traffic signs (Vienna), textures of any colour and scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFilter

from tools.build_demo import drawing

Points = NDArray[np.float64]
"""A closed outline [n, 2] within the square [-1, 1] x [-1, 1], y downwards."""


def _regular(corners: int, turn: float = -90.0) -> Points:
    angles = np.deg2rad(turn) + 2 * np.pi * np.arange(corners) / corners
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _star() -> Points:
    points = _regular(10)
    points[1::2] *= 0.42
    return points


def _heart() -> Points:
    t = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    across = 16 * np.sin(t) ** 3
    along = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([across, -along - 2], axis=1) / 16


def _crescent() -> Points:
    outer = np.linspace(np.deg2rad(50), np.deg2rad(310), 30)
    inner = np.linspace(np.deg2rad(292), np.deg2rad(68), 30)
    rim = np.stack([np.cos(outer), np.sin(outer)], axis=1)
    bite = np.stack([0.35 + 0.78 * np.cos(inner), 0.83 * np.sin(inner)], axis=1)
    return np.concatenate([rim, bite]) + np.array([0.2, 0])


def _cross() -> Points:
    a, b = 0.34, 1.0
    quarter = np.array([[a, -b], [a, -a], [b, -a]])
    turns = [np.array([[c, -s], [s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return np.concatenate([quarter @ turn.T for turn in turns])


OUTLINES: dict[str, Callable[[], Points]] = {
    "circle": lambda: _regular(32),
    "square": lambda: _regular(4, -45.0) * 1.15,
    "triangle": lambda: _regular(3) + np.array([0, 0.2]),
    "diamond": lambda: _regular(4) * np.array([0.75, 1.0]),
    "star": _star,
    "cross": _cross,
    "heart": _heart,
    "crescent": _crescent,
    "arrow": lambda: np.array([[-1, -0.3], [0.1, -0.3], [0.1, -0.8], [1, 0], [0.1, 0.8], [0.1, 0.3], [-1, 0.3]]),
    "bar": lambda: np.array([[-1, -0.28], [1, -0.28], [1, 0.28], [-1, 0.28]]),
}


def _silhouette(outline: Points) -> Image.Image:
    mask = Image.new("L", (drawing.CANVAS, drawing.CANVAS))
    corners = [(x, y) for x, y in (outline * (drawing.CANVAS / 2 - 6) + drawing.CANVAS / 2).tolist()]
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    return mask


FILLED = tuple(_silhouette(outline()) for outline in OUTLINES.values())
HOLLOW = tuple(ImageChops.subtract(each, each.filter(ImageFilter.MinFilter(9))) for each in FILLED)


@drawing.drawn_task(
    "shapes",
    class_names=tuple(OUTLINES),
    templates=("a drawing of a {}.", "a {} shape.", "a simple {}."),
    subject="a drawing of a shape",
)
def draw_shape(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One shape, filled or as an outline, over and under a few strokes."""
    paper, ink = drawing.dark_and_light(rng, 80)
    sheet = drawing.backdrop(rng, paper, spread=40)
    drawing.clutter(rng, sheet, int(rng.integers(1, 5)), paper, 35)
    silhouette = (HOLLOW if rng.random() < 0.25 else FILLED)[label]
    mask = drawing.placed_somewhere(silhouette, rng, shift=2.5, height=(50, 62), angle=12, stretch=(0.85, 1.15))
    sheet.paste(ink, mask=mask)
    drawing.clutter(rng, sheet, int(rng.integers(0, 2)), paper, 35)
    return sheet


BOARD = 96
"""Side of the square on which a sign is drawn once, before it is put up."""
RED, BLUE, YELLOW, WHITE, BLACK = (196, 30, 40), (24, 74, 160), (244, 190, 30), (240, 240, 236), (24, 24, 26)

Mark = tuple[str, Any, drawing.Colour]
"""A shape of `ImageDraw` with its coordinates, or "text" with the text and its height; and the colour."""


def _corners(count: int, radius: float, turn: float = -90.0, drop: float = 0.0) -> list[tuple[float, float]]:
    angles = np.deg2rad(turn) + 2 * np.pi * np.arange(count) / count
    return [(48 + radius * np.cos(a), 48 + drop + radius * np.sin(a)) for a in angles.tolist()]


def _disc(radius: float, fill: drawing.Colour) -> Mark:
    return "ellipse", [48 - radius, 48 - radius, 48 + radius, 48 + radius], fill


PROHIBITION = (_disc(46, RED), _disc(35, WHITE))
WARNING = (("polygon", _corners(3, 50, drop=10), RED), ("polygon", _corners(3, 33, drop=10), WHITE))
MANDATORY = (_disc(46, WHITE), _disc(43, BLUE))
TO_THE_LEFT = [(14, 48), (40, 26), (40, 40), (80, 40), (80, 56), (40, 56), (40, 70)]

SIGNS: dict[str, tuple[Mark, ...]] = {
    "stop": (("polygon", _corners(8, 47, turn=22.5), RED), ("text", ("STOP", 22), WHITE)),
    "no entry": (_disc(46, RED), ("rectangle", [16, 39, 80, 57], WHITE)),
    "give way": (
        ("polygon", _corners(3, 50, turn=90, drop=-10), RED),
        ("polygon", _corners(3, 30, turn=90, drop=-10), WHITE),
    ),
    "priority road": (("polygon", _corners(4, 47), WHITE), ("polygon", _corners(4, 36), YELLOW)),
    "speed limit 30": (*PROHIBITION, ("text", ("30", 34), BLACK)),
    "no vehicles": PROHIBITION,
    "danger": (
        *WARNING,
        ("polygon", [(43, 36), (53, 36), (51, 57), (45, 57)], BLACK),
        ("ellipse", [44, 61, 52, 69], BLACK),
    ),
    "crossroads": (*WARNING, ("rectangle", [34, 53, 62, 60], BLACK), ("rectangle", [45, 38, 52, 72], BLACK)),
    "turn left": (*MANDATORY, ("polygon", TO_THE_LEFT, WHITE)),
    "parking": (("rectangle", [6, 6, 90, 90], BLUE), ("text", ("P", 56), WHITE)),
}


@functools.cache
def board(name: str) -> Image.Image:
    """Return the clean sign `name`, RGBA [BOARD, BOARD]; it is shared, so don't modify it."""
    artwork = Image.new("RGBA", (BOARD, BOARD))
    for shape, where, fill in SIGNS[name]:
        if shape == "text":
            text, height = where
            mask = drawing.glyph(text, "DejaVuSans-Bold")
            mask = mask.resize((round(mask.width * height / mask.height), height))
            artwork.paste((*fill, 255), (48 - mask.width // 2, round(48 - height / 2)), mask)
        else:
            getattr(ImageDraw.Draw(artwork), shape)(where, fill=fill)
    return artwork


@drawing.drawn_task(
    "signs",
    class_names=tuple(SIGNS),
    templates=("a {} traffic sign.", "a photo of a {} sign.", "the road sign {}."),
    subject="a traffic sign",
)
def draw_sign(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One sign before trees, houses or sky, from dusk to full sun."""
    surroundings = ((90, 110, 70), (150, 170, 200), (120, 110, 100))[rng.integers(3)]
    street = drawing.backdrop(rng, drawing.near(rng, surroundings, 30), spread=60)
    drawing.clutter(rng, street, int(rng.integers(4, 14)), surroundings, 60)
    sign = drawing.placed_somewhere(
        board(list(SIGNS)[label]), rng, shift=4, height=(44, 58), angle=8, shear=0.15, stretch=(0.75, 1.1)
    )
    faded = ImageEnhance.Color(sign.convert("RGB")).enhance(rng.uniform(0.4, 1.1))
    street.paste(faded, mask=sign.getchannel("A"))
    return street


Pattern = Callable[[drawing.Field, drawing.Field, np.random.Generator], drawing.Field]
"""(u, v, random numbers) -> how much of the second colour, in [0, 1]; u and v count periods of the pattern."""


def _edge(signed: drawing.Field, softness: float = 0.12) -> drawing.Field:
    return (signed / softness + 0.5).clip(0, 1)


def _fraction(x: drawing.Field) -> drawing.Field:
    return x - np.floor(x)


def _from_middle(x: drawing.Field) -> drawing.Field:
    """Distance from the nearest integer plus a half: 0 between two integers, 0.5 on one."""
    return np.abs(_fraction(x) - 0.5)


def _dotted(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    shifted = u + 0.5 * (np.floor(v) % 2)
    return _edge(rng.uniform(0.22, 0.38) - np.hypot(_fraction(shifted) - 0.5, _fraction(v) - 0.5))


def _bricked(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    along = u / 2 + 0.5 * (np.floor(v) % 2)
    joint = rng.uniform(0.06, 0.12)
    return 1 - np.maximum(_edge(2 * (_from_middle(along) - 0.5) + 2 * joint), _edge(_from_middle(v) - 0.5 + joint))


def _meshed(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    wire = rng.uniform(0.1, 0.16)
    return np.maximum(_edge(_from_middle(u) - 0.5 + wire), _edge(_from_middle(v) - 0.5 + wire))


def _marbled(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    turbulence = drawing.smooth_field(rng, 5) + 0.5 * drawing.smooth_field(rng, 10)
    return np.abs(np.sin(np.pi * (0.5 * u + rng.uniform(0.9, 1.4) * turbulence)))


def _cracked(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    seeds = rng.uniform(0, drawing.CANVAS, (int(rng.integers(9, 18)), 2))
    across, along = np.meshgrid(np.arange(drawing.CANVAS), np.arange(drawing.CANVAS))
    distances = np.hypot(across[..., None] - seeds[:, 0], along[..., None] - seeds[:, 1])
    nearest = np.partition(distances, 1, axis=-1)
    return _edge((2.2 - (nearest[..., 1] - nearest[..., 0])).astype(np.float32), 2.0)


def _spiralled(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    x, y = u - u.mean() + rng.uniform(-0.5, 0.5), v - v.mean() + rng.uniform(-0.5, 0.5)
    arms = rng.choice([-1, 1])
    return _edge(_from_middle(np.hypot(x, y) + arms * np.arctan2(y, x) / (2 * np.pi)) - 0.25)


def _honeycombed(u: drawing.Field, v: drawing.Field, rng: np.random.Generator) -> drawing.Field:
    height = np.sqrt(3.0)

    def rim(x: drawing.Field, y: drawing.Field) -> drawing.Field:
        """Hexagonal distance from the nearest point of the lattice with periods 1 and sqrt(3)."""
        dx, dy = np.abs(_fraction(x) - 0.5), np.abs(_fraction(y / height) - 0.5) * height
        return np.maximum(dx, 0.5 * dx + 0.5 * height * dy)

    wall = rng.uniform(0.05, 0.09)
    return _edge(np.minimum(rim(u, v), rim(u + 0.5, v + height / 2)) - 0.5 + wall)


PATTERNS: dict[str, Pattern] = {
    "striped": lambda u, v, rng: _edge(_from_middle(u) - rng.uniform(0.15, 0.35)),
    "chequered": lambda u, v, rng: _edge(np.sin(np.pi * u) * np.sin(np.pi * v), 0.3),
    "dotted": _dotted,
    "wavy": lambda u, v, rng: _edge(_from_middle(v + rng.uniform(0.3, 0.5) * np.sin(np.pi * u)) - 0.25),
    "bricked": _bricked,
    "meshed": _meshed,
    "marbled": _marbled,
    "cracked": _cracked,
    "spiralled": _spiralled,
    "honeycombed": _honeycombed,
}


@drawing.drawn_task(
    "textures",
    class_names=tuple(PATTERNS),
    templates=("a {} texture.", "a {} surface.", "a photo of a {} pattern."),
    subject="a texture",
)
def draw_texture(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
    """One patch of a texture, turned, warped and unevenly lit."""
    period, angle, warp = rng.uniform(12, 18), rng.uniform(-0.4, 0.4), rng.uniform(0, 0.25)
    pixels = np.arange(drawing.CANVAS, dtype=np.float32)
    x, y = pixels / period + rng.uniform(), pixels[:, None] / period + rng.uniform()
    cosine, sine = math.cos(angle), math.sin(angle)
    u = cosine * x + sine * y + warp * drawing.smooth_field(rng, 4)
    v = cosine * y - sine * x + warp * drawing.smooth_field(rng, 4)
    share = list(PATTERNS.values())[label](u, v, rng)
    mask = Image.fromarray((255 * share).astype(np.uint8))
    ground, figure = drawing.dark_and_light(rng, 55)
    return Image.composite(drawing.backdrop(rng, figure), drawing.backdrop(rng, ground), mask)
