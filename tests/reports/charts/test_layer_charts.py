"""Charts of layers and causes draw what the layer table holds: every number, in its place, and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from driftlens.results.compare import compare
from driftlens.results.formatting import format_number, format_percent
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.layer_curves import (
    CurvePanel,
    draw_drift_change,
    draw_layer_curves,
    draw_mean_drift,
    draw_running_drift,
    shaded_band,
)
from driftlens_reports.charts.theme import VariantPlotter
from tests.reports.charts.recording import axis_titles, data_values, drawn_values, finite, leaves, with_rows

BY_CURVE = {
    "layer-drift": ["drift_l2_mean", "drift_l2_q10+drift_l2_q90"],
    "decomposition": ["mismatch_l2_mean", "propagation_l2_mean", "cross_term"],
    "amplification": ["amplification", "random_gain_mean", "lower+upper"],
}
BY_PANEL = {"contributions-heatmap": ("variant", ["final_share+remainder_share"])}
every_chart = pytest.mark.parametrize("name", [*BY_CURVE, *BY_PANEL])


def table(run: DriftRun) -> pd.DataFrame:
    rows = run.layers()
    rows = rows[~rows["variant"].isin(["base", "baseline:featcal-anchor"])]
    spread = rows["amplification"] * rows["jacobian_error"]
    return rows.assign(lower=rows["amplification"] - spread, upper=rows["amplification"] + spread)


def expected(name: str, run: DriftRun) -> Iterator[list[float]]:
    """The values of every trace, computed from the table by another way than the chart's; the head has its own."""
    keys, columns = (["task", "variant"], BY_CURVE[name]) if name in BY_CURVE else BY_PANEL[name]
    for _, rows in table(run).groupby(keys):
        for together in columns:
            is_apart = rows["role"].eq("head") & (name in BY_CURVE) & (together != "cross_term")
            for part in (rows[~is_apart], rows[is_apart]):
                # A band of a single layer has both ends twice.
                both = 2 if "+" in together and len(part) == 1 else 1
                yield finite(np.concatenate([part[column] for column in together.split("+")] * both))


@every_chart
def test_every_trace_draws_the_numbers_of_the_table(name: str, full: DriftRun) -> None:
    drawn = charts[name].draw(full, ChartOptions())
    found = sorted(values for trace in drawn.figure.data if (values := drawn_values(trace)))
    wanted = sorted(values for values in expected(name, full) if values)
    assert len(found) == len(wanted)
    for values, reference in zip(found, wanted, strict=True):
        # Band edges of the amplification are computed in another order here.
        assert values == (pytest.approx(reference, rel=1e-12) if name == "amplification" else reference)
    assert set().union(*map(set, found)) <= data_values(drawn.data)


@every_chart
def test_the_notes_say_how_many_samples_of_which_split(name: str, full: DriftRun) -> None:
    assert charts[name].draw(full, ChartOptions()).notes[0] == "24 diagnosis samples per task."


@pytest.mark.parametrize("name", ["layer-drift", "amplification"])
def test_values_stand_at_their_layers(name: str, full: DriftRun) -> None:
    figure = charts[name].draw(full, ChartOptions(tasks=["mnist"], variants=["merged"])).figure
    column = BY_CURVE[name][0]
    rows = full.layers("mnist", "merged")
    values, last = dict(rows.set_index("layer")[column].dropna()), rows["layer"].max()
    drawn = {
        trace.yaxis: {x: y for x, y in zip(trace.x, trace.y, strict=True) if y is not None}
        for trace in figure.data
        if trace.legendgroup == "merged" and trace.fill is None
    }
    assert drawn == {"y": {x: y for x, y in values.items() if x != last}, "y1001": {last: values[last]}}


@pytest.mark.parametrize("name", ["layer-drift", "decomposition", "amplification"])
def test_no_line_joins_the_head_with_layers_of_other_units(name: str, full: DriftRun) -> None:
    figure = charts[name].draw(full, ChartOptions()).figure
    last, layout = full.manifest.layers[-1].index, figure.layout
    for trace in figure.data:
        axis = layout[f"yaxis{trace.yaxis[1:]}"]
        if trace.yaxis.removeprefix("y") in ("", "2") or axis.side == "right":
            assert ({round(x) for x in trace.x if x is not None} == {last}) == (axis.side == "right"), trace.name
    for axis in figure.select_yaxes(selector={"side": "right"}):
        assert axis.tickmode == "auto" and layout[f"yaxis{axis.overlaying[1:]}"].anchor == axis.anchor
    assert last - 0.5 in {shape.x0 for shape in layout.shapes}


def test_the_head_alone_has_the_left_axis(single: DriftRun) -> None:
    figure = charts["layer-drift"].draw(single, ChartOptions()).figure
    last = single.layers()["layer"].max()
    rows = single.layers()[single.layers()["layer"] == last]
    one = draw_layer_curves(single, rows, CurvePanel("drift_l2_mean", "drift", splits_head=True), dark=False)
    assert {trace.yaxis for trace in one.data} == {"y"} and not one.layout.shapes
    assert figure.data


def test_every_mark_of_amplification_is_in_the_legend(full: DriftRun) -> None:
    figure = charts["amplification"].draw(full, ChartOptions()).figure
    marks = {
        trace.marker.symbol.removesuffix("-open") != trace.marker.symbol: trace
        for trace in figure.data
        if trace.showlegend
    }
    assert {*marks} == {False, True} and marks[True].name == "random gain (open)"


def test_cells_stand_at_their_task_and_layer(full: DriftRun) -> None:
    options = ChartOptions(variants=["merged"])
    figure = charts["contributions-heatmap"].draw(full, options).figure
    cells, axis = figure.data[0], figure.layout.yaxis
    for at, task in enumerate(axis.ticktext):
        *shares, rest = zip(cells.x, cells.z[at], strict=True)
        for layer, value in shares:
            assert value == full.value("final_share", task=task, variant="merged", layer=int(layer))
        last = full.manifest.layers[-1].index
        remainder = full.value("remainder_share", task=task, variant="merged", layer=last)
        assert rest == (last + 1, remainder)
    assert list(axis.tickvals) == list(cells.y) == [0, 1, 2] and axis.range[0] > axis.range[1], "first task on top"


def test_layers_without_rows_are_gaps(single: DriftRun) -> None:
    options = ChartOptions(variants=["merged"])
    drawn = charts["contributions-heatmap"].draw(single, options)
    cells = drawn.figure.data[0]
    assert list(cells.x) == [1, 2, 3, 4] and list(np.isnan(cells.z[0])) == [True, True, False, False]
    assert drawn.notes[-1].startswith("2 cells in the background's colour")


def test_compared_panels_have_one_scale(full: DriftRun) -> None:
    figure = charts["contributions-heatmap"].draw(full, ChartOptions()).figure
    cells = [trace for trace in figure.data if isinstance(trace, go.Heatmap)]
    assert len(cells) == 2 and {trace.coloraxis for trace in cells} == {"coloraxis"}
    assert all(trace.zmin is None and trace.zmax is None for trace in cells)
    values = [value for trace in cells for value in finite(trace.z)]
    assert figure.layout.coloraxis.cmin <= min(values) and max(values) <= figure.layout.coloraxis.cmax


def test_the_scale_of_signed_shares_has_zero_in_its_middle(full: DriftRun) -> None:
    axis = charts["contributions-heatmap"].draw(full, ChartOptions()).figure.layout.coloraxis
    assert axis.cmin == -axis.cmax


def test_relative_drift_is_its_own_column_without_a_band(full: DriftRun) -> None:
    drawn = charts["layer-drift"].draw(full, ChartOptions(relative=True))
    assert {"relative drift", "n"} <= set(drawn.data) and "mean drift" not in drawn.data
    assert sorted(finite(drawn.data["relative drift"])) == finite(table(full)["drift_rel"])
    assert all(trace.fill is None for trace in drawn.figure.data) and "without a band" in drawn.notes[-1]
    assert drawn.figure.layout.yaxis.title.text == "drift / expert norm (ratio)"


def test_the_base_is_drawn_only_when_it_is_named(full: DriftRun) -> None:
    assert "base" not in set(charts["layer-drift"].draw(full, ChartOptions()).data["variant"])
    named = charts["layer-drift"].draw(full, ChartOptions(variants=["base"])).data
    assert set(named["variant"]) == {"base"}


def test_what_was_not_measured_is_named_with_the_command_that_adds_it(unmeasured: DriftRun) -> None:
    reason = charts["contributions-heatmap"].missing(unmeasured, ChartOptions())
    assert reason and "final_share of table layers" in reason and "`driftlens analyze RUN`" in reason


def rows_of(**columns: list[float]) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    keys = {"task": "cars", "variant": "merged", "role": "block", "path": "p", "where": "p (layer 1 of 4)"}
    return pd.DataFrame({**columns, "layer": range(1, size + 1)}).assign(**keys)


BRUSH = VariantPlotter({"merged": "merged"}, dark=False)


def test_a_null_is_a_gap() -> None:
    rows = rows_of(mean=[1.0, math.nan, 3.0])
    [trace] = CurvePanel("mean", "drift").traces(rows, BRUSH, opacity=0.1)
    assert list(trace["y"]) == [1.0, None, 3.0] and trace["connectgaps"] is False


def test_a_band_stops_at_a_gap() -> None:
    rows = rows_of(low=[1.0, 2.0, math.nan, 4.0], high=[5.0, 6.0, 7.0, 8.0])
    trace = shaded_band(rows, "low", "high", BRUSH, opacity=0.1)
    assert list(trace["y"]) == [1, 2, 6, 5, None, 4, 4, 8, 8]
    assert list(trace["x"])[:5] == [1, 2, 2, 1, None] and 3 not in trace["x"]
    assert min(trace["x"][5:]) < 4 < max(trace["x"][5:]), "a band of one layer has a width"


def test_an_encoders_curve_ends_where_the_decoders_begins(full: DriftRun) -> None:
    """Their features are pooled from other tokens, so a line from one to the other would mean nothing."""
    rows = full.layers(variant="merged", task=full.tasks[0]).reset_index(drop=True)
    last = rows["layer"].max()
    streams = rows["layer"].le(last - 2).map({True: "encoder", False: "hidden"})
    kind = CurvePanel("drift_l2_mean", "drift")
    [trace] = draw_layer_curves(full, rows.assign(stream=streams), kind, dark=False).data
    assert [place for place, value in zip(trace.x, trace.y, strict=True) if value is None] == [last - 2]
    assert finite(trace.y) == rows["drift_l2_mean"].tolist()
    figure = draw_layer_curves(full, rows.assign(stream=streams), kind, dark=False)
    assert [shape.x0 for shape in figure.layout.shapes] == [last - 1.5]
    for streams in (rows["layer"].map(lambda _: "hidden"), rows["layer"].map(lambda _: None)):
        figure = draw_layer_curves(full, rows.assign(stream=streams), kind, dark=False)
        assert len(figure.data[0].x) == len(rows) and not figure.layout.shapes
    layers = full.layers()
    streams = layers["layer"].le(3).map({True: "encoder", False: "hidden"})
    two = with_rows(full, "layers", layers.assign(stream=streams))
    for name in ("contributions-heatmap", "layer-drift"):
        figure = charts[name].draw(two, ChartOptions()).figure
        assert 3.5 in [shape.x0 for shape in figure.layout.shapes], name
        assert "4 decoder's first" in str(figure.to_dict()), name


def test_hover_texts_and_sentences_call_a_layer_by_its_block(full: DriftRun) -> None:
    drawn = charts["layer-drift"].draw(full, ChartOptions())
    curves = [trace for trace in drawn.figure.data if trace.text is not None and len(trace.text) > 1]
    last = full.manifest.layers[-1].index
    assert curves and all(f"block 0 (layer 2 of {last})" in trace.text[1] for trace in curves)
    assert f"(layer {last} of {last}), on " in drawn.alt


@pytest.mark.slow
def test_in_a_narrow_window_panels_stand_below_one_another(full: DriftRun) -> None:
    wide = charts["layer-drift"].draw(full, ChartOptions()).figure
    with panels.stack_panels():
        narrow = charts["layer-drift"].draw(full, ChartOptions()).figure
        kinds = charts["decomposition"].draw(full, ChartOptions()).figure
    ends = [{axis.domain for axis in figure.select_xaxes()} for figure in (wide, narrow, kinds)]
    assert len(ends[0]) > 1 == len(ends[1]) and narrow.layout.height > wide.layout.height
    titles = [axis.title.text for axis in kinds.select_yaxes() if axis.side != "right"]
    assert len(ends[2]) == 1 and titles == titles[:3] * len(full.tasks), "each panel has the title of its kind"
    assert {axis.matches for axis in kinds.select_yaxes()} == {None, "y", "y3", "y1001"}
    lined = {shape.yref for shape in kinds.layout.shapes if shape.y0 == shape.y1 == 0}
    assert lined == {f"y{3 * at}" for at in range(1, len(full.tasks) + 1)}, "cross terms alone have a zero line"
    again = charts["layer-drift"].draw(full, ChartOptions()).figure
    assert again.layout.height == wide.layout.height


FOUND = {3: 0.75, 2: 0.5}


def test_it_draws_the_merged_models_means_and_what_was_found_so_far(full: DriftRun) -> None:
    drawn = draw_running_drift(full, "new", FOUND, dark=False)
    merged, head, new = drawn.figure.data
    means = full.layers(variant="merged").groupby("layer")["drift_l2_mean"].mean()
    assert [*merged.x, *head.x] == means.index.tolist() and [*merged.y, *head.y] == means.tolist()
    assert list(new.x) == [2, 3] and list(new.y) == [0.5, 0.75]
    rows = drawn.data
    assert rows["variant"].tolist() == ["merged"] * len(means) + ["calibrated:new"] * 2
    assert sorted(rows["mean drift"]) == sorted(value for t in drawn.figure.data for value in drawn_values(t))


def test_its_words_are_its_numbers(full: DriftRun) -> None:
    drawn = draw_running_drift(full, "new", FOUND, dark=False)
    merged = full.layers(variant="merged", layer=3)["drift_l2_mean"].mean()
    layers = len(full.manifest.layers)
    assert (
        f"2 layers of {layers} so far; at block 1 (layer 3 of 6): calibrated {format_number(0.75)}"
        in drawn.alt.replace("\u202f", " ")
    )
    assert f"merged {format_number(merged)}." in drawn.alt
    assert axis_titles(drawn.figure, "y") == ["mean L2 drift (feature units)", "head (feature units)"]
    assert "No layer is calibrated yet." in draw_running_drift(full, "new", {}, dark=False).alt


def test_its_theme_is_that_of_the_other_charts(full: DriftRun) -> None:
    light, dark = (leaves(draw_running_drift(full, "new", FOUND, dark=dark).figure) for dark in (False, True))
    assert light.keys() == dark.keys() and light != dark
    other = charts["layer-drift"].draw(full, ChartOptions())
    lines = {trace.legendgroup: trace.line for trace in other.figure.data if trace.showlegend}
    running = draw_running_drift(full, "featcal", FOUND, dark=False).figure.data
    for trace in running:
        assert (trace.line.color, trace.line.dash) == (
            lines[trace.legendgroup].color,
            lines[trace.legendgroup].dash,
        )


@pytest.mark.parametrize("name", ["<b>", "$x$ %{y}"])
def test_a_name_is_shown_and_not_obeyed(full: DriftRun, name: str) -> None:
    shown = draw_running_drift(full, name, FOUND, dark=False).figure.data[-1].name
    assert "<" not in shown and "$" not in shown and "%" not in shown


def test_the_mean_over_tasks_is_thick_each_task_thin_and_the_control_hides(full: DriftRun) -> None:
    task = full.tasks[0]
    drawn = draw_mean_drift(full, ChartOptions(tasks=[task]))
    rows = full.layers()
    values = rows.pivot_table(index=["variant", "layer"], columns="task", values="drift_l2_mean")
    thick: dict[str, list[float]] = {}
    for trace in drawn.figure.data:
        if trace.mode == "lines+markers":
            thick.setdefault(str(trace.legendgroup), []).extend(trace.y)
    assert {*thick} == {"merged", "calibrated:featcal"}
    for variant, drifts in thick.items():
        assert drifts == pytest.approx(values.loc[variant].mean(axis=1).tolist())
    thin = [trace for trace in drawn.figure.data if trace.customdata is not None]
    drawn_of: dict[Any, list[float]] = {}
    for trace in thin:
        for name, points in itertools.groupby(zip(trace.customdata, trace.y, strict=True), lambda at: at[0]):
            drawn_of.setdefault((trace.legendgroup, name), []).extend(
                value for _, value in points if value is not None
            )
            assert (trace.line.width, trace.opacity) == ((1.5, 1.0) if name == task else (0.75, 0.45))
    assert drawn_of.keys() == {*itertools.product(thick, full.tasks)}
    for (variant, name), points in drawn_of.items():
        assert points == pytest.approx(values.loc[variant][name].tolist())


ONE = ChartOptions(tasks=["mnist"], variants=["merged"])


@pytest.fixture(scope="module")
def sampled(full: DriftRun) -> DriftRun:
    """The full run with an interval around every share, wider above than below."""
    rows = full.layers()
    rows["final_share_low"] = rows["final_share"] - 0.01 * rows["layer"]
    rows["final_share_high"] = rows["final_share"] + 0.02 * rows["layer"]
    return with_rows(full, "layers", rows)


def written(low: float, high: float) -> str:
    return f"<br>95 % interval: {format_percent(low)} to {format_percent(high)}".replace("%", "&#37;")


def test_cells_tell_their_interval_when_hovered(sampled: DriftRun) -> None:
    cells = charts["contributions-heatmap"].draw(sampled, ONE).figure.data[0]
    rows = sampled.layers("mnist", "merged")
    ends = zip(rows["final_share_low"], rows["final_share_high"], strict=True)
    assert list(cells.hovertext[0]) == [*(written(*pair) for pair in ends), ""], "and the remainder has none"
    assert "%{hovertext}" in cells.hovertemplate


def test_a_run_of_an_older_schema_is_drawn_without(full: DriftRun) -> None:
    drawn = charts["contributions-heatmap"].draw(full, ChartOptions())
    assert "interval" not in drawn.figure.to_json() and not any("interval" in note for note in drawn.notes)
    assert not [column for column in drawn.data if column.endswith((" low", " high"))]
    for trace in drawn.figure.data:
        assert trace.type != "bar" or (trace.error_x.array is None and trace.error_y.array is None)


def test_a_logarithmic_axis_is_logarithmic_in_every_panel(full: DriftRun) -> None:
    for name in ("layer-drift", "amplification"):
        figure = charts[name].draw(full, ChartOptions(log=True)).figure
        assert {axis.type for axis in figure.select_yaxes()} == {"log"}


def test_a_change_at_the_head_is_drawn_from_zero_like_those_of_other_layers(full: DriftRun) -> None:
    figure = draw_drift_change(compare(full, before="merged", after="calibrated:featcal"), dark=False).figure
    heads = [axis for axis in figure.select_yaxes() if axis.side == "right"]
    assert heads and all(axis.rangemode == "tozero" for axis in heads)
