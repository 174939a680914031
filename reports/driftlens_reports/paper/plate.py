"""A figure while it is being drawn: what it has plotted so far, and the parts that the runs can't fill."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.columns import printable
from driftlens_reports.paper import marks
from driftlens_reports.paper.exhibit import Exhibited, Panel
from driftlens_reports.paper.marks import number
from driftlens_reports.paper.static import finish, rough_size

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLUMNS = ("panel", "run", "task", "variant", "layer", "sample_id", "quantity", "value", "source")
"""Columns of the plotted numbers; figures of sweeps have the settings as well."""


class Plate:
    """A matplotlib figure and the numbers in it.

    Attributes:
        figure: made without pyplot, so nothing is left open.
        missing: the parts that the runs can't fill, so far.
        panels: those of charts.
    """

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self.figure)
        self.missing: list[Panel] = []
        self.panels: list[marks.Panel] = []
        self._rows: list[pd.DataFrame] = []
        self._noted: set[Axes] = set()

    def record(
        self,
        panel: str,
        run: DriftRun | None,
        quantity: str,
        value: float | Iterable[float],
        *,
        source: str = "measured",
        **key: Any,
    ) -> None:
        """Note plotted numbers.

        Args:
            panel: the panel's letter.
            run: where they come from; None for the paper's own.
            quantity: the column of the run's tables, where it is one.
            value: one number or several, unrounded.
            source: `measured` or `paper`.
            key: task, variant, layer, sample_id and the like: one for all values, or one each.
        """
        values = [float(value)] if isinstance(value, (int, float)) else [float(entry) for entry in value]
        told = {
            "panel": panel,
            "run": None if run is None else run.id,
            "quantity": quantity,
            "source": source,
        }
        self._rows.append(pd.DataFrame({**told, **key, "value": values}))

    def note(self, axes: Axes, name: str, missing: str) -> None:
        """Put a framed note in place of a panel that the runs can't fill."""
        framed_note(axes, self.lack(name, missing))
        self._noted.add(axes)

    def title(self, axes: Axes, text: str) -> None:
        """Head a panel at its left; a note needs no heading, for it names the panel itself."""
        if axes not in self._noted:
            axes.set_title(text, loc="left")

    def lack(self, name: str, missing: str) -> Panel:
        """Note a part that the runs can't fill, where other things stand in its place."""
        panel = Panel(name, missing)
        if panel not in self.missing:
            self.missing.append(panel)
        return panel

    def exhibited(self, caption: Iterable[str]) -> Exhibited:
        """The finished exhibit; `caption` is its sentences."""
        finish(self.figure, self.panels)
        frame = pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
        extra = [name for name in frame.columns if name not in COLUMNS]
        frame = frame.reindex(columns=[*COLUMNS[:-2], *extra, *COLUMNS[-2:]])
        frame = frame[frame["value"].notna()].reset_index(drop=True)
        if "layer" in frame:
            frame["layer"] = frame["layer"].astype("Int64")
        return Exhibited(frame, " ".join(caption), figure=self.figure, missing=tuple(self.missing))


def framed_note(axes: Axes, panel: Panel) -> None:
    """A frame with the words of `panel` in place of a plot, so that nobody takes the gap for a result."""
    for axis in (axes.xaxis, axes.yaxis):  # ticks themselves may be shared with other panels
        axis.set_visible(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linestyle=(0, (3, 2)), color="#999999")
    size = _font_size()
    # Letters of the packaged fonts are about 0.45 em wide.
    letters = max(12, int(0.9 * rough_size(axes)[0] * 72 / (0.45 * size)))
    # Backticks mark commands where the words are typeset; a figure has one font.
    parts = (
        "\n".join(textwrap.wrap(printable(part.replace("`", "")), letters, break_on_hyphens=False))
        for part in (panel.name, panel.missing)
    )
    text = axes.text(0.5, 0.5, "\n\n".join(parts), ha="center", va="center", transform=axes.transAxes)
    text.set(fontsize=size, color="#555555", linespacing=1.3, in_layout=False)


def short(text: str, longest: int = 16) -> str:
    """A user's name as it stands on a figure: on one line, and shortened in the middle where it is long."""
    clean = printable(text)
    if len(clean) <= longest:
        return clean
    end = (longest - 1) // 2
    return f"{clean[: longest - 1 - end]}…{clean[-end:]}"


def legend(figure: Figure, entries: Mapping[str, Artist], columns: int | None = None) -> None:
    """One legend for the whole figure, above its panels."""
    if entries:
        figure.legend(
            list(entries.values()),
            [short(name, 28) for name in entries],
            loc="outside upper center",
            ncols=columns or len(entries),
        )


def percent_axis(axis: Axis) -> None:
    """Fractions along an axis, labelled in percent with as many decimals as they need."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, ".4~%")))


def _font_size() -> float:
    import matplotlib

    return 0.85 * float(matplotlib.rcParams["font.size"])
