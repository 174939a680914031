"""Charts by name, for notebooks."""

from __future__ import annotations

import base64
import inspect

import pytest

import driftlens as dl
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, Plots, charts

PNG = b"\x89PNG"


def test_every_chart_is_there_by_name_and_says_what_it_is(full: DriftRun) -> None:
    plots = Plots(full)
    assert dir(plots) == [name.replace("-", "_") for name in charts]
    for name, chart in charts.items():
        draw = getattr(plots, name.replace("-", "_"))
        assert chart.caption in draw.__doc__ and chart.hint in draw.__doc__
        assert inspect.signature(draw) == inspect.signature(ChartOptions)


def test_what_is_drawn_is_the_chart_with_the_options_given(full: DriftRun) -> None:
    drawn = dl.open_run(full.path).plot.layer_drift(tasks=["cars"], relative=True)
    same = charts["layer-drift"].draw(full, ChartOptions(tasks=["cars"], relative=True))
    assert (
        drawn.figure == same.figure and drawn.data.equals(same.data) and set(drawn.data["task"]) == {"cars"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.io.renderers.default", "plotly_mimetype")
        said = repr(drawn)
        assert said.startswith(f"<Drawn: {drawn.alt[:30]}") and said.endswith(f" {len(drawn.data)} rows>")
        assert len(said) < 100 < len(drawn.alt)
        assert "application/vnd.plotly.v1+json" in drawn._repr_mimebundle_()
        patch.setattr("plotly.io.renderers.default", "")
        still = drawn._repr_mimebundle_()
        assert base64.b64decode(still["image/png"]).startswith(PNG), "a picture where nothing can draw"


def test_what_a_notebook_is_handed_shows_itself(full: DriftRun) -> None:
    assert dl.project(full, "cars")._repr_png_().startswith(PNG)
    figure, table = dl.paper.figure("decomposition", full), dl.paper.table("drift", full)
    assert repr(figure).startswith(f"<Artifact decomposition of {full.id}, ") and len(repr(figure)) < 100
    assert (figure._repr_png_() or b"").startswith(PNG) and figure._repr_html_() is None
    assert table._repr_png_() is None and "<table" in (table._repr_html_() or "")
    page = dl.Report(full, "summary")._repr_html_()
    assert page.startswith("<iframe srcdoc=") and page.count('"') == 8, "nothing of the page ends its frame"


def test_checks_and_comparisons_are_tables_of_what_they_hold(full: DriftRun) -> None:
    report = dl.check(full, {"checks": [{"metric": "cos_mean", "gte": 2.0, "name": "<b>too much"}]})
    shown = report._repr_html_()
    assert "<td>fail</td>" in shown and "&lt;b&gt;too much" in shown and "<td>≥ 2</td>" in shown
    found = dl.compare(full)
    shown = found._repr_html_()
    for row in found.tasks.to_dict("records"):
        assert f"<td>{row['task']}</td>" in shown and f"<td>{row['score_change']:.3g}</td>" in shown


def test_a_name_that_is_none_is_an_attribute_error_with_the_nearest(full: DriftRun) -> None:
    with pytest.raises(AttributeError, match="layer_drift"):
        _ = Plots(full).layer_drifts
    with pytest.raises(TypeError, match="task"):
        Plots(full).layer_drift(task="cars")
