"""The explorer's page: its numbers are the tables', its places keep distances, and no name in it does harm."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import driftlens as dl
import driftlens_reports.explorer as explorer_page
from driftlens.cli import main
from driftlens.config.requests import ProjectionRequest, ViewRequest
from driftlens.results.measures import OUTCOMES, sample_outcomes
from driftlens.results.projection import project
from driftlens.results.verdict import verdict
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError
from driftlens.utils.variants import is_control
from driftlens_reports.explorer import NEIGHBOURS, Explorer, explorer_data
from tests.quick import few
from tests.runs.full_run import Size, write_full_run, write_run

EVIL = (
    "</script><script>alert(1)</script>",
    "\u2028<img src=x onerror=alert(2)>",
    '=HYPERLINK("http://x")',
    "{{script}}",
)


def unpacked(text: str, kind: str, *shape: int) -> Any:
    return np.frombuffer(base64.b64decode(text), kind).reshape(*shape)


@pytest.fixture(scope="module")
def data(full: DriftRun) -> dict[str, Any]:
    return explorer_data(full)


def test_columns_are_those_of_the_tables(full: DriftRun, data: dict[str, Any]) -> None:
    stages = [stage["name"] for stage in data["stages"]]
    assert stages == ["base", "merged", "calibrated:featcal", "expert"] and not any(map(is_control, stages))
    shape = (len(stages), len(data["layers"]), len(data["ids"]))
    names = {
        "drift": "drift_l2",
        "mismatch": "mismatch_l2",
        "propagation": "propagation_l2",
        "share": "final_share",
    }
    columns = {name: unpacked(data["columns"][name], "<f4", *shape) for name in names}
    answers, right = (
        unpacked(data["columns"][name], kind, shape[0], shape[2])
        for name, kind in (("answers", "<i4"), ("right", "i1"))
    )
    became = unpacked(data["columns"]["outcome"]["calibrated:featcal"], "i1", -1)
    for task in data["tasks"]:
        place = {name: task["start"] + at for at, name in enumerate(full.sample_ids(task["name"]))}
        for row in full.samples(task["name"]).to_dict("records"):
            if not is_control(row["variant"]):
                at = stages.index(row["variant"]), row["layer"] - 1, place[row["sample_id"]]
                shown = [columns[name][at] for name in names]
                np.testing.assert_allclose(shown, [row[column] for column in names.values()], rtol=1e-6)
        for row in full.outputs(task["name"]).to_dict("records"):
            if not is_control(row["variant"]):
                at = stages.index(row["variant"]), place[row["sample_id"]]
                assert data["words"][answers[at]] == row["pred"]
                assert right[at] == (row["pred"] == row["label"])
                assert data["words"][answers[-1, at[1]]] == row["expert_pred"]
        said = sample_outcomes(full, task["name"], "merged", "calibrated:featcal")["outcome"]
        assert {name: [*OUTCOMES][became[place[name]]] for name in said.index} == said.to_dict()


def directions(run: DriftRun, task: str, variant: str, layer: int) -> Any:
    rows = np.asarray(run.features(task, variant, layer), dtype=float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_places_are_the_joint_layout_turned_and_neighbours_the_nearest_by_cosine(
    full: DriftRun, data: dict[str, Any]
) -> None:
    """Turning and scaling leave all ratios of distances; neighbours are compared with all products of features."""
    task, n = full.tasks[1], len(full.sample_ids(full.tasks[1]))
    for layer, plane in enumerate(data["planes"][1], start=1):
        stages = [data["stages"][at]["name"] for at in plane["stages"]]
        asked = ProjectionRequest(layer=layer, variants=tuple(stages[:-1]))
        frame = project(full, task, asked, store_it=False).frame
        wanted = np.concatenate([frame[frame["variant"] == name][["x", "y"]].to_numpy() for name in stages])
        found = unpacked(plane["places"], "<i2", -1, 2).astype(float)
        lengths = [np.linalg.norm(points[:, None] - points[None], axis=-1) for points in (wanted, found)]
        scale = lengths[1].max() / lengths[0].max()
        np.testing.assert_allclose(lengths[1], scale * lengths[0], atol=3)
        near = unpacked(plane["neighbours"], "<i2", len(stages), n, NEIGHBOURS)
        for at, stage in enumerate(stages):
            rows = directions(full, task, stage, layer)
            cosines = rows @ rows.T
            for sample, listed in enumerate(near[at]):
                listed = listed[listed >= 0]
                others = np.sort(np.delete(cosines[sample], sample))[::-1]
                assert sample not in listed and len({*listed}) == len(listed) == min(NEIGHBOURS, n - 1)
                np.testing.assert_allclose(cosines[sample, listed], others[: len(listed)], atol=1e-9)


@pytest.mark.slow
def test_a_layout_of_another_method_is_kept_and_shown(tmp_path: Path) -> None:
    size = Size(blocks=1, samples=20, width=5, classes=3, tests=20)
    run = open_run(write_full_run(tmp_path / "run", tasks=("cars",), variants=("base", "merged"), size=size))
    plane = explorer_data(run, ViewRequest(method="tsne"))["planes"][0][-1]
    frame = project(run, "cars", ProjectionRequest(method="tsne", variants=("base", "merged"), max_points=60))
    assert plane["method"] == "tsne"
    found = unpacked(plane["places"], "<i2", -1, 2).astype(float)
    by_model = frame.frame.set_index("variant")[["x", "y"]]
    wanted = np.concatenate([by_model.loc[name].to_numpy() for name in ("base", "merged", "expert")])
    lengths = [np.linalg.norm(each[:, None] - each[None], axis=-1) for each in (wanted, found)]
    np.testing.assert_allclose(lengths[1] / lengths[1].max(), lengths[0] / lengths[0].max(), atol=1e-3)


@pytest.mark.slow
def test_names_end_no_element_and_the_page_allows_no_connection(tmp_path: Path) -> None:
    made = write_run(tmp_path / "run", name=EVIL[0], tasks=EVIL, class_names=EVIL[:3])
    text = Explorer(made).page.decode()
    assert "alert(1)</script>" not in text and "<img" not in text and "\u2028" not in text
    assert text.count("<script") == 2 == text.count("</script>")
    policy = html.unescape(re.search(r'Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'" and allowed["script-src"].startswith("'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy and "http" not in policy
    island = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    told = json.loads(island[1])  # type: ignore[index]
    assert [task["name"] for task in told["tasks"]] == [name.replace("\u2028", "\ufffd") for name in EVIL]
    assert told["run"]["name"] == EVIL[0] and {*EVIL[2:3]} <= {*told["words"]}


def spoiled_features(run: DriftRun) -> DriftRun:
    shutil.rmtree(run.path / "features" / run.tasks[0])
    files = {
        name: entry for name, entry in run.manifest.files.items() if not name.startswith("features/" + run.tasks[0])
    }
    object.__setattr__(run.manifest, "files", files)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"has_labels": False}, "no answer is right or wrong"),
        ({"has_labels": False, "has_heads": False}, "names no heads"),
        ({"has_labels": False, "has_heads": False}, "driftlens analyze RUN"),
        ({"variants": ("base", "merged")}, "driftlens calibrate RUN"),
        ({"variants": ("merged",)}, "driftlens calibrate RUN"),
    ],
)
def test_what_a_run_lacks_is_said_with_what_adds_it(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    told = explorer_data(open_run(write_run(tmp_path / "run", **options)))
    assert any(says in note for note in told["notes"]) and len(told["ids"]) == 12
    assert Explorer(tmp_path / "run").page


def test_without_stored_features_nothing_moves_and_the_rest_is_there(tmp_path: Path) -> None:
    run = spoiled_features(open_run(write_run(tmp_path / "run")))
    told = explorer_data(run)
    assert not any(told["planes"][0]) and all(told["planes"][1])
    assert any(run.tasks[0] in note and "layers.select" in note for note in told["notes"])
    assert Explorer(run).page


def test_too_many_samples_are_thinned_evenly_and_said(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    told = explorer_data(run, ViewRequest(samples=6))
    assert [task["n"] for task in told["tasks"]] == [3, 3]
    labels = unpacked(told["columns"]["label"], "<i4", -1)
    assert sorted(labels[:3]) == [0, 1, 2] and "6 of 12" in " ".join(told["notes"])


@pytest.mark.parametrize("variants", few([("base", "merged"), ("merged",)], [("base", "merged")]))
def test_the_verdict_stands_above_without_the_command_that_follows(tmp_path: Path, variants: tuple[str, ...]) -> None:
    run = open_run(write_run(tmp_path / "run", variants=variants))
    told, judged = explorer_data(run)["sentences"], verdict(run)
    assert len(told) == len(judged.sentences) - bool(judged.command) and not any(
        "Next:" in text or " %" in text for text in told
    )


def test_small_layouts_take_one_thread(full: DriftRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for one another: five times the processor time of a page."""
    seen: list[int] = []

    def looked(*_: Any) -> list[None]:
        seen.extend(library["num_threads"] for library in threadpool_info())
        return [None]

    monkeypatch.setattr(explorer_page, "_projections_by_layer", looked)
    explorer_data(full)
    assert {*seen} == {1}


def test_an_unknown_task_is_refused_by_name(full: DriftRun) -> None:
    with pytest.raises(DataError, match="nonsense"):
        explorer_data(full, ViewRequest(tasks=("nonsense",)))


def test_the_command_writes_one_file_and_into_a_run_one_that_it_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_run(tmp_path / "run"), tmp_path / "pages" / "x.html"
    out.parent.mkdir()
    for flags in ([], ["-o", str(out)]):
        with pytest.raises(SystemExit) as left:
            main(["view", str(path), *flags])
        assert left.value.code == 0
    inside = path / "reports" / "view.html"
    assert inside.read_bytes() == out.read_bytes() and [*out.parent.iterdir()] == [out]
    assert "reports/view.html" in open_run(path).manifest.files
    assert str(out) in capsys.readouterr().out
    shown = dl.open_run(path).view(tasks=["cars"])
    frame = shown._repr_html_()
    assert repr(shown) == f"<Explorer of {open_run(path).id}; `save(path)` writes its page>"
    assert frame.startswith('<iframe srcdoc="&lt;!doctype') and 'sandbox="allow-scripts allow-downloads"' in frame
