"""The theme of all charts: one colour per model and per outcome, layout, and markers of variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from driftlens.results.formatting import format_percent
from driftlens.utils.variants import variant_kind
from driftlens_reports.charts.words import LONGEST, escape_plotly, escaped_label, variant_label

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
# Font sizes in pixels: titles and legend; ticks and panel text.
SIZE, SMALL = 13, 11

# Formats of hovered numbers: three significant digits; a fraction as a percentage.
NUMBER, SHARE = ".3~g", ".1~%"
# The same for axis ticks.
TICK_NUMBER, TICK_SHARE = ".3~g", ".0~%"


@dataclass(frozen=True)
class Palette:
    """Colours of the light or the dark theme.

    `roles`: of models, by method or kind; `outcomes`: of samples, in hues that no model has; `gap`: where a heatmap has
    no number; `tones`: of sentences. Colours of one mapping differ to every kind of colour vision.
    """

    surface: str
    ink: str
    quiet: str
    grid: str
    gap: str
    roles: Mapping[str, str]
    outcomes: Mapping[str, str]
    sequential: Sequence[str]
    diverging: Sequence[str]
    tones: Mapping[str, str]


LIGHT = Palette(
    surface="#FFFFFF",
    ink="#1B1B1B",
    quiet="#595959",
    grid="#E3E3E3",
    gap="#D0D0D0",
    roles={
        "base": "#232224",
        "expert": "#0072B2",
        "merged": "#6B6B6B",
        "featcal": "#D55E00",
        "residual": "#4B2C81",
        "surgery": "#05A2A9",
        "prob_surgery": "#01506F",
        "calibrated": "#E0559A",
        "baseline": "#664F03",
    },
    outcomes={
        "right": "#0EA671",
        "repaired": "#7B9843",
        "wrong": "#D7191C",
        "broken": "#702038",
        "never gained": "#2C3600",
        "expert wrong": "#206D65",
    },
    sequential=("#FBF3E0", "#F3CF92", "#E89B57", "#C8603C", "#8A3142", "#3F1538"),
    diverging=("#0B2A5B", "#2F6DB0", "#A9CBE6", "#F6F6F6", "#F9C79B", "#EE8A3C", "#C55200"),
    tones={"good": "#00694B", "mixed": "#7A5C00", "bad": "#B3261E"},
)
DARK = Palette(
    surface="#161616",
    ink="#EDEDED",
    quiet="#B0B0B0",
    grid="#363636",
    gap="#4A4A4A",
    roles={
        "base": "#F1F1F1",
        "expert": "#7FA8FF",
        "merged": "#A4A4A4",
        "featcal": "#EE7C26",
        "residual": "#8A63D2",
        "surgery": "#6FCFE5",
        "prob_surgery": "#448AB0",
        "calibrated": "#A8537F",
        "baseline": "#DABA79",
    },
    outcomes={
        "right": "#4DB56A",
        "repaired": "#B4F531",
        "wrong": "#EF3B3B",
        "broken": "#9C4A55",
        "never gained": "#EDED89",
        "expert wrong": "#55F4D4",
    },
    sequential=("#24182E", "#552449", "#913A4A", "#CC663F", "#EBA45F", "#FBE9BE"),
    diverging=("#7FB4F0", "#3F7CC4", "#1F416B", "#232323", "#7A3E10", "#CF7420", "#FFC98A"),
    tones={"good": "#5FD0A5", "mixed": "#F0C75E", "bad": "#FF9A8A"},
)
# Colours that tell classes apart in the light and the dark theme, in addition to markers.
CLASSES = (
    ("#0072B2", "#D55E00", "#00805D", "#B0407F", "#6D1FD0", "#7A5C00", "#1B1B1B"),
    ("#56B4E9", "#E69F00", "#2FC79A", "#E08BC0", "#B08CFF", "#F0E442", "#EDEDED"),
)


def palette(dark: bool) -> Palette:
    """Return the colours of the dark or the light theme."""
    return DARK if dark else LIGHT


@dataclass(frozen=True)
class VariantStyle:
    """The plot style of one variant: colour, marker and dash."""

    colour: str
    symbol: str
    dash: str


# By role, the first symbol and dash; further variants of the role take the next ones.
_SYMBOLS = (
    *("triangle-up", "circle", "square", "diamond", "triangle-down", "pentagon", "bowtie", "octagon"),
    *("hexagon", "cross", "x", "star"),
)
_DASHES = ("dot", "longdash", "dash", "solid", "10px,2px", "8px,2px,2px,2px", "2px,2px", "12px,4px", "dashdot")


def colour_role(roles: Mapping[str, str], variant: str) -> str:
    """Return the key of a variant's colour in `Palette.roles`.

    Args:
        roles: the variants' roles, see `DriftRun.roles`; a method without a colour has that of `calibrated`.
        variant: the variant; one without a role has that of its kind.
    """
    kind = variant_kind(variant)
    role = roles.get(variant, kind)
    return role if role in LIGHT.roles else kind


def variant_style(roles: Mapping[str, str], variant: str, *, dark: bool) -> VariantStyle:
    """Return the plot style of `variant`: its role's, darker or lighter for further variants of the same role.

    Args:
        roles: all variants of the run with their roles, see `DriftRun.roles`.
        variant: the variant to draw.
        dark: True for the dark theme.
    """
    theme, role = palette(dark), colour_role(roles, variant)
    alike = [name for name in roles if colour_role(roles, name) == role]
    rank, place = alike.index(variant) if variant in alike else 0, [*theme.roles].index(role)
    return VariantStyle(
        _mix_colours(theme.roles[role], theme.ink, 0.3 * (rank % 3)),
        _SYMBOLS[(place + rank) % len(_SYMBOLS)],
        _DASHES[(place + rank) % len(_DASHES)],
    )


def _mix_colours(colour: str, other: str, share: float) -> str:
    """Return `colour` with a share in [0, 1] of another one; both as #RRGGBB."""
    pairs = zip(hex_to_rgb(colour), hex_to_rgb(other), strict=True)
    return "#" + "".join(f"{round(one + (two - one) * share):02X}" for one, two in pairs)


def with_opacity(colour: str, opacity: float) -> str:
    """Return `colour` (#RRGGBB) as an rgba colour with an opacity in [0, 1]."""
    red, green, blue = hex_to_rgb(colour)
    return f"rgba({red},{green},{blue},{opacity:g})"


def themed_figure(*traces: Any, dark: bool, height: int, **settings: Any) -> go.Figure:
    """Return a plotly figure with the theme's layout, updated by `settings`.

    Args:
        traces: traces of the figure.
        dark: True for the dark theme.
        height: height in pixels.
        settings: further layout settings.
    """
    return go.Figure([*traces], deep_merge(theme_layout(dark), {"height": height, **settings}))


def deep_merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings recursively; values of `new` win."""
    both = {
        name: deep_merge(old[name], new[name])
        for name in old.keys() & new.keys()
        if isinstance(old[name], Mapping) and isinstance(new[name], Mapping)
    }
    return {**old, **new, **both}


def theme_layout(dark: bool) -> dict[str, Any]:
    """Return the plotly layout settings of the light or the dark theme."""
    colours = palette(dark)
    axis = {
        "gridcolor": colours.grid,
        "linecolor": colours.quiet,
        "zerolinecolor": colours.quiet,
        "zerolinewidth": 1,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": colours.quiet,
        "tickfont": {"size": SMALL, "color": colours.ink},
        "title": {"font": {"size": SMALL, "color": colours.ink}, "standoff": 8},
        "automargin": True,
    }
    return {
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "autosize": True,
        "font": {"family": _FONT, "size": SMALL, "color": colours.ink},
        "paper_bgcolor": colours.surface,
        "plot_bgcolor": colours.surface,
        "margin": {"l": 68, "r": 16, "t": 24, "b": 52},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "top",
            "y": 1,
            "xanchor": "left",
            "x": 0,
            "font": {"size": SIZE},
            "bgcolor": with_opacity(colours.surface, 0),
        },
        "hoverlabel": {
            "bgcolor": colours.surface,
            "bordercolor": colours.quiet,
            "font": {"family": _FONT, "size": SIZE, "color": colours.ink},
            "align": "left",
            # Plotly cuts names at 15 letters by default.
            "namelength": -1,
        },
        "hovermode": "closest",
    }


# Settings of a legend whose marks are larger than the points of a cloud.
LARGE_MARKS = {"itemsizing": "constant"}


class TraceSettings(dict[str, Any]):
    """Settings of a plotly trace as a dict, validated once with the figure instead of on every update."""

    def update(self, **settings: Any) -> TraceSettings:  # type: ignore[override]
        """Merge settings into the trace recursively and return it."""
        super().update(deep_merge(self, settings))
        return self


scatter, bar, heatmap = (partial(TraceSettings, type=kind) for kind in ("scatter", "bar", "heatmap"))

# The low and high ends of intervals, a row each.
Ends = tuple["pd.Series[Any]", "pd.Series[Any]"]

# Points that a browser still draws and moves smoothly as SVG; more are drawn with WebGL, which few figures of a
# page may use, and which takes a quarter of a second to start without a graphics processor.
_MOST_SVG = 5000


@dataclass(frozen=True)
class VariantPlotter:
    """Creates the traces of a run's variants, each in its style and with one legend entry per figure."""

    roles: Mapping[str, str]
    dark: bool
    _in_legend: set[str] = field(default_factory=set, init=False)

    @property
    def palette(self) -> Palette:
        """The colours of the figure's theme."""
        return palette(self.dark)

    def style_of(self, variant: str) -> VariantStyle:
        """Return the plot style of a variant."""
        return variant_style(self.roles, variant, dark=self.dark)

    def legend_settings(self, group: str, name: str = "") -> dict[str, Any]:
        """Return trace settings by which traces of one group share one legend entry."""
        is_first = group not in self._in_legend
        self._in_legend.add(group)
        return {"name": name or variant_label(group), "legendgroup": group, "showlegend": is_first}

    def line(
        self,
        variant: str,
        x: Iterable[Any],
        y: pd.Series[Any],
        ends: Ends | None = None,
        **changes: Any,
    ) -> TraceSettings:
        """Return the values of a variant as a line trace that breaks at missing values; `ends` are of whiskers."""
        style, values = self.style_of(variant), y.astype(float)
        trace = scatter(
            **{"x": list(x), "y": _nan_to_none(values), "mode": "lines+markers", "connectgaps": False},
            line={"color": style.colour, "dash": style.dash, "width": 2},
            marker={"color": style.colour, "symbol": style.symbol, "size": 6},
            error_y=error_bars(values, *ends, style.colour) if ends else None,
            **self.legend_settings(variant),
        )
        return trace.update(**changes)

    def bars(
        self,
        variant: str,
        x: Iterable[Any],
        y: pd.Series[Any],
        ends: Ends | None = None,
        **changes: Any,
    ) -> TraceSettings:
        """Return the values of a variant as a bar trace; `ends` are of whiskers."""
        values, style = y.astype(float), self.style_of(variant)
        trace = bar(
            x=list(x),
            y=_nan_to_none(values),
            marker={"color": style.colour},
            textposition="none",
            error_y=error_bars(values, *ends, self.palette.ink) if ends else None,
            **self.legend_settings(variant),
        )
        return trace.update(**changes)

    def scatter_trace(
        self, variant: str, x: pd.Series[Any], y: pd.Series[Any], *, total: int, **settings: Any
    ) -> TraceSettings:
        """Return the samples of a variant as a scatter trace.

        Args:
            variant: the variant.
            x: horizontal positions.
            y: vertical positions.
            total: points in the whole figure; many are drawn with WebGL.
            settings: further settings of the trace.
        """
        kind, style = "scatter" if total <= _MOST_SVG else "scattergl", self.style_of(variant)
        marker = {
            "color": style.colour,
            "symbol": style.symbol,
            "size": 5,
            "opacity": 0.7,
            "line": {"width": 0},
        }
        places = {"x": x.to_numpy(dtype=float), "y": y.to_numpy(dtype=float)}
        trace = TraceSettings(type=kind, **places, mode="markers", marker=marker, **self.legend_settings(variant))
        return trace.update(**settings)


def _nan_to_none(values: Iterable[Any]) -> list[Any]:
    """Replace missing values by None, at which plotly breaks lines and leaves out bars."""
    return [None if pd.isna(value) else value for value in values]


def error_bars(values: pd.Series[Any], low: pd.Series[Any], high: pd.Series[Any], colour: str) -> dict[str, Any]:
    """Return plotly error bars from `low` to `high` around the values; none where an end is missing."""
    up, down = high.astype(float) - values, values - low.astype(float)
    return {
        "array": _nan_to_none(up),
        "arrayminus": _nan_to_none(down),
        "color": colour,
        "thickness": 1,
        "width": 3,
    }


def interval_hover_texts(
    rows: pd.DataFrame,
    low: str,
    high: str,
    name: str = "95 % interval",
    write: Callable[[float], str] = format_percent,
) -> list[str]:
    """Return hover text with the interval of each row; empty where it was not measured.

    Args:
        rows: rows with both columns.
        low: column of the lower end.
        high: column of the upper end.
        name: name of the interval.
        write: formats an end.
    """
    ends = rows.reindex(columns=[low, high]).astype(float).to_numpy().tolist()
    return [
        "" if math.isnan(start + end) else f"<br>{escape_plotly(f'{name}: {write(start)} to {write(end)}')}"
        for start, end in ends
    ]


def category_axis(names: Sequence[str], longest: int = LONGEST) -> dict[str, Any]:
    """Return plotly settings of a categorical axis with names in the given order, shortened to `longest` letters."""
    shown = [escape_plotly(name) for name in names]
    return {
        **{"type": "category", "categoryorder": "array", "categoryarray": shown},
        **{"tickvals": shown, "ticktext": [escaped_label(name, longest) for name in names], "showgrid": False},
    }


def text_font(*, dark: bool) -> dict[str, Any]:
    """Return the font of text inside a plotly figure."""
    return {"size": SMALL, "color": palette(dark).ink}


def escape_column(names: pd.Series[Any]) -> pd.Series[Any]:
    """Escape every name of a column for plotly."""
    # Escaped once per name instead of once per point.
    safe = {name: escape_plotly(str(name)) for name in names.unique()}
    return names.map(safe).astype(object)
