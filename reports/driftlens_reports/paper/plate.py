"""A figure while it is being drawn: what it has plotted so far, and the parts that the runs can't fill."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from driftlens.findings.reading import printable
from driftlens.runs.run import DriftRun
from driftlens_reports.paper.exhibit import Exhibited, Gap, together
from driftlens_reports.paper.marks import Panel
from driftlens_reports.paper.static import add_legend, finish, rough_size
from driftlens_reports.paper.style import venue_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLUMNS = ("panel", "run", "task", "variant", "layer", "sample_id", "quantity", "value", "source")
"""Columns of the plotted numbers; figures of sweeps have the settings as well."""


class Plate:
    """A matplotlib figure and the numbers in it; `name` is the exhibit's, for the protocol that fills what is missing.

    Attributes:
        figure: made without pyplot, so nothing is left open; on a slide as high as the slide, whatever is asked for.
        missing: the parts that the runs can't fill, so far.
        charts: those that are drawn on it; they share one legend.
        panels: the axes of charts.
    """

    def __init__(self, width: float, height: float, name: str) -> None:
        self._name = name
        if venue_of(width) == "slide":
            height = width * 9 / 16
        self.figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self.figure)
        self.missing: list[Gap] = []
        self.charts: list[go.Figure] = []
        self.panels: list[Panel] = []
        self._rows: list[pd.DataFrame] = []

    def record(
        self,
        panel: str,
        run: DriftRun | None,
        quantity: str,
        value: ArrayLike,
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
        key_of_all = {"panel": panel, "run": run and run.id, "quantity": quantity, "source": source, **key}
        self._rows.append(pd.DataFrame({**key_of_all, "value": np.atleast_1d(np.asarray(value, float))}))

    def note(self, axes: Axes, name: str, missing: str) -> None:
        """Put a framed note in place of a panel that the runs can't fill."""
        framed_note(axes, self.lack(name, missing))

    def lack(self, name: str, missing: str) -> Gap:
        """Note a part that the runs can't fill, where other things stand in its place."""
        gap = Gap.of(self._name, name, missing)
        if gap not in self.missing:
            self.missing.append(gap)
        return gap

    def exhibited(self, caption: Iterable[str]) -> Exhibited:
        """The finished exhibit; `caption` is its sentences, to which those about missing parts are added."""
        add_legend(self.figure, self.charts)
        finish(self.figure, self.panels)
        frame = pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
        extra = [name for name in frame.columns if name not in COLUMNS]
        frame = frame.reindex(columns=[*COLUMNS[:-2], *extra, *COLUMNS[-2:]])
        frame = frame[frame["value"].notna()].reset_index(drop=True).astype({"layer": "Int64"})
        sentences = together(caption, self.missing)
        return Exhibited(frame, " ".join(sentences), figure=self.figure, missing=tuple(self.missing))


def framed_note(axes: Axes, gap: Gap) -> None:
    """A frame with what is missing in place of a plot, so that nobody takes the gap for a result."""
    axes.set_title("")  # it names the panel itself
    for axis in (axes.xaxis, axes.yaxis):  # ticks themselves may be shared with other panels
        axis.set_visible(False)
    for spine in axes.spines.values():
        spine.set(visible=True, linestyle=(0, (3, 2)), color="#999999")
    size = rcParams["xtick.labelsize"]
    # Letters of the packaged fonts are about 0.45 em wide.
    letters = max(12, int(0.9 * rough_size(axes)[0] * 72 / (0.45 * size)))
    whole: dict[str, Any] = dict.fromkeys(("break_on_hyphens", "break_long_words"), False)
    # Backticks mark commands where the words are typeset; a figure has one font.
    parts = (
        "\n".join(textwrap.wrap(printable(part.replace("`", "")), letters, **whole))
        for part in (gap.name, gap.missing)
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


def legend(figure: Figure, entries: Mapping[str, Artist], columns: int = 0) -> None:
    """One legend for the whole figure, above its panels."""
    if entries:
        names = [short(name, 28) for name in entries]
        columns = columns or len(entries)
        figure.legend([*entries.values()], names, loc="outside upper center", ncols=columns)
