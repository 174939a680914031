"""Image encoders of transformers whose folders have no classifier, or images of many sizes: measured and repaired."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import driftlens as dl
from driftlens.models.architecture import load_architecture
from driftlens.models.chain import pool_features
from driftlens.models.tracing.block_call import map_leaves
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import small
from tests.zoo.suite import spec_of_folders
from tests.zoo.tensors import assert_every_tensor, site_keys
from tests.zoo.walking import chain_states

PATCHED: dict[str, Any] = {"image_size": 16, "patch_size": 4}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
NAFLEX = {"patch_size": 4, "num_patches": 16}


def siglip2() -> Any:
    config = transformers.Siglip2Config(
        vision_config=SIZES | NAFLEX, text_config=SIZES | {"vocab_size": 20}, num_labels=3
    )
    return transformers.Siglip2ForImageClassification(config)


KINDS: dict[str, Callable[[], Any]] = {
    "DINOv3 ViT": lambda: small("DINOv3ViTModel", num_register_tokens=2, **PATCHED),
    "DINOv3 ConvNeXt": lambda: small("DINOv3ConvNextModel", image_size=32, hidden_sizes=[8, 16], depths=[1, 2]),
    "ViT-MAE": lambda: small("ViTMAEModel", mask_ratio=0.75, **PATCHED),
    "SigLIP 2 NaFlex": siglip2,
}
PARAMS = [pytest.param(name, marks=pytest.mark.family(f"{name} (transformers)")) for name in KINDS]


def processor(name: str) -> Any:
    if name.startswith("SigLIP"):
        return transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=16)
    edge = 32 if "ConvNeXt" in name else 16
    return transformers.ViTImageProcessor(size={"height": edge, "width": edge})


def pictures(folder: Path, count: int) -> list[Image.Image]:
    """Images of several forms, on disk and in the order of their names."""
    folder.mkdir(parents=True)
    draw, made = np.random.default_rng(len(str(folder.name))), []
    for at in range(count):
        shape = (12 + 4 * (at % 3), 24 - 4 * (at % 4), 3)
        made.append(Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)))
        made[-1].save(folder / f"{at:02}.png")
    return made


def in_float64(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def features(name: str, model: Any, pixels: Any) -> torch.Tensor:
    """The final feature of one image alone, as the library gives it."""
    inputs = dict(pixels) if isinstance(pixels, dict) else {"pixel_values": pixels}
    if name == "ViT-MAE":  # which shuffles patches, and hides most of them
        model.config.mask_ratio = 0.0
        inputs["noise"] = torch.arange(16)[None]
    if name.startswith("SigLIP"):
        model.classifier = torch.nn.Identity()
    with torch.no_grad():
        made = model.double()(**map_leaves(inputs, in_float64))
    if "logits" in made:
        return made.logits[0]
    return pool_features(made.last_hidden_state, "mean" if "ConvNeXt" in name else "cls")[0]


@pytest.mark.shows("attribution", "sites", "reloads", files="hf-auto")
@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_an_encoder_is_measured_calibrated_and_reloaded(name: str, tmp_path: Path) -> None:
    base = perturbed(with_seed(KINDS[name])(), 0, 0.1).eval()
    models = {"base": base, **{task: perturbed(base, seed, 0.05) for seed, task in enumerate("ab", 1)}}
    shown = {}
    for model, module in models.items():
        module.save_pretrained(tmp_path / model)
        processor(name).save_pretrained(tmp_path / model)
    data: dict[str, Any] = {"defaults": {"n": 8, "n_diagnosis": 6, "batch_size": 4}}
    for task in "ab":
        pictures(tmp_path / f"{task}-train", 8)
        shown[task] = pictures(tmp_path / f"{task}-test", 6)
        places = {
            split: str(tmp_path / f"{task}-{end}") for split, end in (("calibration", "train"), ("test", "test"))
        }
        data[task] = {"kind": "imagefolder", **places, "unlabelled": ["calibration", "test"]}
    folders = {task: tmp_path / task for task in "ab"}
    spec = spec_of_folders(
        "hf-auto",
        tmp_path / "base",
        folders,
        data,
        metrics={"jacobian": {"samples": 2}},
        compute={"dtype": "float64"},
        heads={task: {"linear": "own", "classes": ["x", "y", "z"]} for task in "ab"} if name.startswith("S") else {},
    )
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-9 and rows[rows["role"] != "stem"]["drift_l2_mean"].gt(0).all()
    assert np.allclose(rows.groupby("task")[["final_share", "remainder_share"]].sum().sum(axis=1), 1, atol=1e-6)
    run = run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    known = load_architecture("hf-auto", str(tmp_path / "base"))
    assert known.preprocess is not None
    assert_every_tensor(
        tmp_path / "base",
        list(folders.values()),
        tmp_path / "saved",
        scaling=0.3,
        heads="classifier.",
        solved=site_keys(known, tmp_path / "base"),
    )
    assert ("mask_ratio=0.0" in (tmp_path / "saved" / "README.md").read_text()) == (name == "ViT-MAE")
    for variant, folder in (("expert", "a"), ("calibrated:featcal", "saved")):
        model, info = type(base).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        measured = run.features("a", variant, "final")  # in float16
        ids = run.samples("a", "merged", layer="final")["sample_id"]
        for row, sample in zip(measured, ids, strict=True):
            pixels = known.preprocess([shown["a"][int(Path(str(sample)).stem)]])
            wanted = features(name, model.eval(), pixels).numpy()
            np.testing.assert_allclose(row, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.shows("drift", files="hf-auto")
@pytest.mark.parametrize("name", PARAMS)
def test_images_alone_and_in_any_order_have_the_features_of_a_batch(name: str, tmp_path: Path) -> None:
    model = perturbed(with_seed(KINDS[name])(), 0, 0.1).eval()
    model.save_pretrained(tmp_path / "model")
    processor(name).save_pretrained(tmp_path / "model")
    known, images = load_architecture("hf-auto", str(tmp_path / "model")), pictures(tmp_path / "images", 5)
    assert known.preprocess is not None
    weights = {key: value.double() for key, value in model.state_dict().items()}
    for order in ([0, 1, 2, 3, 4], [3, 0], [2]):
        inputs = map_leaves(known.preprocess([images[at] for at in order]), in_float64)
        made = pool_features(chain_states(known.chain, weights, inputs)[-1]["hidden"], known.chain.modality.pool)
        for row, at in zip(made, order, strict=True):
            wanted = features(name, model, known.preprocess([images[at]]))
            assert (row - wanted).norm() <= 1e-9 * wanted.norm()


@pytest.mark.slow
@pytest.mark.shows("live")
@pytest.mark.parametrize("name", PARAMS)
def test_live_encoders_drift_as_their_library_says(name: str, tmp_path: Path) -> None:
    base = perturbed(with_seed(KINDS[name])(), 0, 0.1).double().eval()
    merged, expert = (perturbed(base, seed, 0.05) for seed in (1, 2))
    base.save_pretrained(tmp_path / "model")
    processor(name).save_pretrained(tmp_path / "model")
    known, images = load_architecture("hf-auto", str(tmp_path / "model")), pictures(tmp_path / "images", 4)
    assert known.preprocess is not None
    batch = known.preprocess(images)
    batch = map_leaves(batch if isinstance(batch, dict) else {"pixel_values": batch}, in_float64)
    for model in (base, merged, expert) if name == "ViT-MAE" else ():
        model.config.mask_ratio = 0.0
    run = dl.analyze(
        merged=merged,
        experts={"a": expert},
        data={"a": [batch]},
        out=tmp_path / "run",
        mask="pixel_attention_mask" if name.startswith("SigLIP") else None,
        jacobian=None,
        progress="none",
    )
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-9 and rows.iloc[-1]["drift_l2_mean"] > 0
