"""Traffic signs after the Vienna convention, on the roadside, in any light and from any side."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from driftlens.suites.drawing.canvas import CANVAS, Colour, backdrop, clutter, near
from driftlens.suites.drawing.glyphs import glyph, placed
from driftlens.suites.drawing.task import Split, drawn_task

BOARD = 96
"""Side of the square on which a sign is drawn once, before it is put up."""
RED, BLUE, YELLOW, WHITE, BLACK = (196, 30, 40), (24, 74, 160), (244, 190, 30), (240, 240, 236), (24, 24, 26)

Pen = ImageDraw.ImageDraw
Artwork = Callable[[Pen, Image.Image], None]


def _polygon(
    pen: Pen, corners: int, radius: float, fill: Colour, *, turn: float = -90.0, drop: float = 0
) -> None:
    angles = np.deg2rad(turn) + 2 * np.pi * np.arange(corners) / corners
    points = [(48 + radius * np.cos(a), 48 + drop + radius * np.sin(a)) for a in angles.tolist()]
    pen.polygon(points, fill=fill)


def _disc(pen: Pen, radius: float, fill: Colour) -> None:
    pen.ellipse([48 - radius, 48 - radius, 48 + radius, 48 + radius], fill=fill)


def _text(board: Image.Image, text: str, height: float, fill: Colour, drop: float = 0) -> None:
    mask = glyph(text, "DejaVuSans-Bold")
    mask = mask.resize((round(mask.width * height / mask.height), round(height)))
    board.paste((*fill, 255), (48 - mask.width // 2, round(48 + drop - height / 2)), mask)


def _prohibition(pen: Pen) -> None:
    _disc(pen, 46, RED)
    _disc(pen, 35, WHITE)


def _warning(pen: Pen) -> None:
    _polygon(pen, 3, 50, RED, drop=10)
    _polygon(pen, 3, 33, WHITE, drop=10)


def _mandatory(pen: Pen) -> None:
    _disc(pen, 46, WHITE)
    _disc(pen, 43, BLUE)


def _stop(pen: Pen, board: Image.Image) -> None:
    _polygon(pen, 8, 47, RED, turn=22.5)
    _text(board, "STOP", 22, WHITE)


def _no_entry(pen: Pen, board: Image.Image) -> None:
    _disc(pen, 46, RED)
    pen.rectangle([16, 39, 80, 57], fill=WHITE)


def _give_way(pen: Pen, board: Image.Image) -> None:
    _polygon(pen, 3, 50, RED, turn=90, drop=-10)
    _polygon(pen, 3, 30, WHITE, turn=90, drop=-10)


def _priority(pen: Pen, board: Image.Image) -> None:
    _polygon(pen, 4, 47, WHITE)
    _polygon(pen, 4, 36, YELLOW)


def _limit(number: str) -> Artwork:
    def draw_limit(pen: Pen, board: Image.Image) -> None:
        _prohibition(pen)
        _text(board, number, 34, BLACK)

    return draw_limit


def _no_vehicles(pen: Pen, board: Image.Image) -> None:
    _prohibition(pen)


def _danger(pen: Pen, board: Image.Image) -> None:
    _warning(pen)
    pen.polygon([(43, 36), (53, 36), (51, 57), (45, 57)], fill=BLACK)
    pen.ellipse([44, 61, 52, 69], fill=BLACK)


def _crossroads(pen: Pen, board: Image.Image) -> None:
    _warning(pen)
    pen.line([34, 56, 62, 56], fill=BLACK, width=8)
    pen.line([48, 38, 48, 72], fill=BLACK, width=8)


def _turn_left(pen: Pen, board: Image.Image) -> None:
    _mandatory(pen)
    pen.polygon([(14, 48), (40, 26), (40, 40), (80, 40), (80, 56), (40, 56), (40, 70)], fill=WHITE)


def _parking(pen: Pen, board: Image.Image) -> None:
    pen.rectangle([6, 6, 90, 90], fill=BLUE)
    _text(board, "P", 56, WHITE)


SIGNS: dict[str, Artwork] = {
    "stop": _stop,
    "no entry": _no_entry,
    "give way": _give_way,
    "priority road": _priority,
    "speed limit 30": _limit("30"),
    "no vehicles": _no_vehicles,
    "danger": _danger,
    "crossroads": _crossroads,
    "turn left": _turn_left,
    "parking": _parking,
}


@functools.cache
def board(name: str) -> Image.Image:
    """The sign `name` as it leaves the factory: RGBA, [BOARD, BOARD]; do not modify it, it is shared."""
    artwork = Image.new("RGBA", (BOARD, BOARD))
    SIGNS[name](ImageDraw.Draw(artwork), artwork)
    return artwork


@drawn_task(
    "signs",
    class_names=tuple(SIGNS),
    templates=("a {} traffic sign.", "a photo of a {} sign.", "the road sign {}."),
    subject="a traffic sign",
)
def draw(rng: np.random.Generator, label: int, split: Split) -> Image.Image:
    """One sign before trees, houses or sky, from dusk to full sun."""
    surroundings = ((90, 110, 70), (150, 170, 200), (120, 110, 100))[rng.integers(3)]
    street = backdrop(rng, near(rng, surroundings, 30), spread=60)
    clutter(rng, street, int(rng.integers(4, 14)), surroundings, 60)
    sign = placed(
        board(list(SIGNS)[label]),
        tuple(CANVAS / 2 + rng.uniform(-4, 4, 2)),
        rng.uniform(44, 58),
        angle=rng.uniform(-8, 8),
        shear=rng.uniform(-0.15, 0.15),
        stretch=rng.uniform(0.75, 1.1),
    )
    faded = ImageEnhance.Color(sign.convert("RGB")).enhance(rng.uniform(0.4, 1.1))
    street.paste(faded, mask=sign.getchannel("A"))
    return street
