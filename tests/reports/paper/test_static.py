"""Charts drawn without a script: every mark where its number is, gaps left open, what does not fit left out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from driftlens.runs.run import DriftRun
from driftlens_reports.charts import theme
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.panels import panel_grid
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.paper.marks import number, plain
from driftlens_reports.paper.static import MOST_PANELS, draw_static
from driftlens_reports.paper.style import PAGE, PAGE_WIDTH, sheet
from tests.quick import few
from tests.reports.paper.drawn import bands, bars, images, line_points, lines, segments, words


@pytest.fixture(autouse=True)
def page() -> Iterator[None]:
    with sheet(PAGE):
        yield


def themed(*traces: object, **layout: object) -> go.Figure:
    return theme.themed(*traces, dark=False, height=300).update_layout(layout)


def drawn(chart: go.Figure) -> Figure:
    return draw_static(chart, PAGE_WIDTH)


def only(chart: go.Figure) -> Axes:
    (axes,) = drawn(chart).axes
    return axes


def test_a_line_goes_through_its_points_and_stops_at_gaps() -> None:
    axes = only(themed(go.Scatter(x=[1, 2, 3, 4], y=[1.5, None, 2.5, 3.0], mode="lines+markers")))
    (line,) = lines(axes)
    assert line_points(line).tolist() == [[1, 1.5], [3, 2.5], [4, 3.0]]
    assert np.isnan(np.asarray(line.get_ydata(), float)).tolist() == [False, True, False, False]


def test_a_band_and_whiskers_end_where_their_numbers_are() -> None:
    band = go.Scatter(
        x=[1, 2, 2, 1, None, 4, 5, 5, 4],
        y=[0, 1, 3, 2, None, 5, 6, 8, 7],
        fill="toself",
        fillcolor="rgba(0,114,178,0.2)",
        mode="lines",
    )
    points = go.Scatter(x=[1.0], y=[2.0], mode="markers", error_y={"array": [0.5], "arrayminus": [0.25]})
    axes = only(themed(band, points))
    first, second = (corners[:4].tolist() for corners in bands(axes))
    assert first == [[1, 0], [2, 1], [2, 3], [1, 2]] and second == [[4, 5], [5, 6], [5, 8], [4, 7]]
    assert segments(axes)[0].tolist() == [[[1, 1.75], [1, 2.5]]]


@pytest.mark.parametrize("flat", [False, True], ids=["upright", "flat"])
def test_bars_stand_side_by_side_or_on_one_another(flat: bool) -> None:
    names, sizes = ["a", "b"], ([1.0, 2.0], [3.0, 4.0])
    traces = [
        go.Bar(
            x=size if flat else names,
            y=names if flat else size,
            orientation="h" if flat else "v",
            name=str(at),
        )
        for at, size in enumerate(sizes)
    ]
    grouped = bars(only(themed(*traces, barmode="group", bargap=0.2)))
    ends = [(bar.get_y(), bar.get_height()) if flat else (bar.get_x(), bar.get_width()) for bar in grouped]
    assert [start for start, _ in ends] == pytest.approx([-0.4, 0.6, 0.0, 1.0])
    assert [width for _, width in ends] == pytest.approx([0.4] * 4)
    stacked = bars(only(themed(*traces, barmode="stack")))
    starts = [bar.get_x() if flat else bar.get_y() for bar in stacked]
    assert starts == [0.0, 0.0, 1.0, 2.0]


def test_cells_have_their_numbers_and_gaps_stay_empty() -> None:
    values = [[0.0, math.nan], [0.5, 1.0]]
    shades = {"cmin": 0, "cmax": 1, "colorscale": list(LIGHT.sequential)}
    figure = drawn(themed(go.Heatmap(z=values, x=[1, 2], y=[0, 1], coloraxis="coloraxis"), coloraxis=shades))
    (cells,) = images(figure.axes[0])
    np.testing.assert_array_equal(cells, values)
    mesh = figure.axes[0].collections[0]
    ends = [to_hex(colour).upper() for colour in (mesh.to_rgba(0.0), mesh.to_rgba(1.0))]
    assert ends == [LIGHT.sequential[0], LIGHT.sequential[-1]]
    assert len(figure.axes) == 2  # the colour bar


def test_a_number_is_left_out_where_its_cell_has_no_room() -> None:
    chart = themed(
        go.Bar(x=[10.0, 0.01], y=[0, 1], orientation="h", text=["12.34", "56.78"], textposition="inside")
    )
    texts = {text.get_text(): text.get_visible() for text in only(chart).texts}
    assert texts == {"12.34": True, "56.78": False}


def test_the_numbers_of_cells_are_left_out_where_rows_are_as_narrow_as_their_letters() -> None:
    def visible(rows: int) -> set[bool]:
        values = np.full((rows, 2), 0.5)
        cells = go.Heatmap(z=values, x=[1, 2], y=[*range(rows)], coloraxis="coloraxis")
        said = {"text": ["0.500"] * rows, "textposition": "inside"}
        numbers = go.Bar(x=[1] * rows, base=0.5, y=[*range(rows)], width=1, orientation="h", **said)
        shades = {"cmin": 0, "cmax": 1, "colorscale": list(LIGHT.sequential)}
        axes = drawn(themed(cells, numbers, coloraxis=shades, height=260)).axes[0]
        return {text.get_visible() for text in axes.texts if text.get_text() == "0.500"}

    assert visible(4) == {True} and visible(30) == {False}


@pytest.mark.slow
def test_panels_share_a_scale_and_only_so_many_are_drawn() -> None:
    names = [f"panel {at}" for at in range(30)]
    grid = panel_grid(names, x_title="layer", y_titles=["drift"], dark=False)
    for at in range(30):
        grid.add(at, go.Scatter(x=[1, 2], y=[0, at], mode="lines"))
    figure = drawn(grid.figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == names[:MOST_PANELS]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert "12 of 30 panels are drawn" in words(figure)
    four = panel_grid(names[:4], x_title="layer", y_titles=["drift"], dark=False)
    for at in range(4):
        four.add(at, go.Scatter(x=[1, 2], y=[0, at], mode="lines"))
    columns = [
        len({round(axes.get_position().x0, 2) for axes in every.axes})
        for every in (figure, drawn(four.figure))
    ]
    assert columns == [3, 2], "rows of like length"
    few = panel_grid(names[:3], x_title="layer", y_titles=["drift"], dark=False)
    for at in range(3):
        few.add(at, go.Scatter(x=[1, 2], y=[0, at], mode="lines"))
    assert "panels are drawn" not in words(drawn(few.figure))
    assert drawn(few.figure).get_figheight() < figure.get_figheight()


def test_axes_are_those_of_the_chart() -> None:
    chart = themed(go.Scatter(x=[1, 10, 100], y=[0.2, 0.5, 0.9]))
    chart.update_xaxes(type="log").update_yaxes(rangemode="tozero", tickformat=".0~%", autorange="reversed")
    axes = only(chart)
    assert axes.get_xscale() == "log" and axes.get_ylim()[1] == 0.0
    assert "40 %" in [label.get_text() for label in axes.get_yticklabels()]


def test_an_axis_from_zero_still_shows_what_another_panel_has_below_it() -> None:
    grid = panel_grid(["below", "above"], x_title="layer", y_titles=["share"], dark=False)
    for at, sizes in enumerate(([-2.0, 1.0], [3.0, 4.0])):
        grid.add(at, go.Scatter(x=[1, 2], y=sizes, mode="lines"))
    grid.set_axes(x={}, y={"rangemode": "tozero"})
    below, above = drawn(grid.figure).axes
    assert below.get_ylim() == above.get_ylim() and below.get_ylim()[0] <= -2.0


def test_names_are_words_and_never_formulas_or_markup() -> None:
    chart = themed(go.Bar(x=["a &lt;b&gt; &#36;x&#36;"], y=[1.0]), title_text="")
    chart.update_yaxes(title_text="one<br>two")
    axes = only(chart)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a <b> $x$"]
    assert axes.get_ylabel() == "one\ntwo" == plain("one<br>two")
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.5, ".0~%", "50 %"),
        (0.125, ".1~%", "12.5 %"),
        (-0.0001, ".0~%", "0 %"),
        (-1.5, ".3~g", "−1.5"),
        (1234.5, ".3~g", "1234"),
        (0.0001, ".3~g", "0.0001"),
    ],
)
def test_numbers_are_written_as_on_the_screen(value: float, form: str, text: str) -> None:
    assert number(value, form) == text


@pytest.mark.parametrize(
    "name", few(sorted(charts), ["layer-drift", "contributions", "heatmap", "flips", "scatter"])
)
def test_every_chart_of_a_full_run_is_drawn_with_all_its_lines_and_bars(name: str, full: DriftRun) -> None:
    if charts[name].missing(full, ChartOptions()) is not None:
        pytest.skip("the run has no numbers for it")
    chart = charts[name].draw(full).figure
    figure = drawn(chart)
    shown = figure.axes
    points = sum(len(line_points(line)) for axes in shown for line in lines(axes))
    wanted = sum(
        not any(value is None or (isinstance(value, float) and math.isnan(value)) for value in point)
        for trace in chart.data
        if trace.type.startswith("scatter") and trace.fill != "toself"
        for point in zip(trace.x, trace.y, strict=True)
    )
    assert points == wanted
    assert sum(len(bars(axes)) for axes in shown) == sum(len(t.x) for t in chart.data if t.type == "bar")
