"""Which samples are left out: as many of every class, the same ones each time, a sample in all panels or in none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.marks import thinned, thinned_samples


def samples(sizes: list[int]) -> pd.DataFrame:
    """As many samples of each class as its size says, classes mixed."""
    labels = [f"class {at}" for at, size in enumerate(sizes) for _ in range(size)]
    rows = pd.DataFrame({"sample_id": [f"test/{at}" for at in range(len(labels))], "label": labels})
    return rows.sample(frac=1, random_state=0).reset_index(drop=True)


@given(sizes=st.lists(st.integers(1, 80), min_size=1, max_size=6), limit=st.integers(6, 200))
def test_every_class_keeps_its_share(sizes: list[int], limit: int) -> None:
    rows = samples(sizes)
    kept = thinned(rows, limit, ["label"])
    assert len(kept) == min(limit, len(rows))
    for label, size in rows["label"].value_counts().items():
        share = size * len(kept) / len(rows)
        count = (kept["label"] == label).sum()
        assert count >= 1, "a rare class is not lost"
        assert abs(count - share) <= len(sizes), (label, count, share)


def test_order_and_neighbours_do_not_decide_which_are_kept() -> None:
    rows = samples([50, 30])
    kept = set(thinned(rows, 20, ["label"])["sample_id"])
    backwards = thinned(rows.iloc[::-1].reset_index(drop=True), 20, ["label"])
    assert set(backwards["sample_id"]) == kept


def test_kept_rows_stay_in_their_order() -> None:
    rows = samples([50, 30])
    kept = thinned(rows, 20, ["label"])
    assert kept.index.is_monotonic_increasing


def test_a_sample_stays_in_all_its_panels_or_in_none() -> None:
    each = samples([400, 100]).assign(task="cars")
    rows = pd.concat([each.assign(variant=name) for name in ("merged", "calibrated:featcal")])
    kept, notes = thinned_samples(rows, ChartOptions(max_points=100), 2)
    assert len(kept) == 100
    assert (kept.groupby("sample_id").size() == 2).all()
    assert notes == ("50 of 500 samples shown, of every class alike.",)


def test_missing_labels_are_a_class_of_their_own() -> None:
    rows = samples([40, 40]).assign(task="cars", label=None)
    kept, _ = thinned_samples(rows, ChartOptions(max_points=10), 1)
    assert len(kept) == 10


@pytest.mark.parametrize(
    ("limit", "notes"),
    [(8041, ()), (2000, ("2\u202f000 of 8\u202f041 samples shown, of every class alike.",))],
    ids=["all shown", "some left out"],
)
def test_the_note_counts_what_is_shown(limit: int, notes: tuple[str, ...]) -> None:
    rows = samples([8000, 41]).assign(task="cars")
    assert thinned_samples(rows, ChartOptions(max_points=limit), 1)[1] == notes


def test_a_hundred_thousand_samples_are_thinned_to_the_limit() -> None:
    count = 100_000
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 397, count).astype(str)
    ids = [f"test/{at}" for at in range(count)]
    rows = pd.DataFrame({"task": "sun397", "sample_id": ids, "label": labels})
    kept, _ = thinned_samples(rows, ChartOptions(), 1)
    assert len(kept) == ChartOptions().max_points
    counts = kept["label"].value_counts()
    wanted = pd.Series(labels).value_counts() / 5
    assert (counts - wanted).abs().max() <= 1.5
