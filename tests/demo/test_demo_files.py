"""The demo's files are small, are what the builder draws and writes, and are all that its run specs name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import driftlens.demo
from driftlens.config.spec import load_spec
from driftlens.data.samples import random_order
from driftlens.demo import PROBES, spec_file
from tests.quick import few
from tools.build_demo import image, text
from tools.build_demo.__main__ import SUITES, write_spec

FOLDER = Path(driftlens.demo.__file__).parent


@pytest.mark.parametrize("suite", SUITES)
def test_a_spec_is_the_builders_and_names_files_that_exist(suite: str, tmp_path: Path) -> None:
    spec = load_spec(spec_file(suite))
    weights = [spec.base.weights, *(expert.weights for expert in spec.experts.values())]
    assert all(Path(place).exists() for place in (spec.architecture.source, *weights))
    assert spec.tasks == tuple(sorted(SUITES[suite].spec()["data"]))
    write_spec(tmp_path, suite)
    assert (tmp_path / "run.yaml").read_text() == spec_file(suite).read_text()


@pytest.mark.parametrize("name", few(image.tasks, quick=["shapes"]))
def test_pictures_are_those_that_the_builder_draws(name: str) -> None:
    """A run draws its calibration pictures from the shipped ones as it would from all of the builder's."""
    task, recipe = image.tasks[name], image.RECIPE
    with np.load(FOLDER / "image" / "data" / f"{name}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert tuple(arrays["class_names"]) == task.class_names
    for got, drawn in zip(
        (arrays["x_test"], arrays["y_test"]), task.pictures("test", recipe.num_test, 0), strict=True
    ):
        assert np.array_equal(got, drawn)
    chosen, whole = (
        random_order(n, 0, task=name, split="calibration")[: image.SHIPPED] for n in (image.SHIPPED, recipe.num_train)
    )
    for got, drawn in zip(
        (arrays["x_train"], arrays["y_train"]), task.pictures("train", recipe.num_train, 0), strict=True
    ):
        assert np.array_equal(got[chosen], drawn[whole])
    pictures = [each.tobytes() for each in (*arrays["x_train"], *arrays["x_test"])]
    assert len({*pictures}) == len(pictures) == image.SHIPPED + recipe.num_test


@pytest.mark.slow
def test_texts_are_those_that_the_builder_writes(tmp_path: Path) -> None:
    text.write_samples(tmp_path / "data", text.written_rows())
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert names == sorted(path.name for path in (FOLDER / "text" / "data").iterdir())
    for name in names:
        assert (tmp_path / "data" / name).read_bytes() == (FOLDER / "text" / "data" / name).read_bytes()


def test_built_in_samples_are_there_in_the_number_that_is_reported() -> None:
    (texts, of_texts), (pictures, of_pictures) = PROBES["text"], PROBES["image"]
    rows = [json.loads(line)["input"] for line in Path(texts["test"]).read_text().splitlines()]
    assert len({*rows}) == len(rows) == int(of_texts.split()[0])
    with np.load(pictures["test"]["file"]) as file:
        assert np.array_equal(file["x"], image.probe()) and len(file["x"]) == int(of_pictures.split()[0])


def test_weights_compress_to_half_and_only_words_of_prompts_have_embeddings() -> None:
    for file in FOLDER.rglob("*.safetensors"):
        for tensor in load_file(file).values():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, tensor.half().float()), file
    embedding = load_file(FOLDER / "image" / image.BASE)[image.EMBEDDING]
    known = embedding.any(dim=1).nonzero().flatten()
    assert torch.equal(known, image.prompt_tokens(image.RECIPE))
