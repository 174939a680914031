"""Labels beside points, each where it hides least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from driftlens_reports.paper.plate import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

Side = tuple[tuple[float, float], str, str]

_SIDES: tuple[Side, ...] = (
    ((5, 0), "left", "center"),
    ((-5, 0), "right", "center"),
    ((0, 5), "center", "bottom"),
    ((0, -5), "center", "top"),
    ((4, 4), "left", "bottom"),
    ((4, -4), "left", "top"),
    ((-4, 4), "right", "bottom"),
    ((-4, -4), "right", "top"),
)
"""Where a label may stand: offset in points, and which part of it stands there; the first is the usual one."""


Point = tuple[float, float, str]
"""Place of a point in the units of its axes, and its name."""


def label_points(axes: Axes, points: Sequence[Point]) -> None:
    """Name points without hiding points or other names where that can be avoided; the same places every time.

    Call it last: limits and layout of the figure must be final.
    """
    if not points:
        return
    figure = axes.get_figure(root=True)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    dots = axes.transData.transform([point[:2] for point in points])
    window, taken = axes.get_window_extent(renderer), []
    for x, y, name in points:
        text = axes.annotate(short(name), (x, y), (0, 0), textcoords="offset points", in_layout=False)
        text.set_fontsize(0.8 * text.get_fontsize())
        boxes = [_box(text, side, renderer) for side in _SIDES]
        best = min(range(len(_SIDES)), key=lambda at: _harm(boxes[at], dots, taken, window))
        _box(text, _SIDES[best], renderer)
        taken.append(boxes[best])


def _box(text: Annotation, side: Side, renderer: RendererBase) -> Bbox:
    """Where the label ends up on `side` of its point, in pixels; it stays there."""
    offset, across, along = side
    text.set(position=offset, ha=across, va=along)
    return text.get_window_extent(renderer)


def _harm(box: Bbox, dots: NDArray[Any], taken: Sequence[Bbox], window: Bbox) -> float:
    """How much a label in `box` hides, in pixels of area; what leaves the window counts double."""
    hidden = sum(_overlap(box, other) for other in taken)
    around = box.padded(3)  # markers have a size
    hidden += 50.0 * sum(around.contains(*dot) for dot in dots)
    return hidden + 2 * (box.width * box.height - _overlap(box, window))


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)
