"""Drawing samples: without replacement, reproducible everywhere, and refused where there are too few."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlens.base.errors import DataError
from driftlens.data.samples import draw, unequal_counts
from driftlens.data.sources import SplitView
from tests.refusing import refusing


def view_of(count: int) -> SplitView:
    ids = tuple(f"train/{row}" for row in range(count))
    return SplitView(origin="cars.npz", ids=ids, class_names=None, label=lambda position: None, read=int)


def drawn(count: int, n: int | Literal["all"], seed: int = 0, **changes: Any) -> tuple[int, ...]:
    options = {"task": "cars", "split": "calibration", **changes}
    return draw(view_of(count), n, seed, **options)


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
    script = (
        "from driftlens.data.samples import draw; from driftlens.data.sources import SplitView; "
        "ids = tuple(f'train/{row}' for row in range(1000)); view = SplitView('cars.npz', ids, None, str, str); "
        "print(*draw(view, 8, 7, task='Blumen 花', split='calibration'))"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert results == {" ".join(map(str, drawn(1000, 8, 7, task="Blumen 花"))) + "\n"}


@pytest.mark.parametrize(
    ("split", "key"), [("calibration", "n"), ("diagnosis", "n_diagnosis"), ("test", "n_test")]
)
def test_too_few_samples_are_refused_with_both_counts_and_the_key_to_set(split: str, key: str) -> None:
    with pytest.raises(DataError) as caught:
        drawn(100, 256, split=split)
    assert "task cars: 256" in caught.value.message
    assert "cars.npz holds 100" in caught.value.message
    assert f"data.cars.{key}: 100" in caught.value.hint
    assert (caught.value.context["asked"], caught.value.context["available"]) == (256, 100)


@pytest.mark.parametrize("n", [1, "all"])
def test_nothing_left_beside_the_calibration_samples_is_refused(n: int | Literal["all"]) -> None:
    with refusing(DataError, match="holds 2, 2 of which serve calibration", hint="of its own"):
        drawn(2, n, split="test", exclude_ids=["train/0", "train/1"])


def test_unequal_counts_are_noticed_and_equal_ones_are_not() -> None:
    assert unequal_counts({"a": 3, "b": 3}, "calibration") == ()
    (notice,) = unequal_counts({"b": 3, "a": 4}, "calibration")
    assert notice == "the number of calibration samples differs between tasks: a 4, b 3"


def test_listing_the_sources_imports_no_heavy_library() -> None:
    script = (
        "import sys; from driftlens.data.sources import data_sources; list(data_sources); "
        "import driftlens.data.task_data; "
        "print(*{'torch', 'datasets', 'PIL', 'torchvision', 'pydantic', 'pandas'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
