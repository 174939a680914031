"""Curves over layers without a script: a panel per task, a curve per variant, one scale for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from driftlens_reports.formats.drawing import (
    WIDTH,
    Drawing,
    Path,
    Scale,
    Series,
    Words,
    cut,
    left_out,
    mark,
    number_text,
    polyline,
    ticks,
    titled,
)
from driftlens_reports.formats.rows import Rows, layers_of, number

_COLUMNS, _LEFT, _GAP, _HEIGHT, _TITLE, _AXIS = 3, 48.0, 34.0, 130.0, 22.0, 30.0
_MOST = 12
"""Panels beyond which a page only grows longer."""


@dataclass(frozen=True)
class Lines:
    """How a figure's numbers become curves.

    Attributes:
        value: column of the y axis.
        unit: of its values, in the reader's words.
        panel: column that tells panels apart; empty for one panel.
        low: column of the lower edge of a band; empty without one.
        high: column of its upper edge.
        reference: value at which a line runs through every panel.
        from_zero: whether the y axis begins at zero.
        open_marks: column of values to compare with, drawn as open marks; empty without.
    """

    value: str
    unit: str = "ratio"
    panel: str = "task"
    low: str = ""
    high: str = ""
    reference: float | None = None
    from_zero: bool = True
    open_marks: str = ""


@dataclass(frozen=True)
class _Frame:
    """Where a panel's axes are."""

    x: Scale
    y: Scale


def draw_lines(rows: Rows, plan: Lines, styles: Mapping[str, Series]) -> Drawing:
    """The panels, filled row by row.

    Args:
        rows: the figure's numbers, with columns `layer` and `variant`.
        plan: what is drawn.
        styles: how every variant that may occur is drawn.
    """
    rows = Rows(tuple(entry for entry in rows.entries if number(entry, "layer") is not None))
    panels = (
        {name: rows.where(plan.panel, name) for name in rows.distinct(plan.panel)}
        if plan.panel
        else {"": rows}
    )
    shown = list(panels)[:_MOST]
    layers = layers_of(rows)
    wanted = [name for name in (plan.value, plan.low, plan.high, plan.open_marks) if name]
    axes = (
        f"Across: layer (index: 1 stem, {max(layers, default=1)} head). Up: {titled(plan.value, plan.unit)}."
    )
    low, high = rows.extremes(wanted)
    extra = [0.0] * plan.from_zero + ([] if plan.reference is None else [plan.reference])
    y_ticks = ticks(min([low, *extra]), max([high, *extra]))
    columns = min(_COLUMNS, len(shown)) or 1
    width = (WIDTH - _LEFT - 8 - (columns - 1) * _GAP) / columns
    parts: list[Path | Words] = []
    for at, name in enumerate(shown):
        left = _LEFT + (at % columns) * (width + _GAP)
        top = _TITLE + (at // columns) * (_HEIGHT + _TITLE + _AXIS)
        frame = _Frame(_layer_scale(layers, left, width), Scale(y_ticks[0], y_ticks[-1], top + _HEIGHT, top))
        parts += _axes(frame, name, layers, y_ticks, is_first=at % columns == 0)
        parts += _reference(frame, plan)
        parts += _curves(frame, panels[name], plan, layers, styles)
    height = -(-len(shown) // columns) * (_HEIGHT + _TITLE + _AXIS)
    note = left_out(len(shown), len(panels), "panels")
    return Drawing(axes, height, tuple(parts), tuple(rows.distinct("variant")), note)


def _layer_scale(layers: list[int], left: float, width: float) -> Scale:
    low, high = (layers[0] - 0.4, layers[-1] + 0.4) if layers else (0.0, 1.0)
    return Scale(low, high, left, left + width)


def _axes(
    frame: _Frame, title: str, layers: list[int], y_ticks: list[float], *, is_first: bool
) -> Iterator[Path | Words]:
    x, y = frame.x, frame.y
    yield Words("title", x.start, y.end - 7, cut(title, 42))
    for value in y_ticks:
        yield Path("grid", f"M{x.start:.1f} {y(value):.1f} H{x.end:.1f}")
        if is_first:
            yield Words("tick", x.start - 6, y(value) + 4, number_text(value), "end")
    step = -(-len(layers) // 8) or 1
    kept = {*layers[:-1:step], *layers[-1:]}
    for layer in sorted(kept):
        if layer == layers[-1] or layers[-1] - layer >= step:
            yield Words("tick", x(layer), y.start + 16, str(layer), "middle")


def _reference(frame: _Frame, plan: Lines) -> Iterator[Path]:
    if plan.reference is not None:
        yield Path("reference", f"M{frame.x.start:.1f} {frame.y(plan.reference):.1f} H{frame.x.end:.1f}")


def _curves(
    frame: _Frame, rows: Rows, plan: Lines, layers: list[int], styles: Mapping[str, Series]
) -> Iterator[Path]:
    curves = {variant: rows.where("variant", variant) for variant in rows.distinct("variant")}
    for variant, own in curves.items() if plan.low else ():
        lower, upper = _points(frame, own, plan.low, layers), _points(frame, own, plan.high, layers)
        edge = [point for point in (*upper, *reversed(lower)) if point is not None]
        if len(edge) > 2:
            yield Path(f"band {styles[variant].look}", f"{polyline(edge)} Z")
    for variant, own in curves.items():
        points = _points(frame, own, plan.value, layers)
        yield Path(f"line {styles[variant].look}", polyline(points))
        for point in points:
            if point is not None:
                yield Path(f"mark {styles[variant].look}", mark(styles[variant].symbol, *point))
        for point in _points(frame, own, plan.open_marks, layers) if plan.open_marks else ():
            if point is not None:
                yield Path(f"open {styles[variant].look}", mark(styles[variant].symbol, *point))


def _points(frame: _Frame, rows: Rows, column: str, layers: list[int]) -> list[tuple[float, float] | None]:
    values = {entry["layer"]: number(entry, column) for entry in rows.entries}
    found = [(layer, values.get(layer)) for layer in layers]
    return [None if value is None else (frame.x(layer), frame.y(value)) for layer, value in found]
