"""Layouts: one plane for all rows together, quality from the features themselves."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sklearn.manifold import trustworthiness

import driftlens as dl
from driftlens.results.projection import Projection
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError, LayerNotFoundError, NumericsError, RunError, SpecError
from tests.runs.full_run import Size, layer_list, write_full_run

Array = NDArray[np.float64]


def run_of(path: Path, features: dict[str, Array], task: str = "cars") -> DriftRun:
    """A run that has just these features, at its head, by role."""
    with RunWriter.create(path, spec_yaml="", spec_digest="0" * 64, name="bare") as writer:
        variants = [role for role in features if role != "expert"]
        writer.update_manifest(tasks=[task], variants=variants, layers=layer_list(0))
        writer.write_sample_ids(task, "diagnosis", [f"test/{at}" for at in range(len(features["expert"]))])
        for role, array in features.items():
            writer.write_features(task, role, 2, array)
    return open_run(path)


def cloud(n: int, d: int = 6, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, d))


def places(found: Projection, variant: str) -> Array:
    return found.frame[found.frame["variant"] == variant][["x", "y"]].to_numpy()


def directions(run: DriftRun, variant: str, layer: int | str = "final") -> Array:
    rows = run.features("cars", variant, layer).astype(float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


SIZE = Size(blocks=1, samples=20, width=6, tests=40)
VARIANTS = ("base", "merged", "calibrated:featcal")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("projection") / "run"
    return write_full_run(path, tasks=("cars",), variants=VARIANTS, size=SIZE)


@pytest.fixture
def run(written: Path, tmp_path: Path) -> DriftRun:
    return open_run(shutil.copytree(written, tmp_path / "run"))


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


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_what_is_the_same_shares_its_place(tmp_path: Path, method: str) -> None:
    """A variant identical to the expert lies on it exactly, and so does a sample that occurs twice."""
    expert = cloud(20)
    expert[7] = expert[3]
    run = run_of(tmp_path / "run", {"expert": expert, "merged": expert, "calibrated:x": expert + cloud(20, seed=1)})
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
        trust = trustworthiness(directions(run, row["variant"], 2), places(found, row["variant"]), n_neighbors=k)
        assert row["trustworthiness"] == pytest.approx(trust) and k == 9
        shared = [
            len(set(one) & set(other)) / k for one, other in zip(_nearest(expert, k), _nearest(own, k), strict=True)
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


def test_many_samples_are_thinned_evenly_over_classes(run: DriftRun) -> None:
    found = dl.project(run, "cars", max_points=30)
    kept = found.frame[found.frame["variant"] == "merged"]
    assert len(found.frame) == 30 and found.notes == ("10 of 20 samples are shown, evenly over classes",)
    assert sorted(kept["label"].value_counts()) == [3, 3, 4]
    quality = found.quality.set_index("variant").loc["merged"]
    assert (quality["n"], quality["n_shown"]) == (20, 10)
    assert quality["mean_drift"] == dl.project(run, "cars").quality.set_index("variant").loc["merged", "mean_drift"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_umap_repeats_and_shares_places(tmp_path: Path) -> None:
    expert = cloud(40)
    run = run_of(
        tmp_path / "run",
        {"expert": expert, "merged": expert, "calibrated:x": expert + 0.3 * cloud(40, seed=1)},
    )
    one, again = (dl.project(run, "cars", method="umap", store_it=False) for _ in range(2))
    assert one.method == "umap" and not one.notes
    pd.testing.assert_frame_equal(one.frame, again.frame, check_exact=True)
    np.testing.assert_array_equal(places(one, "expert"), places(one, "merged"))
    other = dl.project(run, "cars", method="umap", seed=1)
    assert np.abs(places(other, "expert") - places(one, "expert")).max() > 1e-3
    few = dl.project(run, "cars", method="umap", variants=[], max_points=15)
    assert few.parameters["n_neighbors"] == 14


@pytest.mark.parametrize("method", ["umap", "tsne"])
def test_few_points_are_drawn_by_pca_and_the_note_says_why(tmp_path: Path, method: str) -> None:
    run = run_of(tmp_path / "run", {"expert": cloud(7), "merged": cloud(7, seed=1)})
    found = dl.project(run, "cars", method=method)
    title = {"umap": "UMAP", "tsne": "t-SNE"}[method]
    assert found.method == "pca" and found.settings.method == method
    assert found.notes == (f"14 distinct points are too few for {title}; this is PCA",)
    np.testing.assert_array_equal(places(found, "merged"), places(dl.project(run, "cars"), "merged"))
    assert dl.project(run, "cars", method=method).notes == found.notes


def test_without_umap_points_are_drawn_by_pca_and_the_note_says_what_to_install(
    run: DriftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftlens.results.projection.find_spec", lambda name: None)
    found = dl.project(run, "cars", method="umap", store_it=False)
    assert found.method == "pca" and "pip install umap-learn" in found.notes[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_hardly_any_samples_have_places_but_no_neighbourhoods(tmp_path: Path, n: int) -> None:
    run = run_of(tmp_path / "run", {"expert": cloud(n), "merged": cloud(n, seed=1)})
    found = dl.project(run, "cars")
    assert np.isfinite(found.frame[["x", "y"]].to_numpy()).all() and len(found.frame) == 2 * n
    row = found.quality.set_index("variant").loc["merged"]
    assert row["neighbours"] == (n - 1) // 2 and math.isnan(row["trustworthiness"]) is (n < 3)
    pd.testing.assert_frame_equal(found.quality, dl.project(run, "cars").quality)  # NaN survives storing


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "infinity"])
def test_features_that_are_no_numbers_are_refused_by_name(tmp_path: Path, value: float) -> None:
    merged = cloud(20, seed=1)
    merged[13, 2] = value
    run = run_of(tmp_path / "run", {"expert": cloud(20), "merged": merged})
    with pytest.raises(NumericsError, match=r"task 'cars', merged, layer 2 .* first for sample 'test/13'"):
        dl.project(run, "cars")
    assert not (run.path / "projections").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "umpa"}, SpecError, "method"),
        ({"max_points": 2}, SpecError, "from 3 to 10000, got 2"),
        ({"max_points": 10**6}, SpecError, "from 3 to 10000"),
        ({"layer": 9}, LayerNotFoundError, "no layer 9"),
        ({"variants": ["mergd"]}, DataError, "Did you mean 'merged'?"),
        ({"task": "crs"}, DataError, "Did you mean 'cars'?"),
    ],
    ids=[
        "method",
        "too few points",
        "too many points",
        "layer",
        "variant",
        "task",
    ],
)
def test_what_makes_no_sense_is_refused(
    run: DriftRun,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error) as refused:
        dl.project(run, **{"task": "cars", **options})
    assert words in str(refused.value)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_asking_again_reads_what_is_stored(run: DriftRun, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    first = dl.project(run, "cars", method=method)

    def refuse(*_: object) -> None:
        pytest.fail("computed again")

    monkeypatch.setattr("driftlens.results.projection.compute_layout", refuse)
    again = dl.project(open_run(run.path), "cars", method=method)
    pd.testing.assert_frame_equal(again.frame, first.frame, check_exact=True)
    pd.testing.assert_frame_equal(again.quality, first.quality, check_exact=True)
    assert again.settings == first.settings and again.parameters == first.parameters
    assert again.explained_variance == first.explained_variance and again.digest == first.digest
    assert verify_files(run.path).ok and not verify_files(run.path).unlisted


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_computing_twice_gives_the_same_layout_and_storing_is_a_choice(run: DriftRun, method: str) -> None:
    one, again = (dl.project(run, "cars", method=method, store_it=False).frame for _ in range(2))
    pd.testing.assert_frame_equal(one, again, check_exact=True)
    assert not (run.path / "projections").exists()  # a viewer that may not write leaves nothing


def test_the_stored_layout_is_another_once_anything_about_it_changes(tmp_path: Path) -> None:
    base = {"expert": cloud(20), "merged": cloud(20, seed=1)}
    changed = {**base, "merged": base["merged"].copy()}
    changed["merged"][4, 2] += 0.5
    one, other = (run_of(tmp_path / name, features) for name, features in (("a", base), ("b", changed)))
    digest = dl.project(one, "cars").digest
    shutil.rmtree(one.path / "projections")
    assert dl.project(one, "cars").digest == digest != dl.project(other, "cars").digest
    variations: list[dict[str, object]] = [
        *({"seed": 1}, {"method": "tsne"}, {"max_points": 30}, {"variants": []}),
    ]
    digests = [dl.project(one, "cars", **changes).digest for changes in variations]  # type: ignore[arg-type]
    assert len({digest, *digests}) == 5


def test_damaged_files_are_named(run: DriftRun) -> None:
    found = dl.project(run, "cars")
    points, words = (run.path / "projections" / f"{found.digest}.{kind}" for kind in ("parquet", "json"))
    whole = points.read_bytes()
    points.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=points.name):
        dl.project(run, "cars")
    points.write_bytes(whole)
    for text in ("{", "[]", json.dumps({"format": 2}), json.dumps({"format": 1, "settings": {}})):
        words.write_text(text)
        with pytest.raises(RunError, match=words.name):
            dl.project(run, "cars")


def _printed_without(modules: tuple[str, ...], code: str, path: Path) -> str:
    """What `code` prints in a process where importing any of `modules` fails."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.partition('.')[0] in {modules}: raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    command = [sys.executable, "-c", block + code, str(path)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_projecting_and_judging_need_no_torch(run: DriftRun) -> None:
    digests = [dl.project(run, "cars", method=method, store_it=False).digest for method in ("pca", "tsne")]
    code = (
        "import driftlens as dl; run = dl.open_run(sys.argv[1])\n"
        "print(*(dl.project(run, 'cars', method=method).digest for method in ('pca', 'tsne')))\n"
        "print(dl.check(run, {'checks': [{'metric': 'cos', 'gte': -1}]}).count('pass'))\n"
        "print(*dl.compare(run).pairs)"
    )
    expected = [" ".join(digests), "1", "('merged', 'calibrated:featcal')"]
    assert _printed_without(("torch",), code, run.path).splitlines() == expected


@pytest.mark.slow
def test_a_stored_layout_is_read_without_what_computes_it(run: DriftRun) -> None:
    stored = dl.project(run, "cars")
    code = (
        "import driftlens as dl\nfound = dl.project(sys.argv[1], 'cars')\nprint(found.digest, found.frame['x'].sum())"
    )
    printed = _printed_without(("torch", "sklearn", "umap", "scipy"), code, run.path)
    assert printed == f"{stored.digest} {stored.frame['x'].sum()}\n"
