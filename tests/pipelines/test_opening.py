"""Heads of all tasks: one text tower for all of them, and none where nobody asks for it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import driftlens as dl
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource
from driftlens.experiment.study_loading import OpenModels
from driftlens.models.architecture import Architecture
from driftlens.models.heads import TextTower
from driftlens.pipelines.calibrate import calibrate
from driftlens.runs.run import DriftRun
from tests.pipelines.calibrating import request, scored_again
from tests.zoo.world import CLASSES, NUM_TEST, NUM_TRAIN, TASKS, World

BASE = InMemorySource("base", {"w": torch.ones(1)})
FIRST, SECOND = TASKS


def embed(prompts: Sequence[str]) -> Tensor:
    """How often each letter occurs, so that every name and template counts."""
    return torch.tensor([[float(prompt.count(letter)) for letter in "abcdeilorst"] for prompt in prompts])


TOWER = TextTower(embed, 7.0)


@dataclass
class Towers:
    """Stands for an architecture, and counts how often its text tower is opened."""

    opened: int = 0

    def classifier_keys(self, stored: StateSource) -> None:
        return None

    def text_tower(self, base: StateSource) -> TextTower:
        assert base is BASE
        self.opened += 1
        return TOWER


def models(towers: Towers, base: StateSource | None = BASE) -> OpenModels:
    stored = {} if base is None else {"base": base}
    return OpenModels(cast("Architecture", towers), stored, {}, {})


def prompts(task: str, *templates: str) -> dict[str, Any]:
    return {"classes": list(CLASSES[task]), "templates": list(templates)}


NAMES = CLASSES[TASKS[0]]
COUNTS = {"n": NUM_TRAIN, "n_diagnosis": NUM_TEST}


def measured(world: World, out: Path, entry: dict[str, Any]) -> DriftRun:
    """Analysed and calibrated on all samples, and its accuracy measured anew."""
    data = {"defaults": {**COUNTS, "batch_size": 4}, TASKS[0]: entry}
    spec = world.one_task(data=data, metrics={"jacobian": False})
    dl.analyze(spec, out=out, progress="none")
    calibrate(out, request(preset="paper-clip"))
    return scored_again(out)


@pytest.fixture(scope="module")
def expected(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    entry = {"kind": "npz", "file": str(world.data(TASKS[0]))}
    return measured(world, tmp_path_factory.mktemp("expected") / "run", entry)


def folder(place: Path, arrays: Any) -> dict[str, Any]:
    """Calibration images without classes beside test images in class folders."""
    for row, image in enumerate(arrays["x_train"]):
        (place / "train").mkdir(exist_ok=True)
        Image.fromarray(image).save(place / f"train/{row}.png")
    for row, (image, label) in enumerate(zip(arrays["x_test"], arrays["y_test"], strict=True)):
        (place / "test" / NAMES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / "test" / NAMES[label] / f"{row}.png")
    return {"kind": "imagefolder", "calibration": str(place / "train"), "test": str(place / "test")}


def table(place: Path, arrays: Any) -> dict[str, Any]:
    lines = ["path,label,part"]
    for part in ("train", "test"):
        for row, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
            Image.fromarray(image).save(place / f"{part}-{row}.png")
            lines.append(f"{part}-{row}.png,{label},{part}")
    (place / "all.csv").write_text("\n".join(lines))
    splits = {"split": "part", "calibration": "train", "test": "test"}
    return {"kind": "table", "file": str(place / "all.csv"), "classes": list(NAMES), **splits}


def webdataset(place: Path, arrays: Any) -> dict[str, Any]:
    for part in ("train", "test"):
        with tarfile.open(place / f"{part}-0.tar", "w") as tar:
            for row, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
                png = io.BytesIO()
                Image.fromarray(image).save(png, "PNG")
                for ending, content in (("png", png.getvalue()), ("txt", NAMES[label].encode())):
                    info = tarfile.TarInfo(f"{row}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    places = {"calibration": str(place / "train-*.tar"), "test": str(place / "test-0.tar")}
    return {"kind": "webdataset", "label": "txt", **places}


@pytest.mark.slow
@pytest.mark.parametrize("write", [folder, table, webdataset])
def test_the_numbers_are_those_of_the_same_images_in_arrays(
    world: World, expected: DriftRun, tmp_path: Path, write: Any
) -> None:
    (tmp_path / "data").mkdir()
    with np.load(world.data(TASKS[0])) as arrays:
        entry = write(tmp_path / "data", arrays)
    run = measured(world, tmp_path / "run", entry)
    columns = ["variant", "layer", "n", "drift_l2_mean", "cos_mean", "mismatch_l2_mean"]
    found, wanted = run.layers()[columns], expected.layers()[columns]
    assert "calibrated:featcal" in set(found["variant"])
    assert found[["variant", "layer", "n"]].equals(wanted[["variant", "layer", "n"]])
    np.testing.assert_allclose(found[columns[3:]], wanted[columns[3:]], rtol=1e-4, atol=1e-6)
    right = ["variant", "value", "n"]
    assert run.accuracy()[right].equals(expected.accuracy()[right])
    assert len(run.accuracy()) >= 4
