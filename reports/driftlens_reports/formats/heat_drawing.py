"""A number per task and layer as coloured cells without a script: a block per variant, one scale for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from driftlens.variants import title
from driftlens_reports.charts.words import short
from driftlens_reports.content import NO_VALUE
from driftlens_reports.formats.drawing import WIDTH, Box, Drawing, Words, cut, left_out, titled
from driftlens_reports.formats.rows import Rows, layers_of, number

STEPS = 11
"""Shades of a scale; odd, so that a scale around zero has a middle."""

_LEFT, _ROW, _TITLE, _AXIS, _KEY = 150.0, 21.0, 24.0, 22.0, 34.0
_NARROW = 38.0
"""Width below which a cell has no room for its number."""
_MOST = 40
"""Tasks beyond which a page only grows longer."""


@dataclass(frozen=True)
class Heat:
    """How a figure's numbers become cells.

    Attributes:
        value: column of the cells.
        unit: of its values, in the reader's words.
        is_signed: whether the scale is centred on zero.
        rest: column whose number on the head's row has a cell of its own behind the layers; empty without.
        write: a value as a cell shows it.
    """

    value: str
    unit: str = "ratio"
    is_signed: bool = False
    rest: str = ""
    write: Callable[[float], str] = short

    @property
    def family(self) -> str:
        """First letter of the style classes of its shades."""
        return "d" if self.is_signed else "q"


@dataclass(frozen=True)
class _Shades:
    plan: Heat
    low: float
    high: float

    def look(self, value: float | None) -> str:
        """The style class of a value; values outside the scale have its ends."""
        if value is None:
            return "gap"
        step = int((value - self.low) / (self.high - self.low) * STEPS)
        return f"{self.plan.family}{min(max(step, 0), STEPS - 1)}"


def draw_heat(rows: Rows, plan: Heat) -> Drawing:
    """The blocks, one below the other, and a key to the shades."""
    tasks, layers = rows.distinct("task"), layers_of(rows)
    shown, shades = tasks[:_MOST], _shades(rows, plan)
    heads = [*map(str, layers), *(["rest"] if plan.rest else [])]
    width = min((WIDTH - _LEFT) / max(len(heads), 1), 72.0)
    parts: list[Box | Words] = []
    top = 0.0
    for variant in rows.distinct("variant"):
        parts.append(Words("title", 0, top + 14, cut(title(variant), 60)))
        own = rows.where("variant", variant)
        for at, task in enumerate(shown):
            y = top + _TITLE + at * _ROW
            parts.append(Words("tick", _LEFT - 8, y + 15, cut(task, 22), "end"))
            parts += _cells(_values(own.where("task", task), plan, layers), shades, y, width)
        top += _TITLE + len(shown) * _ROW
        parts += [
            Words("tick", round(_LEFT + (at + 0.5) * width, 1), top + 15, head, "middle")
            for at, head in enumerate(heads)
        ]
        top += _AXIS
    across = f"Across: layer (index: 1 stem, {heads[len(layers) - 1]} head)" if layers else "Across: layer"
    return Drawing(
        f"{across}{', then the remainder (rest)' if plan.rest else ''}. Down: task.",
        top + _KEY,
        (*parts, *_key(shades, top)),
        note=left_out(len(shown), len(tasks), "tasks"),
    )


def _shades(rows: Rows, plan: Heat) -> _Shades:
    low, high = rows.extremes([plan.value])
    if plan.is_signed:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    return _Shades(plan, low, high if high > low else low + (abs(low) or 1.0))


def _values(rows: Rows, plan: Heat, layers: Sequence[int]) -> list[tuple[str, float | None]]:
    """What a cell is about, in words, and its value; None where it was not measured."""
    by_layer = {entry["layer"]: entry for entry in rows.entries}
    found = [by_layer.get(layer, {}) for layer in layers]
    cells = [
        (f"layer {layer} {entry.get('path', '')}", number(entry, plan.value))
        for layer, entry in zip(layers, found, strict=True)
    ]
    return [*cells, ("remainder", number(found[-1], plan.rest))] if plan.rest and found else cells


def _cells(
    values: Sequence[tuple[str, float | None]], shades: _Shades, y: float, width: float
) -> Iterator[Box | Words]:
    for at, (about, value) in enumerate(values):
        x, look = round(_LEFT + at * width, 1), shades.look(value)
        hint = f"{about}: {NO_VALUE if value is None else f'{value:.4g}'}"
        yield Box(look, x, y, round(width - 1, 1), _ROW - 1, hint)
        if value is not None and width >= _NARROW:
            yield Words(f"cell {look}", round(x + width / 2, 1), y + 14, shades.plan.write(value), "middle")


def _key(shades: _Shades, top: float) -> Iterator[Box | Words]:
    y, plan = top + 10, shades.plan
    yield Words("tick", _LEFT - 8, y + 11, plan.write(shades.low), "end")
    for at in range(STEPS):
        yield Box(f"{plan.family}{at}", _LEFT + 22 * at, y, 22, 14, "")
    yield Words(
        "tick", _LEFT + 22 * STEPS + 8, y + 11, f"{plan.write(shades.high)}  {titled(plan.value, plan.unit)}"
    )
