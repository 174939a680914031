"""Corruptions of pictures are ImageNet-C's, of any size, and the same for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from driftlens.data.altered import (
    CORRUPTIONS,
    corrupt_image,
    corrupt_samples,
    format_corruption,
    parse_corruption,
)
from driftlens.data.samples import SampleSet
from driftlens.utils.errors import DataError, SpecError

DRAWN = (42, "dtd/7")


def picture(side: int = 224) -> np.ndarray:
    """A smooth colour ramp with a bright square, [side, side + 8, 3]."""
    rows, columns = np.mgrid[0:side, 0 : side + 8] / side
    found = np.stack([rows, columns.clip(0, 1), 0.5 * (1 - rows)], axis=-1)
    found[side // 4 : side // 2, side // 4 : side // 2] = 0.9
    return np.asarray(found * 255, dtype=np.uint8)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("side", [16, 224])
def test_severities_grow_and_draws_repeat(kind: str, side: int) -> None:
    clean = picture(side)
    found = [corrupt_image(clean, kind, severity, DRAWN) for severity in range(1, 6)]
    assert all(of.shape == clean.shape and of.dtype == np.uint8 for of in found)
    off = [distance(of, clean) for of in found]
    assert 0 < off[0] < off[4], "the most severe is farther away"
    np.testing.assert_array_equal(found[2], corrupt_image(Image.fromarray(clean), kind, 3, DRAWN))
    for other in ((43, "dtd/7"), (42, "dtd/8")):
        assert distance(found[2], corrupt_image(clean, kind, 3, other)) > 0


def test_strengths_are_those_of_imagenet_c() -> None:
    grey = np.full((224, 224, 3), 128, dtype=np.uint8)
    noise = (corrupt_image(grey, "gaussian_noise", 3, DRAWN) / 255.0 - 128 / 255).std()
    assert noise == pytest.approx(0.18, rel=0.03)  # a few values beyond 0 and 1 are cut


def test_motion_blur_is_half_a_gaussian_along_a_line() -> None:
    dot = np.zeros((224, 224, 3), dtype=np.uint8)
    dot[112, 112] = 255
    found = corrupt_image(dot, "motion_blur", 3, DRAWN)[..., 0] / 255.0
    rows, columns = found.nonzero()
    assert columns.max() == 112 and 90 < columns.min() < 112, "it trails to one side"
    slopes = [(r - 112) / (c - 112) for r, c in zip(rows, columns, strict=True) if abs(c - 112) > 5]
    assert np.ptp(slopes) < 0.2 and abs(math.atan(float(np.mean(slopes)))) <= math.radians(45)
    weights = np.exp(-(np.arange(31.0) ** 2) / (2 * 8**2))
    assert found[112, 112] == pytest.approx(weights[0] / weights.sum(), abs=0.003)
    assert found.sum() == pytest.approx(1, abs=0.06)  # each value is rounded to a byte


def test_fog_brightens_and_hides() -> None:
    dark = np.zeros((64, 64, 3), dtype=np.uint8)
    dark[0, 0] = 255
    found = corrupt_image(dark, "fog", 3, DRAWN)[8:]
    assert 2.5 / 3.5 * 255 * 0.95 < found.max() <= 2.5 / 3.5 * 255 + 1
    assert found.min() < 20 and (found[..., 0] == found[..., 2]).all()
    fogged, clean = corrupt_image(picture(64), "fog", 3, DRAWN), picture(64)
    square = np.s_[16:32, 16:32]
    contrast = [of[square].mean() - of[16:32, 40:56].mean() for of in (fogged, clean)]
    assert abs(contrast[0]) < abs(contrast[1])


def test_samples_are_corrupted_one_by_one_as_they_are_read() -> None:
    shown = [picture(16), picture(20)[:16, :24], picture(32)[:16, :24]]
    whole = SampleSet(
        **{"task": "dtd", "split": "calibration", "ids": ("a", "b", "c"), "labels": None},
        load=lambda at: np.stack([shown[i] for i in at]),
        picture=shown.__getitem__,
        preprocess=np.stack,
    )
    assert corrupt_samples(whole, "none", 1) is whole
    found = corrupt_samples(whole, "fog", 1).load([2, 0])
    np.testing.assert_array_equal(found[0], corrupt_image(shown[2], "fog", 3, (1, "dtd/c")))
    np.testing.assert_array_equal(found[1], corrupt_image(shown[0], "fog", 3, (1, "dtd/a")))


def test_what_is_no_corruption_is_refused() -> None:
    assert (format_corruption("fog"), format_corruption("fog:5"), format_corruption("none")) == (
        "fog:3",
        "fog:5",
        "none",
    )
    assert parse_corruption("none") == ("none", 0)
    for given, said in [
        ("fogg", "gaussian_noise, motion_blur, fog"),
        ("fog:6", "expected 1 to 5"),
        ("none:3", "no"),
    ]:
        with pytest.raises(SpecError, match=said):
            parse_corruption(given)
    texts = SampleSet("a", "calibration", ("0",), None, list)
    with pytest.raises(DataError, match="only images of a data source can be corrupted"):
        corrupt_samples(texts, "fog", 0)
