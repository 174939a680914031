"""What every registered chart owes its reader, whoever wrote it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np
import pytest
from plotly.colors import sample_colorscale

from driftlens.calibration.calibrator import calibrators
from driftlens.results.formatting import format_error, format_number, format_percent
from driftlens.results.measures import OUTCOMES
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import TABLES
from driftlens.utils.errors import DataError, DriftLensError
from driftlens.utils.variants import Part
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart_names_by_heading, charts
from driftlens_reports.charts.panels import layer_axis_settings, layer_axis_title, title_with_unit
from driftlens_reports.charts.picking import chosen_tasks, chosen_variants, layer_rows, missing_data_message
from driftlens_reports.charts.theme import DARK, LIGHT, Palette, colour_role, variant_style
from driftlens_reports.charts.words import escape_plotly, escaped_label
from driftlens_reports.sections import PRESETS, TITLES
from tests.quick import few
from tests.reports.charts.recording import (
    NUMBER,
    XYZ,
    Array,
    axis_titles,
    contrast,
    data_values,
    leaves,
    linear,
    shown_texts,
    with_rows,
)

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
    first, *others = chart.caption.split(". ")
    assert chart.caption.endswith(".") and len(others) < 2, "a caption is one sentence or two"
    assert len(first) < 140, "the first one fits on a line next to the sidebar"
    assert re.search("samples?|split|site|task vector", chart.caption), "a caption says what was measured on"
    assert chart.hint.endswith(".") and chart.title[0].isupper()


@every_chart
def test_it_stands_somewhere_and_names_columns_that_there_are(name: str) -> None:
    chart = charts[name]
    assert chart.place.report in TITLES and set(chart.presets) <= {*PRESETS} - {"full"}
    table, columns = chart.needs
    assert columns and set(columns) <= set(TABLES[table].names)
    if chart.place.page:
        assert name in chart_names_by_heading(chart.place.page)[chart.place.part]


NAMES = ("task", "variant", "module group", "group of modules", "site")
"""What has names and no unit; nor has a cosine."""


@pytest.mark.slow
@every_chart
def test_axes_have_titles_with_units(name: str, full: DriftRun) -> None:
    figure = drawn(name, full).figure
    for letter in "xy":
        titles = axis_titles(figure, letter)
        assert titles and all(re.search(r"\(.+\)|cosine", title) or title in NAMES for title in titles), titles


@every_chart
def test_the_alt_text_is_made_of_numbers_in_the_data(name: str, full: DriftRun) -> None:
    chart = drawn(name, full)
    writings = {
        write(value) for value in data_values(chart.data) for write in (format_number, format_percent, format_error)
    }
    said = NUMBER.findall(chart.alt)
    # The intervals over samples that its sentence tells are not what its whiskers show.
    assert set(said) <= writings or (name == "task-cosine" and set(said) & writings), chart.alt
    assert re.search(r"\d", chart.alt) and chart.alt.endswith(".") and "nan" not in chart.alt


@pytest.mark.slow
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


@pytest.mark.slow
@every_chart
def test_drawing_twice_gives_the_same_figure(name: str, full: DriftRun) -> None:
    first = drawn(name, full).figure
    assert charts[name].draw(full).figure.to_json() == first.to_json()


@pytest.mark.slow
@every_chart
def test_names_stay_literal(name: str, hostile: DriftRun) -> None:
    texts = shown_texts(drawn(name, hostile).figure)
    for text in texts:
        assert "<script" not in text and "<i>" not in text and "<b>bold" not in text, text
        assert "%{hostile" not in text and not re.search(r"\$.*\$", text), text
    if any("script" in text for text in texts):
        assert any("&lt;script&gt;alert(1)&lt;/script&gt;" in text for text in texts)


@every_chart
@pytest.mark.parametrize(
    "kind",
    few(["single", "uncalibrated", "crowded", "unmeasured"], quick=["single", "crowded", "unmeasured"]),
)
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


CONTROL, CALIBRATED = "baseline:featcal-anchor", "calibrated:featcal"


def test_all_tasks_and_all_variants_but_the_base_are_drawn(full: DriftRun) -> None:
    assert chosen_tasks(full, ChartOptions()) == ["cars", "mnist", "dtd"]
    variants = ["merged", "calibrated:featcal"]
    assert chosen_variants(full, ChartOptions()) == variants
    assert chosen_variants(full, ChartOptions(variants=[CONTROL])) == [CONTROL]
    assert chosen_variants(full, ChartOptions(), base=True) == ["base", *variants]


def test_names_come_in_the_order_of_the_run_and_once(full: DriftRun) -> None:
    options = ChartOptions(tasks=["dtd", "cars", "dtd"], variants=["merged", "base"])
    assert chosen_tasks(full, options) == ["cars", "dtd"]
    assert chosen_variants(full, options) == ["base", "merged"]


@pytest.mark.parametrize("tasks", [["car"], []], ids=["unknown", "none"])
def test_an_unknown_or_empty_choice_names_those_there_are(tasks: list[str], full: DriftRun) -> None:
    with pytest.raises(DataError, match="has cars, mnist, dtd") as caught:
        chosen_tasks(full, ChartOptions(tasks=tasks))
    assert caught.value.hint == ("Did you mean 'cars'?" if tasks else "")


def test_rows_come_by_task_variant_and_layer(full: DriftRun) -> None:
    rows = layer_rows(full, ChartOptions(tasks=["mnist", "cars"], variants=["calibrated:featcal", "merged"]))
    places = list(zip(rows["task"], rows["variant"], rows["layer"], strict=True))
    variants = ["merged", "calibrated:featcal"]
    assert places == [(t, v, at) for t in ("cars", "mnist") for v in variants for at in range(1, 7)]


def test_what_is_missing_is_looked_for_among_the_chosen_alone(full: DriftRun) -> None:
    assert missing_data_message(full, ChartOptions(), "layers", ["final_share"]) is None
    assert missing_data_message(full, ChartOptions(tasks=["cars"]), "accuracy", ["value", "ci_low"]) is None


@pytest.mark.parametrize("name", ["contributions-heatmap", "alignment"])
def test_what_other_variants_have_is_not_measured_again(name: str, full: DriftRun) -> None:
    reason = charts[name].missing(full, ChartOptions(variants=["base"]))
    assert reason is not None and "not measured for base; choose another variant" in reason
    assert "driftlens analyze" not in reason
    assert charts[name].missing(full, ChartOptions(variants=["base", "merged"])) is None


def test_the_sentence_names_every_column_without_numbers_and_the_command_that_fills_them(
    request: pytest.FixtureRequest,
) -> None:
    run = request.getfixturevalue("unmeasured")
    assert missing_data_message(run, ChartOptions(), "layers", ["drift_rel", "n", "cka"]) == (
        "needs columns drift_rel, cka of table layers; `driftlens analyze RUN/spec.yaml --out NEW` adds them."
    )


@pytest.mark.parametrize(
    ("shares", "explained", "chosen", "said"),
    [
        ("", "", None, "needs column final_share of table layers; `driftlens analyze RUN` adds it."),
        ("merged", "merged", [CALIBRATED], "`driftlens analyze RUN` adds it."),
        ("merged", "merged", ["merged"], ""),
        ("merged", "merged", ["base"], "not measured for base; choose another variant."),
        ("", f"merged {CONTROL} {CALIBRATED}", None, "`driftlens analyze RUN --add contributions` adds it."),
    ],
    ids=["all left out", "one left out", "of others", "of the base", "a part switched off"],
)
def test_attribution_that_was_left_out_is_added_to_the_run_itself(
    shares: str, explained: str, chosen: list[str] | None, said: str, full: DriftRun
) -> None:
    """`driftlens analyze` passes over variants that have rows with Jacobians, whatever was left out of these."""
    rows = full.layers()
    rows["final_share"] = rows["final_share"].where(rows["variant"].isin(shares.split()))
    rows["jacobian_samples"] = rows["n"].where(rows["variant"].isin(explained.split()))
    reason = missing_data_message(
        with_rows(full, "layers", rows), ChartOptions(variants=chosen), "layers", ["final_share"]
    )
    assert str(reason or "").endswith(said) and bool(reason) == bool(said)


def test_the_layer_axis_always_labels_stem_and_head(full: DriftRun) -> None:
    axis = layer_axis_settings(full)
    assert axis["tickvals"] == [1, 2, 3, 4, 5, 6]
    assert axis["autorangeoptions"]["clipmin"] == 0.5 and axis["autorangeoptions"]["clipmax"] == 6.5
    assert layer_axis_title(full) == "layer (index: 1 stem, 6 head)"


def test_units_are_the_schemas() -> None:
    assert title_with_unit("drift", "layers", "drift_l2_mean") == "drift (feature units)"
    assert title_with_unit("loss", "outputs", "ce") == "loss (nat)"
    assert title_with_unit("share", "layers", "cka") == "share (ratio)"


def test_names_are_shown_character_by_character() -> None:
    assert escape_plotly("<b>&amp;</b>") == "&lt;b&gt;&amp;amp;&lt;/b&gt;"
    assert escape_plotly("$x$ %{y}\n") == "&#36;x&#36; &#37;{y}\ufffd"
    assert escaped_label("a" * 40) == "a" * 13 + "…" + "a" * 12 and escaped_label("<" * 40, 9).count("&lt;") == 8


themes = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
PARTS: tuple[Part, ...] = ("base", "expert", "merged", "calibrated", "baseline")

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHTS = {
    "full colour": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(rgb: Array) -> Array:
    x, y, z = np.cbrt(np.maximum(XYZ @ rgb / np.array([0.95047, 1, 1.08883]), 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def lightness(colour: str) -> float:
    return float(lab(linear(colour))[0])


def shade(colours: Sequence[str], at: float) -> str:
    ((red, green, blue),) = sample_colorscale([*colours], [at], colortype="tuple")
    return f"#{round(255 * red):02X}{round(255 * green):02X}{round(255 * blue):02X}"


@themes
def test_marks_and_text_stand_out_from_the_background(theme: Palette) -> None:
    for name, colour in [*theme.roles.items(), *theme.outcomes.items()]:
        assert contrast(colour, theme.surface) >= 3, (name, colour)
    assert contrast(theme.ink, theme.surface) >= 4.5 and contrast(theme.quiet, theme.surface) >= 4.5


@themes
@pytest.mark.parametrize("kind", ["roles", "outcomes"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_of_one_chart_differ_to_every_sight(theme: Palette, kind: str, sight: str) -> None:
    colours = getattr(theme, kind)
    seen = {name: lab(np.clip(SIGHTS[sight] @ linear(colour), 0, 1)) for name, colour in colours.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= (20 if sight == "full colour" else 14), (one, other)


@themes
def test_outcomes_have_hues_that_no_model_has(theme: Palette) -> None:
    models, outcomes = (
        np.array([lab(linear(colour)) for colour in colours.values()]) for colours in (theme.roles, theme.outcomes)
    )
    assert np.linalg.norm(models[:, None] - outcomes[None], axis=-1).min() >= 15
    coloured = models[np.hypot(models[:, 1], models[:, 2]) > 10]  # grey has no hue
    hues = [np.degrees(np.arctan2(values[:, 2], values[:, 1])) for values in (coloured, outcomes)]
    between = np.abs(hues[0][:, None] - hues[1][None]) % 360
    assert np.minimum(between, 360 - between).min() >= 15


def test_every_outcome_and_every_calibrator_has_a_colour() -> None:
    assert {*OUTCOMES} - {"still wrong"} <= {*LIGHT.outcomes} == {*DARK.outcomes}
    assert {colour_role({"calibrated:x": name}, "calibrated:x") for name in calibrators} == {*calibrators}
    assert {*calibrators} <= {*LIGHT.roles}
    assert [*LIGHT.roles] == [*DARK.roles]


def test_a_method_looks_alike_in_every_run() -> None:
    """Whatever its calibrations are called; a plug-in's methods share a colour."""
    mine, other = {"calibrated:mine": "residual"}, {"merged": "merged", "calibrated:featcal": "own"}
    for roles in (mine, other | mine):
        assert variant_style(roles, "calibrated:mine", dark=False).colour == LIGHT.roles["residual"]
    assert colour_role(other, "calibrated:featcal") == colour_role({}, "calibrated:residual") == "calibrated"
    assert colour_role(mine, "expert") == "expert"


@themes
def test_roles_differ_without_colour(theme: Palette) -> None:
    """Where greys come close, and everywhere else too, symbol and dash differ."""
    looks = [
        variant_style({variant: role}, variant, dark=theme is DARK)
        for role in theme.roles
        for variant in [role if role in PARTS[:3] else f"{'baseline' if role == 'baseline' else 'calibrated'}:x"]
    ]
    for marks in ("symbol", "dash"):
        assert len({getattr(entry, marks) for entry in looks}) == len(theme.roles)


@pytest.mark.parametrize("part", ["calibrated", "baseline"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_several_variants_of_a_part_stay_distinct(part: str, dark: bool) -> None:
    variants = {"merged": "merged", **{f"{part}:{at}": part for at in range(12)}}
    looks = {variant: variant_style(variants, variant, dark=dark) for variant in variants}
    assert len(set(looks.values())) == len(variants)
    first, second, third = (looks[f"{part}:{at}"] for at in range(3))
    assert len({first.colour, second.colour, third.colour}) == 3
    assert len({first.symbol, second.symbol, third.symbol}) == 3


def test_a_variant_looks_alike_whichever_others_are_shown() -> None:
    variants = {"merged": "merged", "calibrated:a": "featcal", "calibrated:b": "featcal"}
    light, dark = (variant_style(variants, "calibrated:b", dark=dark) for dark in (False, True))
    assert light.colour != dark.colour and (light.symbol, light.dash) == (dark.symbol, dark.dash)
    assert light != variant_style(variants, "calibrated:a", dark=False)


@themes
def test_the_sequential_scale_reads_in_grey(theme: Palette) -> None:
    steps = np.diff([lightness(shade(theme.sequential, at)) for at in np.linspace(0, 1, 41)])
    assert (steps < 0).all() or (steps > 0).all()
    assert contrast(theme.sequential[0], theme.surface) < contrast(theme.sequential[-1], theme.surface)


@themes
def test_the_diverging_scale_reads_in_grey_on_both_sides(theme: Palette) -> None:
    values = [lightness(shade(theme.diverging, at)) for at in np.linspace(0, 1, 41)]
    away = 1 if theme is DARK else -1
    assert (np.diff(values[20:]) * away > 0).all() and (np.diff(values[:21]) * away < 0).all()
    assert values[-1] - values[0] >= 10, "the negative end is darker"
    middle = linear(shade(theme.diverging, 0.5))
    assert np.ptp(middle) < 0.03, "zero has no hue"
