"""Traffic signs after the Vienna convention, on the roadside, in any light and from any side."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from driftlens.suites import drawing

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
    """The sign `name` as it leaves the factory: RGBA, [BOARD, BOARD]; do not modify it, it is shared."""
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
def draw(rng: np.random.Generator, label: int, split: drawing.Split) -> Image.Image:
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
