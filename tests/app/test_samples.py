"""Features and Output: samples in tables, their pictures and stories, and layouts that a job computes."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from streamlit.testing.v1 import AppTest

from driftlens.base.errors import LayerNotFoundError, SpecError
from driftlens.findings.outcomes import outcomes
from driftlens.runs.layout import THUMB_SIDE as SIDE
from driftlens.runs.layout import texts_file, thumbs_file
from driftlens.runs.run import open_run
from driftlens_app.jobs.requests import project_request
from driftlens_app.samples import decisions, pictures, wall_cards
from driftlens_app.views.samples import flipped, flipped_ids, sample_rows
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.page_curves import sample_curves
from driftlens_reports.charts.picking import scored_samples
from tests.app.conftest import Open
from tests.app.pages import errors, said
from tests.records.full_run import Size, write_full_run, write_run


def walls(app: AppTest) -> list[dict[str, Any]]:
    """The walls of cards that a page shows."""
    (wall,) = [at.proto for at in app.get("bidi_component") if "wall" in at.proto.component_name]
    shown: list[dict[str, Any]] = json.loads(wall.json)["walls"]
    return shown


def test_samples_are_listed_by_falling_drift_under_a_heading_that_names_the_task(
    open_app: Open, root: Path
) -> None:
    run = open_run(root / "full")
    app = open_app(root, "samples", task="mnist")
    assert [title.value for title in app.title] == ["Samples of mnist"] and not app.error
    rows = sample_rows(run, "mnist", ChartOptions())
    table = run.samples("mnist", "merged", "final").set_index("sample_id")["drift_l2"]
    assert rows["drift, merged"].tolist() == sorted(table, reverse=True)
    assert rows["drift, merged"].tolist() == table[rows["sample_id"]].tolist()


def test_a_card_says_what_each_model_says_and_what_is_unlike_the_expert(root: Path) -> None:
    run = open_run(root / "full")
    flips = flipped_ids(run, "cars", ChartOptions())
    rows = run.outputs("cars", "merged").set_index("sample_id")
    assert set(flips) == {*rows.index[rows["pred"] != rows["expert_pred"]]} and flips
    assert rows.loc[flips, "margin"].is_monotonic_decreasing
    (card,) = wall_cards(run, "cars", flips[:1], ChartOptions())
    row, repaired = rows.loc[flips[0]], run.outputs("cars", "calibrated:featcal").set_index("sample_id")
    last = repaired.at[flips[0], "pred"]
    marks = ["✓" if answer == row["label"] else "✗" for answer in (row["expert_pred"], row["pred"], last)]
    assert card["says"] == [
        ("label", row["label"], ""),
        ("expert said", row["expert_pred"], marks[0]),
        ("merged says", row["pred"], marks[1]),
        ("calibrated says", last, marks[2]),
    ]
    assert card["outcome"] == outcomes(run, "cars", "merged", "calibrated:featcal").at[flips[0], "outcome"]
    run._frames["outputs"] = run.outputs().assign(label=None)
    (bare,) = wall_cards(run, "cars", flips[:1], ChartOptions())
    assert bare["says"][0] == ("label", "–", "") and bare["says"][2] == ("merged says", row["pred"], "≠")


def test_the_url_keeps_what_is_selected_until_another_task_is_chosen(open_app: Open, root: Path) -> None:
    app = open_app(root, "samples", task="mnist", selected="2-5")
    assert "2 selected in the chart" in said(app) and app.query_params["selected"] in ("2-5", ["2-5"])
    app.selectbox(key="task").set_value("cars").run()
    assert "selected in the chart" not in said(app) and "selected" not in app.query_params
    (wrong,) = [open_app(root, "samples", task="mnist", selected="99-x-1-1²")]
    assert "1 selected in the chart" in said(wrong) and not wrong.error


def test_samples_of_text_are_shown_with_what_they_ask(root: Path) -> None:
    run = open_run(root / "full")
    texts = {name: f"<b>question {name}</b>" for name in run.sample_ids("mnist")}
    (run.path / texts_file("mnist")).parent.mkdir(exist_ok=True)
    (run.path / texts_file("mnist")).write_text(json.dumps(texts))
    cards = wall_cards(run, "mnist", run.sample_ids("mnist"), ChartOptions())
    assert {card["id"]: card["text"] for card in cards} == texts
    (trace, *_) = charts["scatter"].draw(run, ChartOptions(tasks=("mnist",))).figure.data
    assert all("&lt;b&gt;question" in text for text in trace.text)


def test_a_class_filter_leaves_other_classes_out_of_chart_and_table(root: Path) -> None:
    run = open_run(root / "full")
    label = str(run.samples("cars")["label"].iloc[0])
    options = ChartOptions(tasks=("cars",), classes=(label,))
    drawn = charts["scatter"].draw(run, options)
    everything = charts["scatter"].draw(run, ChartOptions(tasks=("cars",))).data
    assert set(drawn.data["label"]) == set(sample_rows(run, "cars", options)["class"]) == {label}
    kept = everything[everything["label"] == label].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        drawn.data[["sample_id", "variant", "x", "y"]], kept[["sample_id", "variant", "x", "y"]]
    )


def test_a_chart_keeps_its_identity_when_it_comes_from_the_cache(open_app: Open, root: Path) -> None:
    """Else what a reader selects in it for the first time belongs to a chart that is gone."""
    app = open_app(root, "samples", task="cars")
    (first,) = app.get("plotly_chart")
    (again,) = app.run().get("plotly_chart")
    assert first.proto.id == again.proto.id and first.proto.spec == again.proto.spec


def test_few_samples_are_drawn_by_pca_only_and_the_page_says_why(open_app: Open, tmp_path: Path) -> None:
    write_full_run(tmp_path / "few", size=Size(samples=6))
    app = open_app(tmp_path, "samples")
    assert app.selectbox(key="method").options == ["PCA"]
    assert "need 15 samples" in said(app) and not app.error


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read_only"])
def test_a_layout_that_is_not_there_is_offered_as_a_job(open_app: Open, root: Path, read_only: bool) -> None:
    app = open_app(root, "samples", read_only=read_only)
    app.selectbox(key="method").set_value("tsne").run()
    assert not app.error and "driftlens project RUN" in said(app)
    assert ["Compute this layout"] * (not read_only) == [button.label for button in app.button]


def test_the_request_for_a_layout_names_task_layer_method_and_seed(root: Path) -> None:
    run = open_run(root / "full")
    request = project_request(run, "cars", 2, "umap", 7)
    expected = ("--task", "cars", "--layer", "2", "--method", "umap", "--seed", "7", "--progress", "jsonl")
    assert request.arguments == ("project", str(run.path), *expected)
    with pytest.raises(SpecError):
        project_request(run, "cars", 2, "umap --force", 0)
    with pytest.raises(LayerNotFoundError):
        project_request(run, "cars", 99, "umap", 0)


def test_a_story_begins_with_the_expert_and_has_every_models_decision(root: Path) -> None:
    run = open_run(root / "full")
    rows = run.outputs("dtd")
    sample = str(rows["sample_id"].iloc[5])
    own = rows[rows["sample_id"] == sample].set_index("variant")
    found = decisions(run, "dtd", sample).set_index("model")
    assert found.index[0] == "expert" and found.loc["expert", "pred"] == own["expert_pred"].iloc[0]
    assert found.loc["featcal", "pred"] == own.loc["calibrated:featcal", "pred"]
    assert found.loc["merged", "score_bound"] == own.loc["merged", "score_bound"]
    assert found.loc["expert", "margin"] == own["margin"].iloc[0]


def test_a_storys_curves_are_the_samples_rows(root: Path) -> None:
    run = open_run(root / "full")
    sample = run.sample_ids("cars")[4]
    drawn = sample_curves(run, "cars", sample, ChartOptions())
    rows = run.samples("cars", "merged")
    rows = rows[rows["sample_id"] == sample].sort_values("layer")
    assert list(drawn.figure.data[0].y) == rows["drift_l2"].tolist()
    shares = drawn.data[drawn.data["variant"] == "merged"]["share of final drift"]
    np.testing.assert_array_equal(shares, rows["final_share"])


def test_a_story_promises_shares_only_of_samples_that_have_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(root / "full")
    ids = run.sample_ids("cars")
    whole = run.samples("cars")
    few = whole.assign(final_share=whole["final_share"].where(whole["sample_id"].isin(ids[:8])))
    monkeypatch.setattr(run, "samples", lambda task: few)
    with_shares, without = (sample_curves(run, "cars", ids[at], ChartOptions()) for at in (3, 11))
    assert "the share of its final drift from each layer" in " ".join(with_shares.notes)
    assert without.notes == (
        "Drift of this sample alone, in feature units.",
        "Contributions were measured on 8 of 24 samples; metrics.jacobian.samples in the spec raises it.",
    )
    monkeypatch.setattr(run, "samples", lambda task: few.assign(final_share=np.nan))
    assert "`driftlens explain RUN`" in sample_curves(run, "cars", ids[0], ChartOptions()).notes[1]


def test_flipped_decisions_are_those_that_differ_from_the_experts(root: Path) -> None:
    run = open_run(root / "full")
    found = flipped(scored_samples(run, ChartOptions(variants=("merged",)), "flipped"))
    rows = run.outputs(variant="merged")
    wanted = rows[rows["pred"] != rows["expert_pred"]]
    assert len(wanted) and sorted(zip(found["task"], found["sample_id"], strict=True)) == sorted(
        zip(wanted["task"], wanted["sample_id"], strict=True)
    )
    assert found["margin"].is_monotonic_decreasing


def test_every_card_of_flipped_decisions_flips_and_the_heading_counts_cards(
    open_app: Open, root: Path
) -> None:
    """A control's flips stand on no card."""
    run = open_run(root / "full")
    rows = run.outputs("cars")
    rows = rows[
        rows["variant"].isin(["merged", "calibrated:featcal"]) & (rows["pred"] != rows["expert_pred"])
    ]
    everything = run.outputs()
    is_control = everything["variant"].str.startswith("baseline")
    run._frames["outputs"] = everything.assign(flipped=everything["flipped"] | is_control)
    ids = flipped(scored_samples(run, ChartOptions(tasks=("cars",)), "flipped"))[
        "sample_id"
    ].drop_duplicates()
    assert {*ids} == {*rows["sample_id"]} and len(ids)
    for card in wall_cards(run, "cars", [*ids], ChartOptions()):
        said = {who: answer for who, answer, _ in card["says"]}
        assert {said["merged says"], said["calibrated says"]} != {said["expert said"]}
    app = open_app(root, "samples", part="Decisions")
    assert {card["id"] for wall in walls(app) for card in wall["cards"]} == {*ids}


@pytest.mark.parametrize("chip", ["still wrong", "repaired", "flipped", "expert wrong"])
def test_a_chip_filters_the_wall_by_what_became_of_samples(open_app: Open, root: Path, chip: str) -> None:
    run = open_run(root / "full")
    became = outcomes(run, "cars", "merged", "calibrated:featcal")["outcome"]
    wanted = {"flipped": {*flipped_ids(run, "cars", ChartOptions())}}.get(
        chip, {*became.index[became == chip]}
    )
    app = open_app(root, "samples", task="cars")
    pills = app.button_group(key="outcome")
    if not wanted:
        assert chip not in str(pills.options)
        return
    assert any(option == f"{chip} ({len(wanted)})" for option in pills.options)
    pills.set_value([chip]).run()
    again = open_app(root, "samples", task="cars", outcome=chip)  # as the link says
    for page in (app, again):
        assert {card["id"] for wall in walls(page) for card in wall["cards"]} == wanted
        assert page.query_params["outcome"] in (chip, [chip])


def test_the_repair_page_shows_what_the_merge_broke_beside_what_the_repair_did(
    open_app: Open, root: Path
) -> None:
    app = open_app(root, "repair", **{"wall-of": "cars"})
    became = outcomes(open_run(root / "full"), "cars", "merged", "calibrated:featcal")["outcome"]
    assert walls(app)
    for wall in walls(app):
        name, count = wall["title"].split(" (")[0].lower(), int(wall["title"].split("(")[1].split(")")[0])
        assert count == (became == name).sum() == len(wall["cards"])
        assert {became[card["id"]] for card in wall["cards"]} == {name}


def test_without_class_scores_the_output_page_says_what_gives_them(open_app: Open, tmp_path: Path) -> None:
    write_full_run(tmp_path / "full", has_labels=False)
    write_run(tmp_path / "bare", has_labels=False, has_heads=False, name="bare")
    app = open_app(tmp_path, "samples", part="Decisions", run=open_run(tmp_path / "bare").id)
    assert not app.error and "names a head" in said(app)


def test_pictures_belong_to_their_samples(root: Path) -> None:
    run = open_run(root / "full")
    assert pictures(run, "cars", run.sample_ids("cars")[:2]) == [None, None]
    stored = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((3, SIDE, SIDE, 3), np.uint8)
    (run.path / "thumbs").mkdir()
    np.savez_compressed(run.path / thumbs_file("cars"), pictures=stored)
    ids = run.sample_ids("cars")
    second, unknown, late = pictures(run, "cars", [ids[1], "nosuch", ids[10]])
    assert unknown is None and late is None and second is not None
    pixels = Image.open(io.BytesIO(base64.b64decode(second.partition(",")[2])))
    np.testing.assert_array_equal(np.asarray(pixels), stored[1])


def test_a_damaged_file_of_pictures_is_an_error_in_its_place(open_app: Open, root: Path) -> None:
    file = root / "full" / thumbs_file("cars")
    file.parent.mkdir()
    file.write_bytes(b"PK no archive")
    app = open_app(root, "samples", task="cars")
    assert "cars.npz" in errors(app) and app.get("plotly_chart")
