"""Which tasks and variants a chart shows, and what it says when there is nothing to show."""

from __future__ import annotations

import pytest

from driftlens.base.errors import DataError
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.panels import layer_axis, layer_title, titled
from driftlens_reports.charts.picking import chosen_tasks, chosen_variants, lacking, layer_rows
from driftlens_reports.charts.words import counted, label, literal, ranged, short

CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"


def test_all_tasks_and_all_variants_but_the_base_are_drawn(full: DriftRun) -> None:
    assert chosen_tasks(full, ChartOptions()) == ["cars", "mnist", "dtd"]
    variants = ["merged", "baseline:featcal-anchor", "calibrated:featcal"]
    assert chosen_variants(full, ChartOptions()) == variants
    assert chosen_variants(full, ChartOptions(), base=True) == ["base", *variants]


def test_names_come_in_the_order_of_the_run_and_once(full: DriftRun) -> None:
    options = ChartOptions(tasks=["dtd", "cars", "dtd"], variants=["merged", "base"])
    assert chosen_tasks(full, options) == ["cars", "dtd"]
    assert chosen_variants(full, options) == ["base", "merged"]


def test_a_calibration_brings_its_own_control_and_no_other(crowded: DriftRun) -> None:
    chosen = chosen_variants(crowded, ChartOptions(variants=["calibrated:two"]))
    assert chosen == ["baseline:two-anchor", "calibrated:two"]


@pytest.mark.parametrize("tasks", [["car"], []], ids=["unknown", "none"])
def test_an_unknown_or_empty_choice_names_those_there_are(tasks: list[str], full: DriftRun) -> None:
    with pytest.raises(DataError, match="has cars, mnist, dtd") as caught:
        chosen_tasks(full, ChartOptions(tasks=tasks))
    assert caught.value.hint == ("Did you mean 'cars'?" if tasks else "")


def test_rows_come_by_task_variant_and_layer(full: DriftRun) -> None:
    rows = layer_rows(full, ChartOptions(tasks=["mnist", "cars"], variants=["calibrated:featcal", "merged"]))
    places = list(zip(rows["task"], rows["variant"], rows["layer"], strict=True))
    variants = ["merged", "baseline:featcal-anchor", "calibrated:featcal"]
    assert places == [(t, v, at) for t in ("cars", "mnist") for v in variants for at in range(1, 7)]


def test_what_is_missing_is_looked_for_among_the_chosen_alone(full: DriftRun) -> None:
    assert lacking(full, ChartOptions(), "layers", ["final_share"]) is None
    assert lacking(full, ChartOptions(tasks=["cars"]), "accuracy", ["value", "ci_low"]) is None


@pytest.mark.parametrize(
    "name",
    [
        *("contributions", "contributions-heatmap", "splits", "adjoint", "alignment", "backbone-alignment"),
        "group-contributions",
    ],
)
def test_what_other_variants_have_is_not_measured_again(name: str, full: DriftRun) -> None:
    reason = charts[name].missing(full, ChartOptions(variants=["base"]))
    assert reason is not None and "not measured for base; choose another variant" in reason
    assert "driftlens analyze" not in reason
    assert charts[name].missing(full, ChartOptions(variants=["base", "merged"])) is None


def test_the_sentence_names_every_column_without_numbers_and_the_command_that_fills_them(
    request: pytest.FixtureRequest,
) -> None:
    run = request.getfixturevalue("unmeasured")
    assert lacking(run, ChartOptions(), "layers", ["drift_rel", "n", "cka"]) == (
        "needs columns drift_rel, cka of table layers; "
        "`driftlens analyze RUN/spec.yaml --out NEW --set metrics.cka=true` adds them."
    )


@pytest.mark.parametrize(
    ("shares", "explained", "chosen", "said"),
    [
        ("", "", None, "needs column final_share of table layers; `driftlens explain RUN` adds it."),
        ("merged", "merged", [CALIBRATED], "`driftlens explain RUN` adds it."),
        ("merged", "merged", ["merged"], ""),
        ("merged", "merged", ["base"], "not measured for base; choose another variant."),
        ("", f"merged {CONTROL} {CALIBRATED}", None, "--set metrics.contributions=true` adds it."),
    ],
    ids=["all left out", "one left out", "of others", "of the base", "a part switched off"],
)
def test_attribution_that_was_left_out_is_added_to_the_run_itself(
    shares: str, explained: str, chosen: list[str] | None, said: str, full: DriftRun
) -> None:
    """`driftlens explain` passes over variants that have rows with Jacobians, whatever was left out of these."""
    run, rows = open_run(full.path), full.layers()
    rows["final_share"] = rows["final_share"].where(rows["variant"].isin(shares.split()))
    rows["jacobian_samples"] = rows["n"].where(rows["variant"].isin(explained.split()))
    run._frames["layers"] = rows
    reason = lacking(run, ChartOptions(variants=chosen), "layers", ["final_share"])
    assert str(reason or "").endswith(said) and bool(reason) == bool(said)


def test_the_layer_axis_always_labels_stem_and_head(full: DriftRun) -> None:
    axis = layer_axis(full)
    assert axis["tickvals"] == [1, 2, 3, 4, 5, 6]
    assert axis["autorangeoptions"]["clipmin"] == 0.5 and axis["autorangeoptions"]["clipmax"] == 6.5
    assert layer_title(full) == "layer (index: 1 stem, 6 head)"


def test_units_are_the_schemas() -> None:
    assert titled("drift", "layers", "drift_l2_mean") == "drift (feature units)"
    assert titled("loss", "outputs", "ce") == "loss (nat)"
    assert titled("share", "layers", "cka") == "share (ratio)"


def test_names_are_shown_character_by_character() -> None:
    assert literal("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    assert literal("$x$ %{y}\n") == "&#36;x&#36; &#37;{y}\ufffd"
    assert label("a" * 40) == "a" * 25 + "…" and label("<" * 40, 9).count("&lt;") == 8


def test_counts_read_as_words() -> None:
    assert counted(1, "task") == "1 task" and counted(8041, "sample") == "8\u202f041 samples"
    assert ranged([24, 16, 24], "sample") == "16 to 24 samples" and ranged([1, 1], "sample") == "1 sample"
    assert ranged([], "sample") == "an unknown number of samples"
    assert [short(value) for value in (0.01234, 1.2, 100.0, 123.4, 1234.5)] == [
        "0.0123",
        "1.20",
        "100",
        "123",
        "1234",
    ]
