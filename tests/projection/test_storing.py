"""Stored layouts: read again, told apart by content, shown without what computes them."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pandas as pd
import pytest

import driftlens as dl
from driftlens.base.errors import RunError
from driftlens.findings.projection import stored_projection
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from driftlens.spec.requests import ProjectionRequest
from tests.projection.clouds import cloud, run_of


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_asking_again_reads_what_is_stored(
    run: DriftRun, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert stored_projection(run, "cars", ProjectionRequest(method=method)) is None
    first = dl.project(run, "cars", method=method)

    def refuse(*_: object) -> None:
        pytest.fail("computed again")

    monkeypatch.setattr("driftlens.findings.projection.lay_out", refuse)
    again = dl.project(open_run(run.path), "cars", method=method)
    stored = stored_projection(run.path, "cars", ProjectionRequest(method=method))
    assert stored is not None
    for other in (again, stored):
        pd.testing.assert_frame_equal(other.frame, first.frame, check_exact=True)
        pd.testing.assert_frame_equal(other.quality, first.quality, check_exact=True)
        assert other.settings == first.settings and other.parameters == first.parameters
        assert other.explained_variance == first.explained_variance and other.digest == first.digest
    assert verify(run.path).ok and not verify(run.path).unlisted


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_computing_twice_gives_the_same_layout_and_storing_is_a_choice(run: DriftRun, method: str) -> None:
    one, again = (dl.project(run, "cars", method=method, store_it=False).frame for _ in range(2))
    pd.testing.assert_frame_equal(one, again, check_exact=True)
    assert not (run.path / "projections").exists()  # a viewer that may not write leaves nothing


def test_the_stored_layout_is_another_once_anything_about_it_changes(tmp_path: pathlib.Path) -> None:
    base = {"expert": cloud(20), "merged": cloud(20, seed=1)}
    changed = {**base, "merged": base["merged"].copy()}
    changed["merged"][4, 2] += 0.5
    one, other = (run_of(tmp_path / name, features) for name, features in (("a", base), ("b", changed)))
    digest = dl.project(one, "cars").digest
    shutil.rmtree(one.path / "projections")
    assert dl.project(one, "cars").digest == digest != dl.project(other, "cars").digest
    variations: list[dict[str, object]] = [
        *({"seed": 1}, {"method": "tsne"}, {"fit_on": "expert"}, {"max_points": 30}, {"variants": []}),
    ]
    digests = [dl.project(one, "cars", **changes).digest for changes in variations]  # type: ignore[arg-type]
    assert len({digest, *digests}) == 6


def test_a_layout_made_by_other_libraries_is_still_shown(
    run: DriftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Viewers show the stored coordinates; computing anew makes a layout of its own."""
    first = dl.project(run, "cars")
    monkeypatch.setattr("driftlens.findings.projection.version_of", lambda package: "99")
    shown = stored_projection(run, "cars")
    assert shown is not None and shown.digest == first.digest
    assert stored_projection(run, "cars", ProjectionRequest(seed=5)) is None
    assert dl.project(run, "cars").digest != first.digest


def test_damaged_files_are_named(run: DriftRun) -> None:
    found = dl.project(run, "cars")
    points, words = (run.path / "projections" / f"{found.digest}.{kind}" for kind in ("parquet", "json"))
    whole = points.read_bytes()
    points.write_bytes(whole[: len(whole) // 2])
    for ask in (lambda task: dl.project(run, task), lambda task: stored_projection(run, task)):
        with pytest.raises(RunError, match=points.name):
            ask("cars")
    points.write_bytes(whole)
    for text in ("{", "[]", json.dumps({"format": 2}), json.dumps({"format": 1, "settings": {}})):
        words.write_text(text)
        with pytest.raises(RunError, match=words.name):
            dl.project(run, "cars")


def test_names_with_markup_are_kept_as_they_are(tmp_path: pathlib.Path) -> None:
    task, variant = "<script>$\\input{x}=1", 'calibrated:"><img>'
    features = {"expert": cloud(16), variant: cloud(16, seed=1)}
    run = run_of(tmp_path / "run", features, task)
    found = dl.project(run, task, variants=[variant])
    assert set(found.frame["task"]) == {task} and set(found.frame["variant"]) == {"expert", variant}
    stored = stored_projection(run, task, ProjectionRequest(variants=[variant]))
    assert stored is not None and stored.frame.equals(found.frame)


def _printed_without(modules: tuple[str, ...], code: str, path: pathlib.Path) -> str:
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


def test_a_stored_layout_is_read_without_what_computes_it(run: DriftRun) -> None:
    stored = dl.project(run, "cars")
    code = (
        "from driftlens.findings.projection import stored_projection\n"
        "found = stored_projection(sys.argv[1], 'cars')\n"
        "print(found.digest, found.frame['x'].sum())"
    )
    printed = _printed_without(("torch", "sklearn", "umap", "scipy"), code, run.path)
    assert printed == f"{stored.digest} {stored.frame['x'].sum()}\n"
