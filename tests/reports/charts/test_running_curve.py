"""The curve of a calibration that runs: whose numbers it draws, and that it looks as it will when it is done."""

from __future__ import annotations

import pytest

from driftlens.base.variants import is_control
from driftlens.findings.reading import number
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.page_curves import left_curves, mean_curves, running_curve
from tests.reports.charts.recording import axis_titles, drawn_values, leaves

FOUND = {3: 0.75, 2: 0.5}


def test_it_draws_the_merged_models_means_and_what_was_found_so_far(full: DriftRun) -> None:
    drawn = running_curve(full, "new", FOUND, dark=False)
    merged, new = drawn.figure.data
    means = full.layers(variant="merged").groupby("layer")["drift_l2_mean"].mean()
    assert list(merged.x) == means.index.tolist() and list(merged.y) == means.tolist()
    assert list(new.x) == [2, 3] and list(new.y) == [0.5, 0.75]
    rows = drawn.data
    assert rows["variant"].tolist() == ["merged"] * len(means) + ["calibrated:new"] * 2
    assert sorted(rows["mean drift"]) == sorted(value for t in drawn.figure.data for value in drawn_values(t))


def test_its_words_are_its_numbers(full: DriftRun) -> None:
    drawn = running_curve(full, "new", FOUND, dark=False)
    merged = full.layers(variant="merged", layer=3)["drift_l2_mean"].mean()
    layers = len(full.manifest.layers)
    assert (
        f"2 layers of {layers} so far; at block 1 (layer 3 of 6): calibrated {number(0.75)}"
        in drawn.alt.replace("\u202f", " ")
    )
    assert f"merged {number(merged)}." in drawn.alt
    assert axis_titles(drawn.figure, "y") == ["mean L2 drift (feature units)"]
    assert "No layer is calibrated yet." in running_curve(full, "new", {}, dark=False).alt


def test_its_theme_is_that_of_the_other_charts(full: DriftRun) -> None:
    light, dark = (leaves(running_curve(full, "new", FOUND, dark=dark).figure) for dark in (False, True))
    assert light.keys() == dark.keys() and light != dark
    other = charts["layer-drift"].draw(full, ChartOptions())
    lines = {trace.legendgroup: trace.line for trace in other.figure.data if trace.showlegend}
    running = running_curve(full, "featcal", FOUND, dark=False).figure.data
    for trace in running:
        assert (trace.line.color, trace.line.dash) == (
            lines[trace.legendgroup].color,
            lines[trace.legendgroup].dash,
        )


@pytest.mark.parametrize("name", ["<b>", "$x$ %{y}"])
def test_a_name_is_shown_and_not_obeyed(full: DriftRun, name: str) -> None:
    shown = running_curve(full, name, FOUND, dark=False).figure.data[1].name
    assert "<" not in shown and "$" not in shown and "%" not in shown


def test_the_mean_over_tasks_is_thick_each_task_thin_and_the_control_waits(full: DriftRun) -> None:
    task = full.tasks[0]
    drawn = mean_curves(full, ChartOptions(tasks=[task]))
    rows = full.layers()
    values = rows.pivot_table(index=["variant", "layer"], columns="task", values="drift_l2_mean")
    thick = {str(trace.legendgroup): trace for trace in drawn.figure.data if trace.showlegend}
    assert {*thick} == {*full.variants} - {"base"}
    for variant, trace in thick.items():
        assert [*trace.y] == pytest.approx(values.loc[variant].mean(axis=1).tolist())
        waits = is_control(variant)
        assert (trace.visible == "legendonly", trace.line.dash == "dot") == (waits, waits)
    thin = [trace for trace in drawn.figure.data if not trace.showlegend and trace.hovertemplate]
    assert len(thin) == len(full.tasks) * len(thick)
    for trace in thin:
        (name,) = (name for name in full.tasks if trace.hovertemplate.startswith(f"{name}, "))
        assert [*trace.y] == pytest.approx(values.loc[str(trace.legendgroup)][name].tolist())
        is_chosen = name == task
        assert (trace.line.width, trace.opacity) == ((1.5, 1.0) if is_chosen else (0.75, 0.45))


def test_what_a_repair_leaves_is_a_share_of_the_merged_models_drift(full: DriftRun) -> None:
    drawn = left_curves(full, "featcal", dark=False)
    rows = full.layers().pivot_table(index=["layer", "task"], columns="variant", values="drift_l2_mean")
    shares = (rows["calibrated:featcal"] / rows["merged"]).groupby("layer").mean()
    (line,) = (t for t in drawn.figure.data if t.showlegend and t.legendgroup == "calibrated:featcal")
    assert [*line.y] == pytest.approx(shares.tolist())
    assert (
        "% of the merged model's" in axis_titles(drawn.figure, "y")[0]
        and "100 % is as merged" in drawn.notes[0]
    )
