"""Charts by name, for notebooks."""

from __future__ import annotations

import inspect

import pytest

import driftlens as dl
from driftlens.records.run import DriftRun
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.charts.plots import Plots


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
        assert "application/vnd.plotly.v1+json" in drawn._repr_mimebundle_()


def test_a_name_that_is_none_is_an_attribute_error_with_the_nearest(full: DriftRun) -> None:
    with pytest.raises(AttributeError, match="layer_drift"):
        _ = Plots(full).layer_drifts
    with pytest.raises(TypeError, match="task"):
        Plots(full).layer_drift(task="cars")
