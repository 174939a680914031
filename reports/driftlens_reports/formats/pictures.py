"""Pictures for Markdown: the main curve as a PNG file, the same bytes at every call in one environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftlens.variants import title
from driftlens_reports.charts.words import counted
from driftlens_reports.content import Figure, ReportContent
from driftlens_reports.formats.drawing import cut
from driftlens_reports.formats.rows import Rows, layers_of, number, rows_of
from driftlens_reports.paper.style import encode, look_of, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN = "layer-drift"
"""The figure that a reader of a comment sees."""

_WIDTH, _HEIGHT, _COLUMNS, _MOST = 7.0, 1.6, 4, 8
_VALUE = "mean drift"


def pictures(content: ReportContent) -> Mapping[str, bytes]:
    """PNG files by name of the figure; none where the main curve is not measured."""
    found = [figure for figure in content.figures if figure.name == MAIN and figure.data is not None]
    return {figure.name: _curves(figure) for figure in found}


def _curves(figure: Figure) -> bytes:
    """Mean drift by layer, a panel per task, those of the largest drift first where there are many."""
    from matplotlib.figure import Figure as Canvas

    assert figure.data is not None
    rows = rows_of(figure.data)
    tasks = rows.distinct("task")
    shown = sorted(tasks, key=lambda task: -rows.where("task", task).extremes([_VALUE])[1])[:_MOST]
    shown = [task for task in tasks if task in shown]
    lines = -(-len(shown) // _COLUMNS)
    with sheet(_WIDTH):
        canvas = Canvas(figsize=(_WIDTH, _HEIGHT * lines + 0.6), layout="constrained")
        grid = canvas.subplots(lines, min(len(shown), _COLUMNS), sharex=True, sharey=True, squeeze=False)
        panels = list(grid.flat)
        for panel in panels[len(shown) :]:
            panel.set_axis_off()
        for panel, task in zip(panels, shown, strict=False):
            panel.set_title(cut(task, 30).replace("$", r"\$"))
            _fill(panel, rows.where("task", task))
        panels[0].set_ylim(bottom=0)  # shared by all, and last: it fixes the upper end too
        hidden = len(tasks) - len(shown)
        more = f"; {counted(hidden, 'task')} with less drift not shown" if hidden else ""
        canvas.supxlabel(f"layer{more}")
        canvas.supylabel("mean L2 drift (feature units)")
        handles, labels = canvas.axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return encode(canvas, "png")


def _fill(panel: Axes, rows: Rows) -> None:
    for variant in rows.distinct("variant"):
        own = {entry["layer"]: number(entry, _VALUE) for entry in rows.where("variant", variant).entries}
        layers = layers_of(rows)
        look = look_of(variant)
        panel.plot(
            layers,
            [_or_gap(own.get(layer)) for layer in layers],
            color=look.colour,
            marker=look.marker,
            linestyle=look.dash,
            label=cut(title(variant), 30).replace("$", r"\$"),
        )


def _or_gap(value: float | None) -> float:
    return math.nan if value is None else value
