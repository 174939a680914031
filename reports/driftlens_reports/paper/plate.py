"""The figure of an exhibit, which records every plotted number and every gap. Entry point: `PaperFigure`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from numpy.typing import ArrayLike

from driftlens.results.formatting import strip_control_chars
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens_reports.charts.picking import ChartOptions, missing_data_message
from driftlens_reports.charts.theme import variant_style
from driftlens_reports.charts.words import shorten_middle, variant_title
from driftlens_reports.paper.exhibit import (
    ExhibitOptions,
    ExhibitResult,
    MissingPart,
    split_caption,
)

# Columns of the plotted numbers; figures of sweeps also have the settings.
COLUMNS = ("panel", "run", "task", "variant", "layer", "sample_id", "quantity", "value")

# Label of lines that show no measurement: zero lines, limits, defaults.
GUIDE = "_guide"

_MARKERS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v"},
    **{"star": "*", "cross": "P", "x": "X", "hexagon": "h", "pentagon": "p", "bowtie": "d", "octagon": "8"},
}
_DASHES: dict[str, Any] = {
    "dot": (0, (1.2, 1.2)),
    "dash": (0, (4, 1.5)),
    "longdash": (0, (7, 2)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "10px,2px": (0, (5, 1)),
    "8px,2px,2px,2px": (0, (4, 1, 1, 1)),
    "2px,2px": (0, (1, 1)),
    "12px,4px": (0, (6, 2)),
}


class PaperFigure:
    """A matplotlib figure under construction that records every plotted number and every missing part."""

    def __init__(self, runs: Sequence[DriftRun], options: ExhibitOptions, height: float) -> None:
        self.figure = Figure(figsize=(options.width, height), layout="constrained")
        # The layout needs a canvas; pyplot would keep every figure in memory.
        FigureCanvasAgg(self.figure)
        self._runs, self._options = runs, options
        self._missing: list[MissingPart] = []
        self._rows: list[pd.DataFrame] = []

    def record(self, panel: str, run: DriftRun, numbers: Mapping[str, ArrayLike] | pd.DataFrame, **key: Any) -> None:
        """Record plotted numbers by quantity, unrounded; `key` adds columns, as a scalar or one entry per number."""
        for quantity, value in numbers.items():
            values = np.atleast_1d(np.asarray(value, float))
            rows = pd.DataFrame({"panel": panel, "run": run.id, "quantity": quantity, **key, "value": values})
            self._rows.append(rows)

    def lacks(
        self,
        part: Figure | SubFigure,
        name: str,
        run: DriftRun,
        table: str,
        columns: Sequence[str],
        tasks: Sequence[str],
        variants: Sequence[str],
    ) -> bool:
        """Return True, and replace the panel by a note, if the run lacks the columns for these tasks and variants."""
        missing: str | None = f"no variant to show; `{CALIBRATE}` adds one"
        if variants:
            missing = missing_data_message(run, ChartOptions(tasks=tasks, variants=variants), table, columns)
        if missing:
            self.note_missing_panel(part.subplots(), name, missing)
        return bool(missing)

    def measured_variants(
        self, name: str, run: DriftRun, column: str, task: str, variants: Sequence[str]
    ) -> tuple[str, ...]:
        """Return the variants with values in a column of the layers; record that the others are not shown.

        Args:
            name: what the figure shows.
            run: the run.
            column: of the table `layers`.
            task: the task.
            variants: the variants to choose from, of which one at least is measured.
        """
        measured = []
        for variant in variants:
            options = ChartOptions(tasks=[task], variants=[variant])
            if missing := missing_data_message(run, options, "layers", [column]):
                self.record_missing(f"{name} of {variant_title(variant)}", missing)
            else:
                measured.append(variant)
        return tuple(measured)

    def note_missing_panel(self, axes: Axes, name: str, missing: str) -> None:
        """Replace a panel without data by the reason and the command that adds the data."""
        self.record_missing(name, missing)
        axes.set_title("")
        axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
        axes.spines[:].set(visible=True, linestyle=(0, (3, 2)), color="#999999")
        size = rcParams["xtick.labelsize"]
        inches = axes.get_position().width * axes.figure.bbox.width / axes.figure.dpi
        # A letter is about 0.45 of the font size wide, and an inch has 72 points.
        letters = max(12, int(0.9 * inches * 72 / (0.45 * size)))
        wrap = textwrap.TextWrapper(letters, break_long_words=False, break_on_hyphens=False)
        # Backticks mark commands in captions; here everything has one font.
        parts = [wrap.fill(strip_control_chars(part.replace("`", ""))) for part in (name, missing)]
        written = axes.text(0.5, 0.5, "\n\n".join(parts), ha="center", va="center", transform=axes.transAxes)
        # Outside the layout, which would resize the panel for the text.
        written.set(fontsize=size, color="#555555", linespacing=1.3, in_layout=False)

    def record_missing(self, name: str, missing: str) -> None:
        """Record missing data that has no panel of its own."""
        gap = MissingPart(name, missing.removesuffix("."))
        if gap not in self._missing:
            self._missing.append(gap)

    def finish(self, lead: str, *caption: str) -> ExhibitResult:
        """Return the finished figure; what has no room in the caption after `lead` becomes a note."""
        self._freeze_layout()
        frame = pd.concat(self._rows, ignore_index=True) if self._rows else pd.DataFrame()
        extra = [name for name in frame.columns if name not in COLUMNS]
        frame = frame.reindex(columns=[*COLUMNS[:-2], *extra, *COLUMNS[-2:]])
        frame = frame[frame["value"].notna()].reset_index(drop=True).astype({"layer": "Int64"})
        text, notes = split_caption(self._options, [lead, *caption], self._runs, self._missing)
        return ExhibitResult(frame, text, notes, figure=self.figure, missing=tuple(self._missing))

    def _freeze_layout(self) -> None:
        """Compute the layout once, so that every file format shows the same."""
        self.figure.get_layout_engine().execute(self.figure)
        self.figure.set_layout_engine("none")
        # The layout's solver ends in other last digits from time to time.
        for part in self.figure.findobj(SubFigure):
            part.bbox_relative.set_points(part.bbox_relative.get_points().round(5))
        for axes in self.figure.axes:
            axes.set_position([round(part, 5) for part in axes.get_position(original=True).bounds])


def add_legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Add one legend for the whole figure, above its panels."""
    if entries:
        names = [shorten_middle(name, 28) for name in entries]
        columns = min(len(entries), 2 if figure.get_figwidth() < 4 else 4)
        figure.legend([*entries.values()], names, loc="outside upper center", ncols=columns)


def variant_colour(roles: Mapping[str, str], variant: str) -> str:
    """Return the colour of a variant, the same as in HTML reports."""
    return variant_style(roles, variant, dark=False).colour


def marker_style(roles: Mapping[str, str], variant: str) -> dict[str, Any]:
    """Return the matplotlib marker style of a variant; the expert's markers are hollow."""
    style = variant_style(roles, variant, dark=False)
    face = "none" if variant == "expert" else style.colour
    return {"marker": _MARKERS[style.symbol], "markerfacecolor": face, "markeredgecolor": style.colour}


def line_style(roles: Mapping[str, str], variant: str) -> dict[str, Any]:
    """Return colour, dash and markers of a variant's curve, for matplotlib."""
    style = variant_style(roles, variant, dark=False)
    return {"color": style.colour, "linestyle": _DASHES.get(style.dash, "-"), **marker_style(roles, variant)}


def draw_guide_line(axes: Axes, height: float) -> None:
    """Draw a thin horizontal reference line across the panel."""
    axes.axhline(height, color="#888888", linewidth=rcParams["axes.linewidth"], label=GUIDE)


def format_percent_axis(axis: Any) -> None:
    """Format the ticks of an axis of fractions as percentages."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %".replace("-", "\N{MINUS SIGN}"))
