"""Images to pixels: each library's way against the other's, and against the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from driftlens.models.preprocessing import Preprocess, hf_clip_preprocess, open_clip_preprocess
from driftlens.utils.errors import DataError, IncompatibleModelsError
from tests.refusing import refusing

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
CONFIG = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}


def array(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def both() -> tuple[Preprocess, Preprocess]:
    return hf_clip_preprocess(CONFIG, (32, 32), "model"), open_clip_preprocess({}, (32, 32), "model")


IMAGES: dict[str, Any] = {
    "as_large_as_the_tower": array(32, 32),
    "wide": array(37, 61),
    "tall_and_small": array(40, 20),
    "large": array(211, 160),
    "grey": array(40, 50)[..., 0],
    "pil_grey": Image.fromarray(array(40, 50)[..., 0]),
    "pil_transparent": Image.fromarray(np.dstack([array(40, 50), array(40, 50)[..., 0]])),
    "pil_palette": Image.fromarray(array(40, 50)).convert("P"),
}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_both_libraries_give_the_same_pixels(image: Any) -> None:
    first, second = (preprocess([image]) for preprocess in both())
    assert first.shape == (1, 3, 32, 32) and first.dtype == second.dtype == torch.float32
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["transformers", "open_clip"])
def test_images_are_resized_by_pil_bicubically_along_the_shorter_side(which: int) -> None:
    image = Image.fromarray(array(64, 128))
    resized = np.asarray(image.resize((64, 32), Image.Resampling.BICUBIC))[:, 16:48]
    expected = ((resized / 255 - MEAN) / STD).transpose(2, 0, 1)
    torch.testing.assert_close(both()[which]([image])[0].double(), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["transformers", "open_clip"])
def test_a_batch_is_its_images_one_by_one(which: int) -> None:
    preprocess = both()[which]
    images = [array(40, 50), Image.fromarray(array(33, 90, seed=1)), array(32, 32, seed=2)[..., 0]]
    assert torch.equal(preprocess(images), torch.cat([preprocess([image]) for image in images]))
    assert torch.equal(preprocess(np.stack([array(40, 50)] * 2))[1], preprocess(images)[0])


def test_stated_settings_are_used() -> None:
    image, stated = array(40, 60), {"mean": [0.5] * 3, "std": [0.25] * 3}
    own = open_clip_preprocess({**stated, "interpolation": "bilinear", "resize_mode": "squash"}, (32, 32), "model")
    resized = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR))
    expected = torch.tensor((resized / 255 - 0.5) / 0.25).permute(2, 0, 1)
    torch.testing.assert_close(own([image])[0].double(), expected, rtol=0, atol=1e-6)
    config = {
        **CONFIG,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "resample": 2,
        "size": {"height": 32, "width": 32},
    }
    theirs = hf_clip_preprocess(config, (32, 32), "model")
    torch.testing.assert_close(theirs([image])[0].double(), expected, rtol=0, atol=1e-6)
    assert not own.notice and not theirs.notice


def test_files_of_older_versions_mean_the_same() -> None:
    older = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "resample": 3}
    image = array(37, 61)
    assert torch.equal(
        hf_clip_preprocess(older, (32, 32), "m")([image]), hf_clip_preprocess(CONFIG, (32, 32), "m")([image])
    )


def test_without_a_file_clips_defaults_are_used_and_said() -> None:
    image = array(37, 61)
    expected = hf_clip_preprocess(CONFIG, (32, 32), "model")([image])
    for preprocess, file in (
        (hf_clip_preprocess(None, (32, 32), "org/model"), "preprocessor_config.json"),
        (open_clip_preprocess(None, (32, 32), "org/model"), "preprocess_cfg"),
    ):
        torch.testing.assert_close(preprocess([image]), expected, rtol=0, atol=1e-6)
        assert "org/model" in preprocess.notice and file in preprocess.notice


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((32, 32, 3), dtype=np.float32), "float32"),
        (np.zeros((3, 32, 32), dtype=np.uint8), "[3, 32, 32]"),
        (np.zeros((32, 32, 4), dtype=np.uint8), "[32, 32, 4]"),
        (np.zeros(32, dtype=np.uint8), "[32]"),
    ],
    ids=["floats", "channels_first", "four_channels", "flat"],
)
def test_other_arrays_are_refused(image: Any, words: str) -> None:
    for preprocess in both():
        with refusing(DataError, words, match="an image is"):
            preprocess([image])


def test_another_models_file_is_refused() -> None:
    with pytest.raises(IncompatibleModelsError, match="SiglipImageProcessor"):
        hf_clip_preprocess({"image_processor_type": "SiglipImageProcessor"}, (32, 32), "model")


def test_real_images_give_equal_pixels(real: Path) -> None:
    files = sorted((real / "data").glob("*.npz"))
    assert files
    for file in files:
        images = np.load(file)["x_test"][:50]
        first, second = (preprocess(list(images)) for preprocess in both())
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
