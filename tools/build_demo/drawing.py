"""What the drawn tasks share; pictures are drawn at twice their size and averaged down, which smooths edges."""

from __future__ import annotations

import functools
import pathlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 32
CANVAS = 2 * SIZE

Pixels = NDArray[np.uint8]
"""[h, w, 3], sRGB."""
Field = NDArray[np.floating]
"""One number per pixel."""
Colour = tuple[int, int, int]

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
UPRIGHT_FONTS = tuple(name for name in FONTS if not any(slant in name for slant in ("Obl", "Ita", "ti")))

GLYPH = 48
"""Height in pixels at which a glyph is kept before it is placed."""

Split = Literal["train", "test"]
Purpose = Literal["base", "train", "test"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
Draw = Callable[[np.random.Generator, int, Split], Image.Image]
"""(random numbers, class, split) -> one scene. What is not random (a photograph's regions, collected handwriting)
is divided between the splits."""


def colour(rng: np.random.Generator, chroma: int = 50) -> Colour:
    """Draw a random colour of any brightness whose channels differ from grey by at most `chroma`."""
    grey = int(rng.integers(0, 256))
    return near(rng, (grey, grey, grey), chroma)


def near(rng: np.random.Generator, reference: Colour, spread: int) -> Colour:
    """Draw a colour that differs from `reference` by at most `spread` per channel."""
    red, green, blue = (
        min(max(round(channel + spread * (2 * chance - 1)), 0), 255)
        for channel, chance in zip(reference, rng.random(3).tolist(), strict=True)
    )
    return red, green, blue


def luminance(of: Colour) -> float:
    """Perceived brightness in [0, 255] (ITU-R BT.601 weights)."""
    return 0.299 * of[0] + 0.587 * of[1] + 0.114 * of[2]


def dark_and_light(rng: np.random.Generator, gap: float) -> tuple[Colour, Colour]:
    """Two random colours; the second is brighter than the first by at least `gap`."""
    while True:
        dark, light = colour(rng), colour(rng)
        if luminance(light) - luminance(dark) >= gap:
            return dark, light


def from_values(values: Field) -> Image.Image:
    """Return the picture of these brightnesses, clipped to 0 to 255."""
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def backdrop(rng: np.random.Generator, middle: Colour, spread: int = 30, side: int = CANVAS) -> Image.Image:
    """Draw a smooth background [side, side] between four shades of `middle`, one in each corner."""
    corners = [[near(rng, middle, spread) for _ in range(2)] for _ in range(2)]
    return Image.fromarray(np.array(corners, dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)


def smooth_field(rng: np.random.Generator, cells: int, side: int = CANVAS) -> Field:
    """Smooth random values, about -1 to 1, that change over `side / cells` pixels."""
    knots = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
    return np.asarray(knots.resize((side, side), Image.Resampling.BICUBIC))


def clutter(rng: np.random.Generator, picture: Image.Image, count: int, middle: Colour, spread: int) -> None:
    """Draw `count` random strokes and blots onto `picture`, in shades of `middle`."""
    pen = ImageDraw.Draw(picture)
    for _ in range(count):
        ink = near(rng, middle, spread)
        x, y, u, v = rng.uniform(0, picture.width, 4).tolist()
        if rng.random() < 0.5:
            pen.line([x, y, u, v], fill=ink, width=int(rng.integers(1, 4)))
        else:
            radius = rng.uniform(1, 6)
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=ink)


@functools.cache
def _face(font: str) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(folder / f"{font}.ttf", GLYPH)


@functools.lru_cache(maxsize=1024)
def glyph(text: str, font: str) -> Image.Image:
    """Return the mask of a few characters in one of FONTS, cropped, GLYPH pixels high; don't modify it."""
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
    """`image` on an empty canvas, scaled, sheared and turned (degrees, clockwise) about `centre` (canvas pixels)."""
    scale, turn = height / image.height, np.deg2rad(angle)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    forward = rotation @ np.array([[stretch * scale, shear * scale], [0.0, scale]])
    back = np.linalg.inv(forward)
    # PIL asks where an output pixel comes from: source = back @ (output - centre) + middle of the source.
    offset = np.array([image.width / 2, image.height / 2]) - back @ np.array(centre)
    coefficients = np.column_stack([back, offset]).ravel().tolist()
    return image.transform((CANVAS, CANVAS), Image.Transform.AFFINE, coefficients, resample=Image.Resampling.BILINEAR)


def placed_somewhere(
    image: Image.Image,
    rng: np.random.Generator,
    *,
    shift: float,
    height: tuple[float, float],
    angle: float,
    shear: float = 0.0,
    stretch: tuple[float, float] | None = None,
) -> Image.Image:
    """`image` placed near the middle, varied within these bounds; numbers are drawn in this order, if it may vary."""
    return placed(
        image,
        tuple(CANVAS / 2 + rng.uniform(-shift, shift, 2)),
        rng.uniform(*height),
        angle=rng.uniform(-angle, angle),
        shear=rng.uniform(-shear, shear) if shear else 0.0,
        stretch=rng.uniform(*stretch) if stretch else 1.0,
    )


Bounds = tuple[float, float]
"""Smallest and largest value of something random."""


def photographed(
    scene: Image.Image,
    rng: np.random.Generator,
    *,
    light: Bounds = (0.85, 1.15),
    contrast: Bounds = (0.85, 1.1),
    blur: float = 0.5,
    noise: Bounds = (1.0, 5.0),
) -> Pixels:
    """Render a photograph [SIZE, SIZE, 3] of a scene; `blur` in final pixels, `noise` as deviation, out of 255."""
    picture = scene.reduce(scene.width // SIZE) if scene.width != SIZE else scene
    radius = rng.uniform(0, blur)
    if radius > 0.3:  # less than that changes nothing that can be seen
        picture = picture.filter(ImageFilter.GaussianBlur(radius))
    seen = np.asarray(picture, dtype=np.float32)
    middle = seen.mean(axis=(0, 1))
    seen = (middle + (seen - middle) * rng.uniform(*contrast)) * rng.uniform(*light)
    grain = rng.standard_normal(seen.shape, dtype=np.float32) * rng.uniform(*noise)
    pixels: Pixels = (seen + grain).clip(0, 255).astype(np.uint8)
    return pixels


@dataclass(frozen=True)
class DrawnTask:
    """A classification task of pictures from code; captions with a number in place of the class say `subject`."""

    name: str
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    subject: str
    draw: Draw

    def pictures(self, purpose: Purpose, count: int, seed: int) -> tuple[Pixels, NDArray[np.int64]]:
        """Pictures [count, h, w, 3] and labels [count], classes equally often; base ones share the train sources."""
        stream = zlib.crc32(f"{self.name}/{purpose}".encode())
        rng = np.random.default_rng([seed, stream])
        labels = rng.permutation(np.arange(count) % len(self.class_names))
        split: Split = "test" if purpose == "test" else "train"
        drawn = [photographed(self.draw(rng, label, split), rng) for label in labels.tolist()]
        return np.stack(drawn), labels


tasks: dict[str, DrawnTask] = {}
"""By name. The modules `characters`, `figures` and `views` add to it; `image` imports them."""


def drawn_task(
    name: str, *, class_names: tuple[str, ...], templates: tuple[str, ...], subject: str
) -> Callable[[Draw], Draw]:
    """Register the decorated function, which draws one picture, as the task `name`."""

    def register(draw: Draw) -> Draw:
        tasks[name] = DrawnTask(name, class_names, templates, subject, draw)
        return draw

    return register
