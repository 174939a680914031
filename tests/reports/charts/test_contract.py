"""What every registered chart owes its reader, whoever wrote it."""

from __future__ import annotations

import re

import pytest

from driftlens.base.errors import DataError, DriftLensError
from driftlens.base.variants import control_of
from driftlens.findings.reading import error, number, percent
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES
from driftlens_reports.charts.chart import SECTIONS, ChartOptions, Drawn, charts, parts_of
from driftlens_reports.sections import PRESETS, TITLES
from tests.reports.charts.recording import NUMBER, axis_titles, data_values, leaves, shown_texts

every_chart = pytest.mark.parametrize("name", list(charts))


_DRAWN: dict[tuple[str, str, str], Drawn] = {}


def drawn(name: str, run: DriftRun, options: ChartOptions | None = None) -> Drawn:
    """The chart, drawn once for all tests, or a skip that repeats why this run has none."""
    key = (name, str(run.path), repr(options))
    if key not in _DRAWN:
        reason = charts[name].missing(run, options or ChartOptions())
        if reason is not None:
            pytest.skip(reason)
        _DRAWN[key] = charts[name].draw(run, options)
    return _DRAWN[key]


@every_chart
def test_its_words_are_whole_sentences(name: str) -> None:
    chart = charts[name]
    assert chart.caption.endswith(".") and ". " not in chart.caption, "a caption is one sentence"
    assert re.search("samples?|split|site|task vector", chart.caption), "a caption says what was measured on"
    assert chart.hint.endswith(".") and chart.title[0].isupper()


@every_chart
def test_it_stands_somewhere_and_names_columns_that_there_are(name: str) -> None:
    chart = charts[name]
    assert chart.place.report in TITLES and set(chart.presets) <= {*PRESETS} - {"full"}
    table, columns = chart.needs
    assert columns and set(columns) <= set(TABLES[table].names)
    if chart.place.page:
        assert name in parts_of(chart.place.page)[chart.place.part]


def test_no_two_sections_are_one_part_of_a_page() -> None:
    parts = [(place.page, place.part) for place in SECTIONS.values() if place.page]
    assert len(parts) == len(set(parts))


@every_chart
def test_axes_have_titles_with_units(name: str, full: DriftRun) -> None:
    figure = drawn(name, full).figure
    for letter in "xy":
        titles = axis_titles(figure, letter)
        assert titles and all(re.search(r"\(.+\)", title) for title in titles), titles


@every_chart
def test_the_alt_text_is_made_of_numbers_in_the_data(name: str, full: DriftRun) -> None:
    chart = drawn(name, full)
    writings = {write(value) for value in data_values(chart.data) for write in (number, percent, error)}
    said = NUMBER.findall(chart.alt)
    # The intervals over samples that its sentence tells are not what its whiskers show.
    assert set(said) <= writings or (name == "task-cosine" and set(said) & writings), chart.alt
    assert re.search(r"\d", chart.alt) and chart.alt.endswith(".") and "nan" not in chart.alt


@every_chart
def test_the_data_key_keeps_the_zoom(name: str, full: DriftRun) -> None:
    light, dark = drawn(name, full).figure, drawn(name, full, ChartOptions(dark=True)).figure
    assert light.layout.uirevision and light.layout.uirevision == dark.layout.uirevision


@every_chart
def test_the_dark_theme_changes_colours_only(name: str, full: DriftRun) -> None:
    light = leaves(drawn(name, full).figure)
    dark = leaves(drawn(name, full, ChartOptions(dark=True)).figure)
    assert light.keys() == dark.keys()
    changed = {path: (light[path], dark[path]) for path in light if light[path] != dark[path]}
    assert any(path.endswith("paper_bgcolor") for path in changed)
    assert all(str(value).startswith(("#", "rgba(")) for pair in changed.values() for value in pair), changed


@every_chart
def test_drawing_twice_gives_the_same_figure(name: str, full: DriftRun) -> None:
    first = drawn(name, full).figure
    assert charts[name].draw(full).figure.to_json() == first.to_json()


@every_chart
def test_names_stay_literal(name: str, hostile: DriftRun) -> None:
    texts = shown_texts(drawn(name, hostile).figure)
    for text in texts:
        assert "<script" not in text and "<i>" not in text and "<b>bold" not in text, text
        assert "%{hostile" not in text and not re.search(r"\$.*\$", text), text
    if any("script" in text for text in texts):
        assert any("&lt;script&gt;alert(1)&lt;/script&gt;" in text for text in texts)


@every_chart
def test_the_control_stands_beside_the_calibrated_variant(name: str, full: DriftRun) -> None:
    data = drawn(name, full, ChartOptions(variants=["merged", "calibrated:featcal"])).data
    if "variant" not in data:
        pytest.skip("its rows are of no variant")
    there = set(data["variant"])
    assert "calibrated:featcal" not in there or control_of("featcal") in there


@every_chart
@pytest.mark.parametrize("kind", ["single", "uncalibrated", "crowded", "unmeasured"])
def test_it_draws_or_says_what_is_missing(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    run: DriftRun = request.getfixturevalue(kind)
    reason = charts[name].missing(run, ChartOptions())
    if reason is None:
        chart = charts[name].draw(run)
        assert len(chart.data) and len(chart.figure.data)
    else:
        assert "`driftlens " in reason or "label" in reason, reason
        with pytest.raises(DataError, match=re.escape(reason)):
            charts[name].draw(run)


@every_chart
@pytest.mark.parametrize("kind", ["task", "variant"])
def test_an_unknown_name_is_an_error_that_names_those_there_are(name: str, kind: str, full: DriftRun) -> None:
    if kind not in drawn(name, full).data:
        pytest.skip(f"its rows are of no {kind}")
    options = ChartOptions(tasks=["moon"]) if kind == "task" else ChartOptions(variants=["calibrated:moon"])
    with pytest.raises(DriftLensError, match=r"moon.*it has .*(cars|merged)"):
        charts[name].draw(full, options)
