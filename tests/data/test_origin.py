"""What sample ids are ids of: the same data has the same origin wherever it lies, other data has another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from driftlens.data.live import live_samples
from driftlens.data.samples import data_digest
from driftlens.data.task_data import open_task_data
from driftlens.spec.data import DataDefaults
from tests.data.sources import colour, entry_of, write_images


def origins(folder: Path, *, n_diagnosis: int = 3, **values: Any) -> tuple[str, str]:
    """Of diagnosis and test samples of an image folder."""
    entry = {
        "kind": "imagefolder",
        "calibration": str(folder / "train"),
        "test": str(folder / "test"),
    } | values
    data = open_task_data(
        "cars",
        entry_of(**entry),
        DataDefaults(n=2, n_diagnosis=n_diagnosis),
        lambda pictures: len(pictures),
        reads="image",
    )
    return data.diagnosis.origin(), data.test.origin()


def written(folder: Path, shade: int = 10) -> Path:
    for split in ("train", "test"):
        write_images(folder / split, {f"a/{at}.png": shade + at for at in range(12)})
    return folder


def test_the_same_images_have_one_origin_in_any_place_and_any_number(tmp_path: Path) -> None:
    first = written(tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    assert origins(first) == origins(second) == origins(second, n_diagnosis=7)
    assert origins(first)[0] == origins(first)[1], "diagnosis draws from the test samples"


def test_other_images_under_the_same_names_have_another(tmp_path: Path) -> None:
    first, second = written(tmp_path / "first"), written(tmp_path / "second", shade=50)
    assert origins(first)[0] != origins(second)[0]
    own = origins(first, diagnosis=str(second / "test"))
    assert own[0] == origins(second)[0] and own[1] == origins(first)[1]
    Image.fromarray(colour(99)).save(second / "test/a/0.png")
    assert origins(second)[0] != own[0]


def test_a_file_that_can_not_be_read_does_not_stop_what_does_not_need_it(tmp_path: Path) -> None:
    first = written(tmp_path / "first")
    whole = origins(first)
    (first / "test/a/0.png").write_bytes(b"no image")
    assert origins(first) != whole


def test_live_data_is_told_apart_by_what_it_holds() -> None:
    values = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = live_samples("cars", values).origin()
    assert live_samples("signs", values.clone(), batch_size=2).origin() == found
    assert live_samples("cars", values.double()).origin() == found, "numbers are what counts"
    assert live_samples("cars", values + 1).origin() != found
    named = [{"ids": values[:5], "mask": values[:5] > 0}, {"ids": values[5:], "mask": values[5:] > 0}]
    assert live_samples("cars", named).origin() not in (
        found,
        live_samples("cars", values.bfloat16()).origin(),
    )


def test_text_and_order_of_ids() -> None:
    texts = {"1": ("in", "out"), "2": ("in", "other"), "10": ("x", "y")}
    ids = list(texts)
    found = data_digest(ids, lambda position: texts[ids[position]])
    back = ids[::-1]
    assert data_digest(back, lambda position: texts[back[position]]) == found
    assert data_digest(ids, lambda position: texts[ids[0]]) != found
    assert data_digest([], lambda position: np.zeros(1)) != found
