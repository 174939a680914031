"""Layouts: one plane for all rows together, quality from the features themselves."""

from __future__ import annotations

import pathlib

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.manifold import trustworthiness

import driftlens as dl
from driftlens.findings.projection.layouts import thinned
from driftlens.runs.run import DriftRun
from tests.projection.clouds import Array, cloud, directions, places, run_of


def test_pca_is_the_leading_plane_of_all_rows_together(run: DriftRun) -> None:
    found = dl.project(run, "cars")
    roles = ("expert", "merged", "calibrated:featcal")
    assert list(dict.fromkeys(found.frame["variant"])) == list(roles)
    rows = np.concatenate([directions(run, role) for role in roles])
    _, singular, right = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    plane = (rows - rows.mean(axis=0)) @ right[:2].T
    found_plane = found.frame[["x", "y"]].to_numpy()
    np.testing.assert_allclose(np.abs(found_plane), np.abs(plane), atol=1e-9)
    assert found.explained_variance == pytest.approx(singular[:2] ** 2 / (singular**2).sum())


def test_every_sample_has_one_point_per_variant_with_its_class(run: DriftRun) -> None:
    frame = dl.project(run, "cars").frame
    labels = dict(zip(*(run.outputs("cars")[name] for name in ("sample_id", "label")), strict=True))
    for _, rows in frame.groupby("variant"):
        assert tuple(rows["sample_id"]) == run.sample_ids("cars")
        assert rows["label"].tolist() == [labels[sample] for sample in rows["sample_id"]]
    assert set(frame["task"]) == {"cars"}


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_what_is_the_same_shares_its_place(tmp_path: pathlib.Path, method: str) -> None:
    """A variant identical to the expert lies on it exactly, and so does a sample that occurs twice."""
    expert = cloud(20)
    expert[7] = expert[3]
    run = run_of(
        tmp_path / "run", {"expert": expert, "merged": expert, "calibrated:x": expert + cloud(20, seed=1)}
    )
    found = dl.project(run, "cars", method=method)
    own = places(found, "expert")
    np.testing.assert_array_equal(own, places(found, "merged"))
    np.testing.assert_array_equal(own[7], own[3])
    assert found.method == method and len(np.unique(own, axis=0)) == 19
    same = found.quality.set_index("variant").loc["merged"]
    assert (same["mean_drift"], same["knn_overlap"]) == (0, 1) and same["mean_cosine"] == pytest.approx(1)


def test_quality_comes_from_the_features_themselves(run: DriftRun) -> None:
    found = dl.project(run, "cars", layer=2)
    expert = run.features("cars", "expert", 2).astype(float)
    for row in found.quality.to_dict("records"):
        own = run.features("cars", row["variant"], 2).astype(float)
        assert row["mean_drift"] == pytest.approx(np.linalg.norm(own - expert, axis=1).mean())
        cosines = (own * expert).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(expert, axis=1)
        assert row["mean_cosine"] == pytest.approx(cosines.mean())
        k = row["neighbours"]
        trust = trustworthiness(
            directions(run, row["variant"], 2), places(found, row["variant"]), n_neighbors=k
        )
        assert row["trustworthiness"] == pytest.approx(trust) and k == 9
        shared = [
            len(set(one) & set(other)) / k
            for one, other in zip(_nearest(expert, k), _nearest(own, k), strict=True)
        ]
        assert row["knn_overlap"] == pytest.approx(np.mean(shared))
    merged = found.quality.set_index("variant").loc["merged"]
    # The tables are made of the features before they were rounded to half precision.
    assert merged["mean_drift"] == pytest.approx(run.value("drift_l2_mean", task="cars", layer=2), rel=1e-3)
    assert merged["mean_cosine"] == pytest.approx(run.value("cos_mean", task="cars", layer=2), rel=1e-3)


def _nearest(rows: Array, k: int) -> list[list[int]]:
    """By cosine, one row at a time."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    order = [np.argsort(-(unit @ row), kind="stable").tolist() for row in unit]
    return [[at for at in near if at != own][:k] for own, near in enumerate(order)]


def test_a_frame_fitted_on_the_expert_is_not_moved_by_variants(run: DriftRun) -> None:
    alone = dl.project(run, "cars", fit_on="expert", variants=[])
    both = dl.project(run, "cars", fit_on="expert")
    np.testing.assert_allclose(places(both, "expert"), places(alone, "expert"), atol=1e-12)
    joint = dl.project(run, "cars")
    assert np.abs(places(joint, "expert") - places(alone, "expert")).max() > 1e-3
    rows = directions(run, "expert")
    model = PCA(2).fit(rows)
    expected = model.transform(directions(run, "merged"))
    np.testing.assert_allclose(np.abs(places(both, "merged")), np.abs(expected), atol=1e-9)


def test_many_samples_are_thinned_evenly_over_classes(run: DriftRun) -> None:
    found = dl.project(run, "cars", max_points=30)
    kept = found.frame[found.frame["variant"] == "merged"]
    assert len(found.frame) == 30 and found.notes == ("10 of 20 samples are shown, evenly over classes",)
    assert sorted(kept["label"].value_counts()) == [3, 3, 4]
    quality = found.quality.set_index("variant").loc["merged"]
    assert (quality["n"], quality["n_shown"]) == (20, 10)
    assert (
        quality["mean_drift"]
        == dl.project(run, "cars").quality.set_index("variant").loc["merged", "mean_drift"]
    )


@pytest.mark.parametrize(
    ("labels", "limit"),
    [
        (["a"] * 50 + ["b"] * 50, 10),
        (["a", "b"] * 50, 10),
        ([None] * 9, 4),
        (["a"], 1),
        (["a"] * 97 + ["b"] * 3, 99),
    ],
    ids=["sorted classes", "mixed classes", "no classes", "one sample", "rare class"],
)
def test_thinning_keeps_shares_order_and_counts(labels: list[str | None], limit: int) -> None:
    kept = thinned(labels, limit)
    assert len(kept) == len(set(kept.tolist())) == min(limit, len(labels)) and sorted(kept) == kept.tolist()
    for name in set(labels):
        share = labels.count(name) / len(labels) * len(kept)
        assert abs(sum(labels[at] == name for at in kept) - share) <= 1


@pytest.mark.slow
def test_umap_repeats_shares_places_and_keeps_the_expert_in_place(tmp_path: pathlib.Path) -> None:
    expert = cloud(40)
    run = run_of(
        tmp_path / "run",
        {"expert": expert, "merged": expert, "calibrated:x": expert + 0.3 * cloud(40, seed=1)},
    )
    one, again = (dl.project(run, "cars", method="umap", store_it=False) for _ in range(2))
    assert one.method == "umap" and not one.notes
    pd.testing.assert_frame_equal(one.frame, again.frame, check_exact=True)
    np.testing.assert_array_equal(places(one, "expert"), places(one, "merged"))
    alone = dl.project(run, "cars", method="umap", fit_on="expert", variants=[])
    both = dl.project(run, "cars", method="umap", fit_on="expert")
    np.testing.assert_array_equal(places(both, "expert"), places(alone, "expert"))
    other = dl.project(run, "cars", method="umap", seed=1)
    assert np.abs(places(other, "expert") - places(one, "expert")).max() > 1e-3
    few = dl.project(run, "cars", method="umap", variants=[], max_points=15)
    assert few.parameters["n_neighbors"] == 14
