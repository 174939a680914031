"""Layers, Samples: every part of each page, and what its controls change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.runs.run import open_run
from driftlens_reports.charts.chart import SECTIONS, ChartOptions, chart_names_by_heading, charts
from tests.app.conftest import Open, open_sections
from tests.app.pages import said
from tests.quick import few
from tests.runs.full_run import Size, write_full_run

PARTS = [
    (view, key, part, names)
    for view, key in (
        ("layers", "layers"),
        ("samples", "part"),
    )
    for part, names in chart_names_by_heading(view).items()
    if (view, part) != ("samples", "Explore")  # which draws none
]
TITLES = {entry.title for entry in charts.values()}


def opened_at(app: AppTest, key: str, part: str) -> AppTest:
    """The page with one of its parts open."""
    app.radio(key=key).set_value(part).run()
    return app


@pytest.mark.parametrize("view", few(["layers", "samples"], ["layers"]))
def test_a_run_of_odd_names_is_drawn_and_not_obeyed(open_app: Open, tmp_path: Path, view: str) -> None:
    write_full_run(tmp_path / "odd", tasks=["**a** <b>", "$x$ %{y}"], class_names=["<i>", "[c](d)", "_e_"])
    app = open_app(tmp_path, view)
    assert not app.error
    texts = [element.value for kind in ("caption", "header", "info") for element in getattr(app, kind)]
    assert not [text for text in texts if "**a** <b>" in text]


@pytest.mark.slow
def test_what_a_run_lacks_is_a_sentence_with_a_way_to_have_it(open_app: Open, tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "bare", size=Size(blocks=1))
    (path / "tables" / "params.parquet").unlink()
    # A table that was never written is not listed either.
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if "params" not in name}
    (path / "manifest.json").write_text(json.dumps(manifest))
    app = opened_at(open_app(tmp_path, "layers"), "layers", "Task-vector alignment")
    assert not app.error and "driftlens analyze" in said(app)


@pytest.mark.slow
def test_every_part_draws_its_charts_and_none_stands_twice(open_app: Open, root: Path) -> None:
    """Neither under its title nor, under another one, with the same lines that a legend names, or the same cells."""
    places: dict[str, str] = {}
    views = [(view, {key: part}, names) for view, key, part, names in PARTS]
    views += [(view, {}, ()) for view in ("overview", "repair")]
    views += [("repair", {"repair": "Compare"}, ())]
    run = open_run(root / "full")
    for view, query, names in views:
        app = open_app(root, view, **query)
        closed = open_sections(app)
        assert not app.error and not app.exception, (view, query)
        figures = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
        headings = [title.replace("\\", "") for title in (*(element.value for element in app.header), *closed)]
        assert headings[: len(names)] == [charts[name].title for name in names], (view, query)
        if names:
            assert len(figures) == sum(charts[name].missing(run, ChartOptions()) is None for name in names)
        assert figures, view
        drawn = {trace for figure in figures for trace in told(figure)} | {*headings} & TITLES
        again = [f"{places[what]} shows {what[:200]}" for what in drawn if what in places]
        if view == "overview":  # its field of cells leads to that of the layers
            [cells] = again
            again = [] if cells.startswith(f"layers {{'layers': '{SECTIONS['contributions'].part}'}}") else again
        if (view, query) == ("repair", {}):  # the picture of Overview, for one repair
            again = [text for text in again if not text.startswith("overview")]
        assert not again, f"{view} {query}"
        places |= dict.fromkeys(drawn, f"{view} {query}")


def told(figure: Any) -> set[str]:
    """The traces of a figure that its legend names, and its fields of cells, by their numbers."""
    named = [trace for trace in figure["data"] if "z" in trace or trace.get("showlegend")]
    return {json.dumps([trace.get(name) for name in ("x", "y", "z", "marker")]) for trace in named}
