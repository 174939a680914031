"""A number per task and variant without a script: a line per task, a mark per variant, whiskers where there are any."""

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
    ticks,
    titled,
)
from driftlens_reports.formats.rows import Rows, number

_LEFT, _STEP, _PAD, _AXIS = 190.0, 11.0, 6.0, 24.0
_MOST = 60


@dataclass(frozen=True)
class Dots:
    """How a figure's numbers become marks.

    Attributes:
        value: column of the marks.
        unit: of its values, in the reader's words.
        low: column of the lower end of a whisker; empty without one.
        high: column of its upper end.
        reference: value at which a line runs from top to bottom.
    """

    value: str
    unit: str = "ratio"
    low: str = ""
    high: str = ""
    reference: float | None = None


def draw_dots(rows: Rows, plan: Dots, styles: Mapping[str, Series]) -> Drawing:
    """The lines, in the order of the tasks.

    Args:
        rows: the figure's numbers, with columns `task` and `variant`.
        plan: what is drawn.
        styles: how every variant that may occur is drawn.
    """
    tasks, variants = rows.distinct("task"), rows.distinct("variant")
    shown = tasks[:_MOST]
    low, high = rows.extremes([name for name in (plan.value, plan.low, plan.high) if name])
    reference = [] if plan.reference is None else [plan.reference]
    x_ticks = ticks(min([low, *reference]), max([high, *reference]), count=6)
    x = Scale(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - 30)
    line = len(variants) * _STEP + 2 * _PAD
    bottom = len(shown) * line
    parts: list[Path | Words] = [*_axis(x, x_ticks, bottom, plan)]
    for at, task in enumerate(shown):
        top = at * line
        parts.append(Path("grid", f"M0 {top + line:.1f} H{WIDTH:.1f}"))
        parts.append(Words("tick", _LEFT - 12, top + line / 2 + 4, cut(task, 28), "end"))
        own = rows.where("task", task)
        for place, variant in enumerate(variants):
            y = top + _PAD + (place + 0.5) * _STEP
            parts += _marks(own.where("variant", variant), plan, x, y, styles[variant])
    axes = f"Across: {titled(plan.value, plan.unit)}. Down: task."
    note = left_out(len(shown), len(tasks), "tasks")
    return Drawing(axes, bottom + _AXIS, tuple(parts), tuple(variants), note)


def _axis(x: Scale, x_ticks: list[float], bottom: float, plan: Dots) -> Iterator[Path | Words]:
    for value in x_ticks:
        yield Path("grid", f"M{x(value)} 0 V{bottom:.1f}")
        yield Words("tick", x(value), bottom + 16, number_text(value), "middle")
    if plan.reference is not None:
        yield Path("reference", f"M{x(plan.reference)} 0 V{bottom:.1f}")


def _marks(rows: Rows, plan: Dots, x: Scale, y: float, style: Series) -> Iterator[Path]:
    for entry in rows.entries:
        low, high = (number(entry, name) if name else None for name in (plan.low, plan.high))
        if low is not None and high is not None:
            yield Path(f"whisker {style.look}", f"M{x(low)} {y:.1f} H{x(high)}")
        value = number(entry, plan.value)
        if value is not None:
            yield Path(f"mark {style.look}", mark(style.symbol, x(value), y))
