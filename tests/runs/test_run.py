from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import driftlens as dl
from driftlens.results.formatting import format_percent
from driftlens.results.listing import find_runs
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import CALIBRATION, SAMPLES
from driftlens.utils.errors import DataError, LayerNotFoundError, RunError, SchemaTooNewError
from tests.runs.full_run import write_run


def edit_manifest(folder: Path, **entries: object) -> None:
    path = folder / "manifest.json"
    record = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize("layer", [3, "visual.transformer.resblocks.1"], ids=["index", "module path"])
def test_filters_choose_rows_and_nothing_else(run: DriftRun, layer: int | str) -> None:
    everything = run.samples()
    chosen = run.samples(task="mnist", variant="merged", layer=layer)
    expected = everything.query("task == 'mnist' and variant == 'merged' and layer == 3")
    pd.testing.assert_frame_equal(chosen, expected.reset_index(drop=True))
    assert len(chosen) == 6 and len(everything) == 2 * 2 * 4 * 6


def test_final_is_the_last_layer(run: DriftRun) -> None:
    pd.testing.assert_frame_equal(run.layers(layer="final"), run.layers(layer=4))
    assert run.layer_index("final") == 4


def test_rows_and_features_tell_the_same_drift(run: DriftRun) -> None:
    for task in run.tasks:
        for layer in range(1, 5):
            expert, merged = (run.features(task, name, layer).astype(float) for name in ("expert", "merged"))
            drift = np.linalg.norm(merged - expert, axis=1)
            # float16 keeps eleven bits of each entry.
            np.testing.assert_allclose(run.samples(task, "merged", layer)["drift_l2"], drift, rtol=0, atol=0.01)
            assert run.value("drift_l2_mean", task=task, layer=layer) == pytest.approx(drift.mean(), abs=0.01)
    assert run.sample_ids("cars") == tuple(run.samples("cars", "merged", 1)["sample_id"])


def test_features_are_read_on_demand_and_can_not_be_changed(run: DriftRun) -> None:
    features = run.features("cars", "expert", "final")
    assert isinstance(features, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        features[0] = 0


def test_a_frame_handed_out_is_the_callers_own(run: DriftRun) -> None:
    before = run.layers().copy()
    frame = run.layers()
    frame.loc[:, "drift_l2_mean"] = 0.0
    pd.testing.assert_frame_equal(run.layers(), before)


def test_a_value_is_the_cell_of_the_table(run: DriftRun) -> None:
    cell = run.layers("mnist", "base", 2)["cos_mean"].item()
    assert run.value("cos_mean", task="mnist", variant="base", layer=2) == cell
    assert run.value("n", task="mnist") == 6.0


def test_what_was_not_measured_is_nan(run: DriftRun) -> None:
    assert np.isnan(run.value("jacobian_error", task="cars", layer=1))
    assert np.isnan(run.value("nodes", task="cars", layer=1))


@pytest.mark.parametrize(
    ("ask", "error", "named"),
    [
        (
            lambda run: run.layers(task="carz"),
            DataError,
            r"no task 'carz'; it has cars, mnist\nDid you mean 'cars'",
        ),
        (lambda run: run.samples(variant="mergd"), DataError, "no variant 'mergd'; it has base, merged"),
        (lambda run: run.layers(layer=5), LayerNotFoundError, r"no layer 5; it has 1 \(stem\) to 4 \(head\)"),
        (lambda run: run.layers(layer=0), LayerNotFoundError, "no layer 0"),
        (lambda run: run.layers(layer="visual.ln_pots"), LayerNotFoundError, "paths: visual.ln_post,"),
        (lambda run: run.calibration("featcal"), DataError, "no calibration 'featcal'; it has none"),
        (lambda run: run.value("drift_l2_men", task="cars"), DataError, "Did you mean 'drift_l2_mean'"),
        (
            lambda run: run.value("cos_mean", task="cars", variant="expert"),
            DataError,
            "no row for task 'cars'",
        ),
        (
            lambda run: run.sample_ids("cars", "train"),
            DataError,
            "recorded splits: calibration, diagnosis, test",
        ),
        (lambda run: run.features("cars", "merged", 9), LayerNotFoundError, "no layer 9"),
    ],
    ids=[
        *("unknown task", "unknown variant", "layer beyond the head", "the input", "unknown path"),
        *("unknown calibration", "unknown column", "row of the expert", "unknown split", "features beyond"),
    ],
)
def test_asking_for_what_is_not_there_names_what_is(
    run: DriftRun, ask: object, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        ask(run)  # type: ignore[operator]


def test_tables_never_computed_are_empty_with_all_columns(own: Path) -> None:
    assert tuple(open_run(own).calibration().columns) == CALIBRATION.names
    assert open_run(own).calibration().empty
    unlabelled = open_run(write_run(own.parent / "unlabelled", has_labels=False, has_heads=False))
    assert unlabelled.accuracy().empty and unlabelled.outputs("cars").empty


def test_features_of_a_layer_that_is_not_stored_are_not_missing(own: Path) -> None:
    manifest = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    del manifest["files"]["features/cars/merged/002.npy"]
    edit_manifest(own, files=manifest["files"])
    (own / "features/cars/merged/002.npy").unlink()
    (own / "features/cars/merged/003.npy").unlink()
    with pytest.raises(DataError, match="not stored"):
        open_run(own).features("cars", "merged", 2)
    with pytest.raises(RunError, match=r"003\.npy can't be read"):
        open_run(own).features("cars", "merged", 3)


@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_a_damaged_table_is_named_and_the_others_still_open(own: Path, damage: str) -> None:
    path = own / "tables/samples.parquet"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    run = open_run(own)
    with pytest.raises(RunError, match=r"samples\.parquet"):
        run.samples()
    assert len(run.layers()) == 16


def test_truncated_features_are_named(own: Path) -> None:
    path = own / "features/cars/merged/004.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"004\.npy can't be read"):
        open_run(own).features("cars", "merged", "final")


def test_pickled_features_are_not_unpickled(own: Path) -> None:
    np.save(own / "features/cars/merged/004.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(RunError, match=r"004\.npy can't be read"):
        open_run(own).features("cars", "merged", "final")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"id": "half', r"manifest\.json is damaged"),
        ("[]", "an object expected, got list"),
        ('{"schema_version": "1.0"}', "is damaged"),
        ('{"schema_version": "latest"}', "schema version 'latest'"),
        (
            '{"schema_version": "1.0", "id": "a", "name": "a", "created": "", "tasks": "cars"}',
            "tasks: input should be a valid",
        ),
        ('{"schema_version": "1.0", "id": "a", "name": "a", "created": "", "layers": [3]}', "is damaged"),
    ],
    ids=["torn", "a list", "empty", "odd version", "text for a list", "odd layer"],
)
def test_a_damaged_manifest_is_named(own: Path, text: str, complaint: str) -> None:
    (own / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=complaint):
        open_run(own)


def test_a_newer_schema_is_refused_by_name(own: Path) -> None:
    edit_manifest(own, schema_version="2.0", files="whatever version 2 makes of it")
    with pytest.raises(SchemaTooNewError, match=r"schema 2\.0; this DriftLens knows 1\.9") as caught:
        open_run(own)
    assert "newer DriftLens" in caught.value.hint


def test_unknown_entries_of_a_newer_minor_version_do_no_harm(own: Path) -> None:
    edit_manifest(own, schema_version="1.99", weather="fine")
    assert open_run(own).tasks == ("cars", "mnist")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run: it has no manifest\.json"):
        open_run(tmp_path)
    with pytest.raises(RunError, match=r"nowhere is not a run: there is no such folder"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "notes").touch()
    with pytest.raises(RunError, match=r"notes is not a run: it is a file"):
        open_run(tmp_path / "notes")


def test_names_are_escaped_in_notebooks(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    run = open_run(write_run(tmp_path / "run", name=name, tasks=[name, "mnist"]))
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    shown = dl.open_run(run.path)._repr_html_()
    parser.feed(shown)
    table = {"b", "table", "thead", "tbody", "tr", "th", "td", "p"}
    assert table <= {*tags} and {*tags} - table == {
        "style",
        "section",
        "dl",
        "div",
        "dt",
        "dd",
        "img",
        "span",
    }
    assert shown.index("headline") < shown.index("<table")
    unbroken = format_percent(run.value("drift_rel", task=name)).replace(" ", "\N{NO-BREAK SPACE}")
    assert f"<td>{unbroken}</td>" in shown


def test_a_summary_has_every_task_in_a_row_with_the_numbers_of_the_tables(run: DriftRun) -> None:
    found = dl.open_run(run.path).summary()
    rows = found.frame().set_index("task")
    scored = run.accuracy().set_index(["task", "variant"])
    for task, variant in itertools.product(run.tasks, ("base", "expert", "merged")):
        if (task, variant) in scored.index:
            assert rows.loc[task, variant] == scored.loc[(task, variant), "value"]
            assert rows.loc[task, f"{variant} low"] == scored.loc[(task, variant), "ci_low"]
            assert rows.loc[task, "test samples"] == scored.loc[(task, variant), "n"]
    for task in run.tasks:
        assert rows.loc[task, "drift of merged"] == run.value("drift_rel", task=task)
    mean = rows.loc[f"mean of {len(run.tasks)}"]
    assert mean["merged"] == pytest.approx(rows["merged"].iloc[:-1].mean())
    assert mean["merged low"] < mean["merged"] < mean["merged high"], "an interval of its own"
    assert all(task in repr(found) for task in run.tasks) and format_percent(rows["merged"].iloc[0]) in repr(found)
    assert not any(head.startswith("drift of expert") for head in rows), "an expert has none to itself"


def test_frames_have_units_and_their_categories_are_in_the_order_of_the_run(run: DriftRun) -> None:
    assert run.layers("cars", "merged").attrs["units"]["drift_l2_mean"] == "feature"
    rows = run.frame("layers")
    assert tuple(rows["task"].cat.categories) == run.tasks and rows["variant"].cat.ordered
    paths = [info.path for info in sorted(run.manifest.layers, key=lambda info: info.index)]
    assert list(rows["path"].cat.categories) == paths
    first, last = rows["path"].iloc[[rows["layer"].argmin(), rows["layer"].argmax()]]
    assert (rows["path"] == first).any() and rows["path"].min() == paths[0] and rows["path"].max() == last
    assert pd.api.types.is_string_dtype(run.layers()["path"].dtype), "what `layers` gives stays text"
    with pytest.raises(DataError, match="no table 'layer'"):
        run.frame("layer")


def test_a_listing_keeps_unreadable_runs_with_their_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "good", tasks=["cars"])
    write_run(tmp_path / "spoilt")
    (tmp_path / "spoilt/manifest.json").write_text("{")
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("")
    good, spoilt = find_runs(tmp_path)
    assert (good.name, good.state, good.problem) == ("small run", "done", "")
    assert good.final_drift == {"cars": open_run(tmp_path / "good").value("drift_l2_mean", task="cars")}
    assert good.bytes == sum(file.bytes for file in open_run(good.path).manifest.files.values()) > 0
    assert (spoilt.name, spoilt.state) == ("spoilt", "unreadable")
    assert "is damaged" in spoilt.problem
    assert find_runs(tmp_path / "good") == [good]
    with pytest.raises(RunError, match="is not a folder"):
        find_runs(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_run_opens_where_torch_does_not_import(saved: Path) -> None:
    script = """
        import sys
        sys.modules["torch"] = None
        import driftlens as dl
        run = dl.open_run(sys.argv[1])
        for table in (run.layers, run.samples, run.outputs, run.params, run.accuracy, run.resources):
            print(len(table()))
        print(run.features("cars", "merged", "final").shape, len(run._repr_html_()) > 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(saved)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert shown[:7] == ["16", "96", "24", "26", "6", "3", "(6, 5) True"]


def test_sample_rows_keep_the_declared_order_of_columns(run: DriftRun) -> None:
    assert tuple(run.samples().columns) == SAMPLES.names


@pytest.mark.slow
def test_what_a_run_is_called_in_a_notebook_is_three_short_lines_whatever_it_holds(tmp_path: Path) -> None:
    tasks = [f"task {at}\n" for at in range(30)]
    run = dl.open_run(write_run(tmp_path / "run", tasks=tasks))
    first, *others = repr(run).splitlines()
    assert "and 27 more" in others[0] and len(others) == 2
    assert len(first) < len(str(run.path)) + 20 and max(map(len, others)) <= 100
