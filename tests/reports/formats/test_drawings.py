"""Drawings without a script: coordinates are proportional to values, and what was not measured is a gap."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driftlens_reports.content import Cell, Column, Table
from driftlens_reports.formats.dot_drawing import Dots, draw_dots
from driftlens_reports.formats.drawing import Box, Drawing, Path, Scale, Series, Words, polyline, ticks
from driftlens_reports.formats.heat_drawing import STEPS, Heat, draw_heat
from driftlens_reports.formats.line_drawing import Lines, draw_lines
from driftlens_reports.formats.rows import Rows, rows_of

STYLES = {"merged": Series("v0", "square"), "calibrated:a": Series("v1", "diamond")}


def rows(*values: tuple[Cell, ...]) -> Rows:
    names = ("task", "variant", "layer", "value", "low", "high")
    columns = tuple(Column(name=name, kind="text") for name in names)
    return rows_of(
        Table(name="t", title="t", columns=columns, rows=tuple((*v, None, None)[:6] for v in values))
    )


def paths(drawing: Drawing, look: str) -> list[str]:
    return [part.d for part in drawing.parts if isinstance(part, Path) and part.look.split()[0] == look]


def points(d: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(2, 8))
@example(low=0.0, width=5e-324, count=2)
def test_ticks_enclose_what_they_label_in_even_steps(low: float, width: float, count: int) -> None:
    high = low + width
    found = ticks(low, high, count)
    assert len(found) >= 2
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * step and found[-1] >= high - 1e-6 * step
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert steps == pytest.approx([step] * len(steps), rel=1e-5)
    assert len(found) <= 2 * count + 2


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    scale = Scale(2.0, 4.0, 100.0, 0.0)
    assert (scale(2.0), scale(3.0), scale(4.0)) == (100.0, 50.0, 0.0)


def test_a_missing_point_breaks_the_line() -> None:
    assert polyline([(0, 1), (1, 2), None, (3, 4)]) == "M0.0 1.0 L1.0 2.0 M3.0 4.0"


def test_curves_are_proportional_to_their_values() -> None:
    drawing = draw_lines(
        rows(("cars", "merged", 1, 0.0), ("cars", "merged", 2, 1.0), ("cars", "merged", 4, 4.0)),
        Lines("value"),
        STYLES,
    )
    (first, second, last) = points(paths(drawing, "line")[0])
    assert (first[1] - second[1]) * 4 == pytest.approx(first[1] - last[1], abs=0.3)
    assert (second[0] - first[0]) * 3 == pytest.approx(last[0] - first[0], abs=0.3)


def test_panels_share_one_scale() -> None:
    drawing = draw_lines(
        rows(*[(task, "merged", layer, size) for task, size in (("a", 1.0), ("b", 3.0)) for layer in (1, 2)]),
        Lines("value"),
        STYLES,
    )
    low, high = (points(d)[0][1] for d in paths(drawing, "line"))
    bottom = max(points(d)[0][1] for d in paths(drawing, "grid"))
    assert (bottom - low) * 3 == pytest.approx(bottom - high, abs=0.3)


def test_a_layer_without_a_value_has_no_mark_and_no_line() -> None:
    drawing = draw_lines(
        rows(
            *[("cars", "merged", layer, value) for layer, value in ((1, 1.0), (2, None), (3, 2.0), (4, 2.0))]
        ),
        Lines("value"),
        STYLES,
    )
    assert re.sub(r"[\d. ]", "", paths(drawing, "line")[0]) == "MML"
    assert len(paths(drawing, "mark")) == 3


@pytest.mark.parametrize("value", [0.0, None], ids=["zero drift", "nothing measured"])
def test_a_single_layer_without_drift_still_draws(value: Cell) -> None:
    drawing = draw_lines(rows(("cars", "merged", 1, value)), Lines("value"), STYLES)
    assert len(paths(drawing, "mark")) == (value is not None)
    assert not math.isnan(drawing.height)


def test_no_more_panels_than_a_page_can_take_and_that_is_said() -> None:
    many = draw_lines(rows(*[(f"task {at}", "merged", 1, 1.0) for at in range(30)]), Lines("value"), STYLES)
    assert len(paths(many, "line")) == 12
    assert many.note.startswith("12 of 30 panels")


def test_cells_are_darker_the_larger_and_gaps_are_gaps() -> None:
    values = [0.0, 0.5, 1.0, None]
    drawing = draw_heat(
        rows(*[("a", "merged", at, value) for at, value in enumerate(values, 1)]), Heat("value")
    )
    cells = [part for part in drawing.parts if isinstance(part, Box) and part.hint]
    assert [cell.look for cell in cells] == ["q0", f"q{STEPS // 2}", f"q{STEPS - 1}", "gap"]
    assert cells[3].hint.endswith("–")


def test_a_signed_scale_has_zero_in_the_middle() -> None:
    drawing = draw_heat(
        rows(("a", "merged", 1, -1.0), ("a", "merged", 2, 0.0), ("a", "merged", 3, 4.0)),
        Heat("value", is_signed=True),
    )
    looks = [part.look for part in drawing.parts if isinstance(part, Box) and part.hint]
    assert looks[1:] == [f"d{STEPS // 2}", f"d{STEPS - 1}"] and int(looks[0][1:]) < STEPS // 2


def test_dots_and_whiskers_are_where_their_numbers_are() -> None:
    drawing = draw_dots(
        rows(("a", "merged", None, 0.5, 0.25, 1.0), ("a", "calibrated:a", None, 1.0, None, None)),
        Dots("value", low="low", high="high"),
        STYLES,
    )
    (whisker,) = paths(drawing, "whisker")
    left, right = float(whisker[1:].split()[0]), float(whisker.split("H")[1])
    at = {part.text: part.x for part in drawing.parts if isinstance(part, Words) and part.anchor == "middle"}
    low, high = at["0.4"], at["1"]
    assert left == pytest.approx(low - (high - low) / 4, abs=0.2) and right == pytest.approx(high, abs=0.2)
    marks = [points(d)[0] for d in paths(drawing, "mark")]
    assert marks[1][0] - marks[0][0] == pytest.approx(5 / 6 * (high - low) - 4.4 + 3.2, abs=0.3)
