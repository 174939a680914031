"""Colours are read by eyes that see fewer of them, on paper without them, and on both backgrounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from driftlens.base.variants import Part
from driftlens_reports.charts.theme import DARK, LIGHT, Palette, look, readable, scale, shade
from tests.reports.charts.recording import XYZ, Array, contrast, linear

themes = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
PARTS: tuple[Part, ...] = ("base", "expert", "merged", "calibrated", "baseline")

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHTS = {
    "full colour": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def lab(rgb: Array) -> Array:
    x, y, z = np.cbrt(np.maximum(XYZ @ rgb / np.array([0.95047, 1, 1.08883]), 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def lightness(colour: str) -> float:
    return float(lab(linear(colour))[0])


@themes
def test_marks_and_text_stand_out_from_the_background(theme: Palette) -> None:
    for part, shades in theme.roles.items():
        for colour in shades:
            assert contrast(colour, theme.surface) >= 3, (part, colour)
    assert contrast(theme.ink, theme.surface) >= 4.5 and contrast(theme.quiet, theme.surface) >= 4.5


@themes
@pytest.mark.parametrize("sight", SIGHTS)
def test_roles_differ_to_every_sight(theme: Palette, sight: str) -> None:
    seen = {part: lab(np.clip(SIGHTS[sight] @ linear(theme.roles[part][0]), 0, 1)) for part in PARTS}
    for one, other in itertools.combinations(PARTS, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 20, (one, other)


@themes
def test_roles_differ_without_colour(theme: Palette) -> None:
    """Where greys come close, and everywhere else too, symbol, dash and hatch differ."""
    looks = [
        look([], f"{part}:x" if part in ("calibrated", "baseline") else part, dark=theme is DARK)
        for part in PARTS
    ]
    for marks in ("symbol", "dash", "hatch"):
        assert len({getattr(entry, marks) for entry in looks}) == len(PARTS)


@pytest.mark.parametrize("part", ["calibrated", "baseline"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_several_variants_of_a_part_stay_distinct(part: str, dark: bool) -> None:
    variants = ["merged", *(f"{part}:{at}" for at in range(12))]
    looks = {variant: look(variants, variant, dark=dark) for variant in variants}
    assert len(set(looks.values())) == len(variants)
    first, second, third = (looks[f"{part}:{at}"] for at in range(3))
    assert len({first.colour, second.colour, third.colour}) == 3
    assert len({first.symbol, second.symbol, third.symbol}) == 3


def test_a_variant_looks_alike_whichever_others_are_shown() -> None:
    variants = ["merged", "calibrated:a", "calibrated:b"]
    light, dark = (look(variants, "calibrated:b", dark=dark) for dark in (False, True))
    assert light.colour != dark.colour and (light.symbol, light.dash) == (dark.symbol, dark.dash)
    assert light != look(variants, "calibrated:a", dark=False)


@themes
def test_the_sequential_scale_reads_in_grey(theme: Palette) -> None:
    steps = np.diff([lightness(shade(theme.sequential, at)) for at in np.linspace(0, 1, 41)])
    assert (steps < 0).all() or (steps > 0).all()
    assert contrast(theme.sequential[0], theme.surface) < contrast(theme.sequential[-1], theme.surface)


@themes
def test_the_diverging_scale_reads_in_grey_on_both_sides(theme: Palette) -> None:
    values = [lightness(shade(theme.diverging, at)) for at in np.linspace(0, 1, 41)]
    away = 1 if theme is DARK else -1
    assert (np.diff(values[20:]) * away > 0).all() and (np.diff(values[:21]) * away < 0).all()
    assert values[-1] - values[0] >= 10, "the negative end is darker"
    middle = linear(shade(theme.diverging, 0.5))
    assert np.ptp(middle) < 0.03, "zero has no hue"


@themes
def test_numbers_on_colours_can_be_read(theme: Palette) -> None:
    for colours in (theme.sequential, theme.diverging):
        for at in np.linspace(0, 1, 101):
            colour = shade(colours, at)
            assert contrast(readable(colour), colour) >= 4.5, colour


def test_a_shade_lies_between_its_neighbours() -> None:
    colours = ("#000000", "#204060", "#FFFFFF")
    assert [shade(colours, at) for at in (0, 0.25, 0.5, 1, 2)] == [
        *("#000000", "#102030", "#204060"),
        *("#FFFFFF", "#FFFFFF"),
    ]
    assert scale(colours) == [(0, "#000000"), (0.5, "#204060"), (1, "#FFFFFF")]
