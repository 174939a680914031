"""Small pictures of diagnosis samples: what is stored is what the data holds, in the order of the features."""

from __future__ import annotations

import numpy as np
from PIL import Image

from driftlens.jobs.analyze.job import thumb
from driftlens.runs.layout import THUMB_SIDE as SIDE
from driftlens.runs.run import DriftRun


def test_a_picture_keeps_its_proportions_between_grey_bars() -> None:
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :, 0] = 255
    small = thumb(pixels)
    assert small.shape == (SIDE, SIDE, 3)
    assert (small[SIDE // 4 : 3 * SIDE // 4] == [255, 0, 0]).all()
    assert (small[: SIDE // 4] == 128).all() and (small[-SIDE // 4 :] == 128).all()


def test_grey_arrays_and_images_give_the_same_picture() -> None:
    grey = np.arange(SIDE * SIDE, dtype=np.uint32).reshape(SIDE, SIDE).astype(np.uint8)
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(thumb(grey), expected)
    np.testing.assert_array_equal(thumb(Image.fromarray(grey)), expected)


def test_an_analysis_keeps_a_picture_of_every_diagnosis_sample(light: DriftRun) -> None:
    for task in light.tasks:
        found = light.thumbs(task)
        assert found is not None and len(found) == len(light.sample_ids(task))
        assert f"thumbs/{task}.npz" in light.manifest.files
