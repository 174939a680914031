"""Characters in the fonts that matplotlib ships, and the placement of any mask on the canvas."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from driftlens.suites.drawing.canvas import CANVAS

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
UPRIGHT_FONTS = tuple(name for name in FONTS if not any(slant in name for slant in ("Obl", "Ita", "ti")))
BOLD_FONTS = tuple(name for name in FONTS if "Bol" in name or name == "cmb10")

GLYPH = 48
"""Height in pixels at which a glyph is kept before it is placed."""


@functools.cache
def _face(font: str) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"{font}.ttf", GLYPH)


@functools.lru_cache(maxsize=1024)
def glyph(text: str, font: str) -> Image.Image:
    """The mask of `text`, cropped to its ink and GLYPH pixels high; do not modify it, it is shared.

    Args:
        text: one or a few characters.
        font: one of FONTS.
    """
    face = _face(font)
    left, top, right, bottom = (int(edge) for edge in face.getbbox(text))
    mask = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=face)
    return mask.resize((max(1, round(mask.width * GLYPH / mask.height)), GLYPH))


def placed(
    image: Image.Image,
    centre: tuple[float, float],
    height: float,
    *,
    angle: float = 0.0,
    shear: float = 0.0,
    stretch: float = 1.0,
) -> Image.Image:
    """`image` on an empty [CANVAS, CANVAS] canvas, scaled, sheared and turned about its own centre.

    Args:
        image: a mask (mode L) or a picture with its own mask (RGBA).
        centre: where the image's centre lands, in canvas pixels.
        height: its height there, in canvas pixels.
        angle: turn in degrees, clockwise.
        shear: horizontal shift per unit of height.
        stretch: width relative to the image's own proportions.
    """
    scale, turn = height / image.height, np.deg2rad(angle)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    forward = rotation @ np.array([[stretch * scale, shear * scale], [0.0, scale]])
    back = np.linalg.inv(forward)
    # PIL asks where an output pixel comes from: source = back @ (output - centre) + middle of the source.
    offset = np.array([image.width / 2, image.height / 2]) - back @ np.array(centre)
    coefficients = np.column_stack([back, offset]).ravel().tolist()
    return image.transform(
        (CANVAS, CANVAS), Image.Transform.AFFINE, coefficients, resample=Image.Resampling.BILINEAR
    )
