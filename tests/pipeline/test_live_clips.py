"""Whole CLIPs as live modules: fed as their processors feed them, or with plain pixels."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.base.errors import DataError
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.zoo.cases import perturbed
from tests.zoo.world import MODEL, TRANSFORMERS


def whole_hf() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 32,
    }
    vision = {key: value for key, value in TRANSFORMERS.items() if key != "projection_dim"}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def whole_open_clip() -> nn.Module:
    import open_clip

    return open_clip.CLIP(**MODEL)


def features(model: nn.Module, x: Tensor) -> Tensor:
    if hasattr(model, "encode_image"):
        return model.encode_image(x)
    return model.visual_projection(model.vision_model(x).pooler_output)


def given(build: Callable[[], nn.Module], batch: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build()
    return {
        "base": base,
        "merged": perturbed(base, 1, 0.05).train(),
        "experts": {"cars": perturbed(base, 2, 0.05)},
        "data": {"cars": [batch]},
    }


@pytest.mark.shows("live", "drift", "sites")
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(whole_hf, id="hf", marks=TRANSFORMERS_CLIP),
        pytest.param(whole_open_clip, id="open_clip", marks=OPEN_CLIP),
    ],
)
def test_a_whole_clip_is_measured_and_calibrated_by_its_image_tower(
    build: Callable[[], nn.Module], tmp_path: pathlib.Path
) -> None:
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = torch.ones(6, 4, dtype=torch.long)
    plain = dl.analyze(**given(build, x), out=tmp_path / "plain", progress="none")
    processed = {"input_ids": tokens, "attention_mask": tokens, "pixel_values": x}
    modules = given(build, processed)
    run = dl.analyze(**modules, out=tmp_path / "run", progress="none")
    pd.testing.assert_frame_equal(run.layers(), plain.layers())
    with torch.no_grad():
        wanted = [
            features(model.eval(), x) for model in (given(build, x)["merged"], modules["experts"]["cars"])
        ]
    found = run.value("drift_l2_mean", task="cars")
    assert found == pytest.approx((wanted[0] - wanted[1]).norm(dim=1).mean().item(), rel=1e-4)
    assert modules["merged"].training and list(plain.manifest.notices) == []
    assert list(run.manifest.notices) == [
        "task cars: of its batches input_ids, attention_mask are not read: the image tower reads pixel_values"
    ]
    state = run.calibrate(dl.FeatCal(), name="featcal").calibrated_state("featcal")
    fitted = dl.FeatCal().fit(*(modules[name] for name in ("merged", "base", "experts", "data")))
    for key, value in fitted.model_.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": torch.zeros(2, 3, 16, 16)}, "a dict of image; an image tower wants"),
        (torch.zeros(2, 3, 8, 8), r"pixels is \[2, 3, 8, 8\]; the image tower wants \[n, 3, 16, 16\]"),
    ],
    ids=["other name", "other size"],
)
def test_a_batch_without_such_pixels_is_refused(batch: Any, words: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=words):
        dl.analyze(**given(whole_open_clip, batch), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
