"""What libraries would stumble over: few points, equal points, one dimension, NaN, nonsense."""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import driftlens as dl
from driftlens.base.errors import DataError, LayerNotFoundError, NumericsError, SpecError
from driftlens.findings.projection import stored_projection
from driftlens.runs.run import DriftRun
from driftlens.spec.requests import ProjectionRequest
from tests.projection.clouds import cloud, places, run_of


def stored(run: DriftRun, task: str, **asked: Any) -> object:
    return stored_projection(run, task, ProjectionRequest(**asked))


@pytest.mark.parametrize("method", ["umap", "tsne"])
def test_few_points_are_drawn_by_pca_and_the_note_says_why(tmp_path: pathlib.Path, method: str) -> None:
    run = run_of(tmp_path / "run", {"expert": cloud(7), "merged": cloud(7, seed=1)})
    found = dl.project(run, "cars", method=method)
    title = {"umap": "UMAP", "tsne": "t-SNE"}[method]
    assert found.method == "pca" and found.settings.method == method
    assert found.notes == (f"14 distinct points are too few for {title}; this is PCA",)
    np.testing.assert_array_equal(places(found, "merged"), places(dl.project(run, "cars"), "merged"))
    kept = stored_projection(run, "cars", ProjectionRequest(method=method))
    assert kept is not None and kept.notes == found.notes


def test_equal_rows_are_not_counted_as_points(tmp_path: pathlib.Path) -> None:
    run = run_of(tmp_path / "run", {"expert": cloud(10), "merged": cloud(10)})
    assert dl.project(run, "cars", method="tsne").notes[0].startswith("10 distinct points")


def test_without_umap_pca_is_drawn_and_the_note_says_how_to_get_it(
    run: DriftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    found = dl.project(run, "cars", method="umap")
    assert found.method == "pca" and "pip install umap-learn" in found.notes[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_hardly_any_samples_have_places_but_no_neighbourhoods(tmp_path: pathlib.Path, n: int) -> None:
    run = run_of(tmp_path / "run", {"expert": cloud(n), "merged": cloud(n, seed=1)})
    found = dl.project(run, "cars")
    assert np.isfinite(found.frame[["x", "y"]].to_numpy()).all() and len(found.frame) == 2 * n
    row = found.quality.set_index("variant").loc["merged"]
    assert row["neighbours"] == (n - 1) // 2 and math.isnan(row["trustworthiness"]) is (n < 3)
    pd.testing.assert_frame_equal(found.quality, dl.project(run, "cars").quality)  # NaN survives storing


def test_an_expert_alone_with_one_sample_is_a_point(tmp_path: pathlib.Path) -> None:
    found = dl.project(run_of(tmp_path / "run", {"expert": cloud(1)}), "cars", variants=[])
    assert places(found, "expert").tolist() == [[0, 0]] and found.explained_variance is None
    assert found.notes == ("all points the layout is fitted on coincide",)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_one_dimension_is_a_line(tmp_path: pathlib.Path, method: str) -> None:
    features = {"expert": cloud(20, d=1), "merged": cloud(20, d=1, seed=1)}
    found = dl.project(run_of(tmp_path / "run", features), "cars", method=method)
    assert found.method == "pca"  # directions in one dimension are two points
    assert (found.frame["y"] == 0).all() and found.explained_variance == (pytest.approx(1), 0)


def test_a_feature_without_direction_is_drawn_and_named(tmp_path: pathlib.Path) -> None:
    expert = cloud(20)
    expert[2] = 0
    found = dl.project(run_of(tmp_path / "run", {"expert": expert, "merged": cloud(20, seed=1)}), "cars")
    assert found.notes == (
        "1 features of expert are zero and have no direction; they are drawn where zero is",
    )
    assert np.isfinite(found.quality["mean_cosine"]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "infinity"])
def test_features_that_are_no_numbers_are_refused_by_name(tmp_path: pathlib.Path, value: float) -> None:
    merged = cloud(20, seed=1)
    merged[13, 2] = value
    run = run_of(tmp_path / "run", {"expert": cloud(20), "merged": merged})
    with pytest.raises(NumericsError, match=r"task 'cars', merged, layer 2 .* first for sample 'test/13'"):
        dl.project(run, "cars")
    assert not (run.path / "projections").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "umpa"}, SpecError, "Did you mean 'umap'?"),
        ({"fit_on": "merged"}, SpecError, "there are all, expert"),
        ({"method": "tsne", "fit_on": "expert"}, SpecError, "t-SNE can't place rows"),
        ({"max_points": 2}, SpecError, "from 3 to 10000, got 2"),
        ({"max_points": 10**6}, SpecError, "from 3 to 10000"),
        ({"layer": 9}, LayerNotFoundError, "no layer 9"),
        ({"variants": ["mergd"]}, DataError, "Did you mean 'merged'?"),
        ({"task": "crs"}, DataError, "Did you mean 'cars'?"),
    ],
    ids=[
        "method",
        "fit_on",
        "t-SNE on expert",
        "too few points",
        "too many points",
        "layer",
        "variant",
        "task",
    ],
)
@pytest.mark.parametrize("ask", [dl.project, stored], ids=["project", "stored"])
def test_what_makes_no_sense_is_refused(
    run: DriftRun,
    ask: Callable[..., object],
    options: dict[str, object],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error) as refused:
        ask(run, **{"task": "cars", **options})
    assert words in str(refused.value)
