"""Drawing samples: the same everywhere, refused where there are too few; what sample ids are ids of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from driftlens.config.data import DataDefaults
from driftlens.data.samples import data_digest, sample_positions, unequal_count_notice
from driftlens.data.sources import SplitView
from driftlens.data.task_data import open_task_data
from driftlens.experiment.live import sample_live_data
from driftlens.utils.errors import DataError
from tests.data.sources import colour, entry_of, write_images
from tests.refusing import refusing


def view_of(count: int) -> SplitView:
    ids = tuple(f"train/{row}" for row in range(count))
    return SplitView(origin="cars.npz", ids=ids, class_names=None, label=lambda position: None, read=int)


def drawn(count: int, n: int | Literal["all"], seed: int = 0, **changes: Any) -> tuple[int, ...]:
    options = {"task": "cars", "split": "calibration", **changes}
    return sample_positions(view_of(count), n, seed, **options)


sizes = st.integers(1, 60).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))
seeds = st.integers(0, 2**64)


@given(sizes, seeds)
def test_samples_are_distinct_and_there(size: tuple[int, int], seed: int) -> None:
    count, n = size
    positions = drawn(count, n, seed)
    assert len(positions) == len(set(positions)) == n
    assert set(positions) <= set(range(count))


@given(sizes, seeds)
def test_a_smaller_draw_is_the_beginning_of_a_larger_one(size: tuple[int, int], seed: int) -> None:
    count, n = size
    assert drawn(count, count, seed)[:n] == drawn(count, n, seed)


@given(st.integers(2, 40), st.sets(st.integers(0, 39)), seeds)
def test_excluded_samples_are_never_drawn(count: int, taken: set[int], seed: int) -> None:
    left = sorted(set(range(count)) - taken)
    if not left:
        return
    exclude_ids = [f"train/{row}" for row in taken]
    assert sorted(drawn(count, len(left), seed, exclude_ids=exclude_ids)) == left
    assert list(drawn(count, "all", seed, exclude_ids=exclude_ids)) == left


def test_all_keeps_the_order_of_the_source() -> None:
    assert drawn(20, "all", 3) == tuple(range(20))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"seed": 0}, {"seed": 1}, id="seed"),
        pytest.param({"task": "花"}, {"task": "車"}, id="task"),
        pytest.param({"split": "calibration"}, {"split": "diagnosis"}, id="split"),
    ],
)
def test_seed_task_and_split_each_decide_what_is_drawn(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert drawn(1000, 10, **one) != drawn(1000, 10, **other)


def test_every_sample_is_drawn_about_equally_often() -> None:
    counts = [0] * 10
    for seed in range(2000):
        for position in drawn(10, 3, seed):
            counts[position] += 1
    # 600 expected; the standard deviation is sqrt(2000 * 0.3 * 0.7) = 20.5.
    assert all(abs(count - 600) < 5 * 20.5 for count in counts), counts


def test_the_draw_is_the_same_in_every_process() -> None:
    """Each process hashes text with a seed of its own; these numbers were drawn in another one."""
    assert drawn(1000, 8, 7, task="Blumen 花") == (348, 505, 17, 591, 349, 599, 288, 486)


@pytest.mark.parametrize(("split", "key"), [("calibration", "n"), ("diagnosis", "n_diagnosis"), ("test", "n_test")])
def test_too_few_samples_are_refused_with_both_counts_and_the_key_to_set(split: str, key: str) -> None:
    with pytest.raises(DataError) as caught:
        drawn(100, 256, split=split)
    assert "task cars: 256" in caught.value.message
    assert "cars.npz has 100" in caught.value.message
    assert f"data.cars.{key} to 100" in caught.value.hint


@pytest.mark.parametrize("n", [1, "all"])
def test_nothing_left_beside_the_calibration_samples_is_refused(n: int | Literal["all"]) -> None:
    with refusing(DataError, match="has 2, 2 of which are calibration samples", hint="separate"):
        drawn(2, n, split="test", exclude_ids=["train/0", "train/1"])


def test_unequal_counts_are_noticed_and_equal_ones_are_not() -> None:
    assert unequal_count_notice({"a": 3, "b": 3}, "calibration") == ()
    (notice,) = unequal_count_notice({"b": 3, "a": 4}, "calibration")
    assert notice == "numbers of calibration samples differ: a 4, b 3"


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
    return data.diagnosis.source_digest(), data.test.source_digest()


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
    found = sample_live_data("cars", values).source_digest()
    assert sample_live_data("signs", values.clone(), batch_size=2).source_digest() == found
    assert sample_live_data("cars", values.double()).source_digest() == found, "numbers are what counts"
    assert sample_live_data("cars", values + 1).source_digest() != found
    named = [{"ids": values[:5], "mask": values[:5] > 0}, {"ids": values[5:], "mask": values[5:] > 0}]
    assert sample_live_data("cars", named).source_digest() not in (
        found,
        sample_live_data("cars", values.bfloat16()).source_digest(),
    )


def test_text_and_order_of_ids() -> None:
    texts = {"1": ("in", "out"), "2": ("in", "other"), "10": ("x", "y")}
    ids = list(texts)
    found = data_digest(ids, lambda position: texts[ids[position]])
    back = ids[::-1]
    assert data_digest(back, lambda position: texts[back[position]]) == found
    assert data_digest(ids, lambda position: texts[ids[0]]) != found
    assert data_digest([], lambda position: np.zeros(1)) != found
