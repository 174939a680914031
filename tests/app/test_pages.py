"""Every page, in every state it can be in; what is read off it is compared with the tables."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import streamlit as st

from driftlens.results.formatting import typeset_signs
from driftlens.results.verdict import headline, verdict
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.run import open_run
from driftlens_app import selection
from driftlens_app.calibration import START
from driftlens_app.show import pages
from tests.app.conftest import Open, shown_data
from tests.app.pages import OF_A_RUN, errors, said
from tests.quick import few
from tests.runs.full_run import Size, write_full_run

VIEWS = [path.removeprefix("views/").removesuffix(".py") for path in pages()]


@pytest.mark.parametrize("view", VIEWS)
def test_an_empty_folder_offers_the_demo_or_says_what_is_missing(open_app: Open, tmp_path: Path, view: str) -> None:
    app = open_app(tmp_path, view)
    assert not app.error
    if view == "new_run":
        assert not app.text_input(key="base").value
    else:
        assert [button.label for button in app.button] == ["Run the demo"]
        assert [choice.split(":")[0] for choice in app.radio(key="suite").options] == ["Texts", "Images"]


@pytest.mark.slow
def test_many_warnings_do_not_push_the_numbers_off_the_screen(open_app: Open, root: Path) -> None:
    manifest = read_manifest(root / "full")
    write_manifest(root / "full", replace(manifest, warnings=[f"trouble {at}" for at in range(9)]))
    app = open_app(root, "overview", run=manifest.id)
    (warning,) = app.warning
    assert len(warning.value.splitlines()) == 3 and "trouble 8" in said(app)


@pytest.mark.slow
def test_while_a_run_is_on_the_headline_counts_what_is_measured(open_app: Open, root: Path) -> None:
    size = Size(blocks=1, samples=6, width=4, classes=2, tests=40)
    path = write_full_run(root / "many", tasks=[f"task {at:02d}" for at in range(20)], size=size)
    file = path / "tables" / "accuracy.parquet"
    rows = pq.read_table(file)
    pq.write_table(rows.filter([name < "task 09" for name in rows["task"].to_pylist()]), file)
    app = open_app(root, "overview", run=open_run(path).id)
    (head,) = [entry.proto.body for entry in app.get("html") if "headline" in entry.proto.body]
    assert '<p class="so-far">9 of 20 tasks measured</p>' in head.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("view", few(VIEWS, ["overview", "samples"]))
def test_a_page_of_a_finished_run_has_a_title_and_no_error(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view)
    assert len(app.title) == 1 and app.title[0].value
    assert not app.error


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_a_read_only_dashboard_starts_nothing(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view, read_only=True)
    starting = [button for button in app.button if button.label in ("FeatCal calibrate", START, "Start the analysis")]
    assert all(button.disabled for button in starting)


@pytest.mark.parametrize("view", few(OF_A_RUN, ["overview"]))
def test_a_damaged_table_is_an_error_in_its_place(open_app: Open, root: Path, view: str) -> None:
    # Without its layer table a run is not offered at all; the list says why.
    for table in {*(root / "full" / "tables").iterdir()} - {root / "full" / "tables" / "layers.parquet"}:
        table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])
    app = open_app(root, view)
    assert app.title and len(app.error) >= (view == "overview")
    assert all("RunError" in element.value and "parquet" in element.value for element in app.error)


@pytest.mark.parametrize("view", few(OF_A_RUN, ["overview"]))
def test_a_link_to_an_unknown_run_does_not_show_another_one(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view, run="nosuch-1234")
    assert "nosuch-1234" in errors(app) and "DataError" not in errors(app)
    assert not app.title and open_run(root / "full").name not in said(app)


@pytest.mark.parametrize("view", few(OF_A_RUN, ["overview"]))
def test_the_base_alone_can_be_looked_at(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view, variants="base")
    assert app.query_params["variants"] == "base"
    assert not app.exception and not app.error
    assert "This is a bug in DriftLens" not in said(app)


@pytest.mark.slow
def test_what_is_chosen_goes_along_where_the_page_is_left_before_it_is_drawn(
    open_app: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_app(root, "layers", task="cars")
    with monkeypatch.context() as left:  # as Streamlit ends a script as soon as another page is asked for
        left.setattr(selection, "restore_selection", lambda _run: st.stop())
        app.selectbox(key="task").set_value("mnist")
        app.multiselect(key="variants").set_value(["merged"]).run()
    app.query_params.clear()
    app.switch_page("views/repair.py").run()
    assert (app.query_params["task"], app.query_params["variants"]) == ("mnist", "merged")


def test_the_list_has_a_row_per_run_with_the_numbers_of_its_tables(open_app: Open, root: Path) -> None:
    (rows,) = [frame.value for frame in open_app(root).dataframe]
    run = open_run(root / "full")
    (row,) = rows.to_dict("records")
    assert row["name"] == "full" and row["id"] == run.id and row["state"] == "done"
    for column, variant in (("base", "base"), ("merged", "merged"), ("experts", "expert")):
        shares = run.accuracy(variant=variant).query("metric == 'accuracy'")["value"]
        assert row[column] == pytest.approx(100 * shares.mean())
    last = [name for name in run.variants if name.startswith("calibrated:")][-1]
    drifts = [run.value("drift_rel", task=task, variant=last) for task in run.tasks]
    assert row["relative drift"] == pytest.approx(100 * sum(drifts) / len(drifts))


def test_unreadable_runs_keep_their_rows_and_say_why(open_app: Open, root: Path) -> None:
    newer, broken = write_full_run(root / "newer"), write_full_run(root / "broken")
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "99.0"}))
    (broken / "manifest.json").write_text("{")
    app = open_app(root)
    (rows,) = [frame.value for frame in app.dataframe]
    assert dict(zip(rows["name"], rows["state"], strict=True)) == {
        "broken": "unreadable",
        "full": "done",
        "newer": "unreadable",
    }
    broken_text, newer_text = (element.value.replace("\\", "") for element in app.warning)
    assert "broken" in broken_text and "damaged" in broken_text
    assert "99.0" in newer_text and "Install a newer DriftLens" in newer_text


def test_a_folder_whose_only_run_cannot_be_read_is_not_called_empty(open_app: Open, root: Path) -> None:
    path = root / "full" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": "99.0"}))
    app = open_app(root, "overview", run="anything")
    assert "99.0" in errors(app) and "Install a newer DriftLens" in errors(app)
    assert not app.button


def test_a_run_that_is_not_here_may_be_the_one_that_cannot_be_read(open_app: Open, root: Path) -> None:
    (write_full_run(root / "broken") / "manifest.json").write_text("{")
    app = open_app(root, "overview", run="gone-0000")
    assert "gone-0000" in errors(app) and "Unreadable: broken" in errors(app)


def test_a_copy_does_not_pass_for_its_original(open_app: Open, root: Path) -> None:
    shutil.copytree(root / "full", root / "gone-astray")
    app = open_app(root)
    assert "**gone-astray** is a copy of full" in app.warning[0].value.replace("\\", "")
    (rows,) = [frame.value for frame in app.dataframe]
    assert dict(zip(rows["name"], rows["state"], strict=True)) == {"full": "done", "gone-astray": "copy of full"}


def test_a_link_out_of_the_folder_is_not_followed(open_app: Open, root: Path, tmp_path: Path) -> None:
    outside = write_full_run(tmp_path / "outside", name="outside")
    (root / "link").symlink_to(outside)
    (root / "runs").symlink_to(tmp_path)
    (rows,) = [frame.value for frame in open_app(root).dataframe]
    assert list(rows["name"]) == ["full"]


def test_an_id_that_is_no_id_is_refused(open_app: Open, root: Path) -> None:
    path = root / "full" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": "../../etc"}))
    app = open_app(root)
    assert "its id has invalid characters" in app.warning[0].value.replace("\\", "")
    assert not app.selectbox


def test_the_filter_keeps_what_it_names(open_app: Open, root: Path) -> None:
    write_full_run(root / "other", name="other", tasks=("svhn",))
    app = open_app(root)
    app.text_input(key="filter").set_value("SVHN").run()
    assert list(app.dataframe[0].value["name"]) == ["other"]
    app.text_input(key="filter").set_value("nothing like it").run()
    assert not app.dataframe and "No run matches" in app.info[0].value


def test_the_overview_tells_the_verdict_first_and_the_origins_of_the_chosen_task(open_app: Open, root: Path) -> None:
    run = open_run(root / "full")
    app = open_app(root, "overview", task="mnist")
    judged = verdict(run)
    (shown,) = (text for entry in app.markdown if (text := entry.value.replace("\\", "")).startswith("merged"))
    shown = shown.replace("\N{NO-BREAK SPACE}", " ")
    # Tiles and table have the scores, a badge the checks; the command is there to be copied, or is a button.
    left_out = ("Accuracy", "Worst: ", "Self-checks failed", "Next: ")
    others = [text for text in judged.sentences if not text.startswith(left_out)]
    assert [line for line in shown.split("\n\n") if not line.startswith("Next: ")] == [*map(typeset_signs, others)]
    assert not any(text in said(app) for text in judged.sentences if text.startswith(left_out[:3]))
    assert str(run.path) not in said(app)
    (head,) = [entry.proto.body for entry in app.get("html") if "headline" in entry.proto.body]
    assert headline(run).text in head.replace("\N{NO-BREAK SPACE}", " ") and "tile" in head
    rows, right = app.dataframe[0].value.set_index("task"), run.accuracy().query("metric == 'accuracy'")
    last = [name for name in run.variants if name.startswith("calibrated:")][-1]
    right = 100 * right.pivot(index="task", columns="variant", values="value")
    assert [*rows.index] == [*(right["expert"] - right[last]).sort_values(ascending=False, kind="stable").index]
    for column, variant in (("base", "base"), ("merged", "merged"), ("expert", "expert")):
        assert rows[column].tolist() == pytest.approx(right.loc[rows.index, variant].tolist(), abs=0.051)
    for task in run.tasks:
        curve = run.layers(task, last).sort_values("layer")["drift_rel"].tolist()
        assert list(rows.loc[task, "by layer"]) == curve
        assert rows.loc[task, "relative drift"] == pytest.approx(100 * curve[-1], abs=0.051)
    assert "Where merged's final drift comes from" in said(app)
    (cells,) = [chart for chart in map(figure_of, app.get("plotly_chart")) if chart["data"][0]["type"] == "heatmap"]
    assert cells["layout"]["yaxis"]["ticktext"] == ["mnist"] and "- mnist: " not in said(app)


def test_experts_below_their_base_are_the_headline_of_the_first_page(open_app: Open, root: Path) -> None:
    """As in a new run whose prompt was guessed wrong."""
    file = root / "full" / "tables" / "accuracy.parquet"
    rows, swapped = pq.read_table(file), {"base": "expert", "expert": "base"}
    at = rows.schema.get_field_index("variant")
    names = pa.array([swapped.get(name, name) for name in rows.column(at).to_pylist()], pa.string())
    pq.write_table(rows.set_column(at, rows.schema.field(at), names), file)
    app = open_app(root, "overview")
    (head,) = [entry.proto.body for entry in app.get("html") if "headline" in entry.proto.body]
    assert "Check prompt and labels first: the experts of " in head
    assert [button.label for button in app.button if button.proto.type == "primary"] == []


def figure_of(chart: Any) -> dict[str, Any]:
    figure: dict[str, Any] = json.loads(chart.proto.spec)
    return figure


def test_names_from_a_run_are_shown_and_not_obeyed(open_app: Open, tmp_path: Path) -> None:
    name = "**x** [a](http:b) :red[c] $d$ <b>"
    write_full_run(tmp_path / name, name=f"spec {name}", tasks=("t*a*sk",))
    app = open_app(tmp_path, "overview")
    for text, plain in (
        (app.title[0].value, name),
        (app.caption[0].value.partition(" in its spec")[0], f"spec {name}"),
    ):
        assert text.replace("\\", "").replace("\N{WORD JOINER}", "") == plain
        assert r"\*\*x\*\*" in text and r"\[a\]" in text and r"\:red" in text and r"\$" in text and r"\<b" in text


def test_the_rows_behind_a_chart_are_sent_when_they_are_opened(open_app: Open, root: Path) -> None:
    app = open_app(root, "layers")
    of_tasks = len(app.dataframe)
    assert of_tasks <= 1
    assert shown_data(app)
    assert len(app.dataframe) == len(app.get("plotly_chart")) + of_tasks
