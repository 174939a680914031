"""Charts over layers: curves with bands and gaps, a heat map of contributions, and curves of the dashboard alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.results.compare import Comparison
from driftlens.results.formatting import format_error, format_number, format_percent
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import LAYERS
from driftlens.utils.errors import DataError, pluralize
from driftlens.utils.variants import calibrated_variant
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_AROUND_ZERO = {"tickformat": theme.TICK_NUMBER, "autorangeoptions": {"include": [0.0]}}
# Half the width, in layers, of a band with no neighbour.
_LONE = 0.2


@dataclass(frozen=True)
class CurvePanel:
    """One panel of curves over layers; `band` and `error` name the columns of interval ends.

    `splits_head`: values compare within one feature space only, so the head has a value axis on the right.
    """

    column: str
    title: str
    axis: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    band: Sequence[str] = ()
    error: Sequence[str] = ()
    markers: tuple[str, str] | None = None
    line: float | None = None
    splits_head: bool = False

    def traces(
        self, rows: pd.DataFrame, brush: theme.VariantPlotter, *, opacity: float
    ) -> Iterator[theme.TraceSettings]:
        """Yield the plotly traces of one variant on one task, which share a legend entry."""
        rows = panels.insert_stream_gaps(rows)
        task, variant, layers = rows["task"].iloc[0], str(rows["variant"].iloc[0]), rows["layer"]
        if self.band:
            yield shaded_band(rows, self.band[0], self.band[1], brush, opacity=opacity)
        ends = (rows[self.error[0]], rows[self.error[1]]) if self.error else None
        hover = {"text": [words.escape_plotly(f"{task}, {where}") for where in rows["where"]]}
        template = f"%{{text}}<br>{self.column} %{{y:{theme.NUMBER}}}"
        yield brush.line(variant, layers, rows[self.column], ends, hovertemplate=template, **hover)
        if self.markers:
            column, meaning = self.markers
            style, template = brush.style_of(variant), f"%{{text}}<br>{meaning} %{{y:{theme.NUMBER}}}"
            marker = {"color": style.colour, "symbol": f"{style.symbol}-open", "size": 7}
            hover |= {"mode": "markers", "marker": marker}
            hover |= {**brush.legend_settings(column, f"{column} (open)"), "legendrank": 2000}
            yield brush.line(variant, layers, rows[column], hovertemplate=template, **hover)


def separate_head(run: DriftRun, layers: pd.Series[Any]) -> pd.Series[bool]:
    """Return True for rows of the head; False for all if there is no other layer to tell it from."""
    heads = [layer.index for layer in run.manifest.layers if layer.role == "head"]
    return layers.isin(heads) & ~layers.isin(heads).all()


def draw_layer_curves(
    run: DriftRun,
    rows: pd.DataFrame,
    *kinds: CurvePanel,
    dark: bool,
    roles: Mapping[str, str] = MappingProxyType({}),
    below: Mapping[bool, Sequence[theme.TraceSettings]] = MappingProxyType({}),
    **settings: Any,
) -> go.Figure:
    """Draw curves over layers: one row of panels per task, one panel of each kind per row.

    Args:
        run: the run that the rows belong to.
        rows: rows of the layer table.
        kinds: what each panel of a row shows.
        dark: True for the dark theme.
        roles: all variants with their roles, which decide colours; those of the run if empty.
        below: traces under the curves of the first panel, of the head under True, of other layers under False.
        settings: further arguments of `panel_grid`.
    """
    tasks, shown = list(rows["task"].unique()), list(rows["variant"].unique())
    rows = picking.add_layer_names(run, rows)
    placed: dict[str, Any] = {"titles": [*map(words.escaped_label, tasks)]}
    if len(kinds) > 1:
        titles = [
            f"{words.escaped_label(task, words.LONGEST_OF_TWO)}: {kind.name}" for task in tasks for kind in kinds
        ]
        placed = {"titles": titles, "columns": len(kinds), "height": 150}
    grid = panels.panel_grid(
        **{**placed, **settings},
        x_title=panels.layer_axis_title(run),
        y_titles=[kind.title for kind in kinds],
        legend=[*map(words.variant_label, shown), *(f"{kind.markers[0]} (open)" for kind in kinds if kind.markers)],
        dark=dark,
    )
    opacity = min(0.14, 0.5 / max(1, len(shown)))  # the more bands lie over one another, the less
    brush = theme.VariantPlotter(roles or run.roles, dark)
    for is_head, traces in below.items():
        grid.add(0, *traces, right=is_head)
    heads = separate_head(run, rows["layer"])
    for (task, _), line in rows.groupby(["task", "variant"], sort=False):
        for column, kind in enumerate(kinds):
            is_apart = heads.loc[line.index] & kind.splits_head
            for part, right in ((line[~is_apart], False), (line[is_apart], True)):
                if len(part):
                    panel = tasks.index(task) * len(kinds) + column
                    grid.add(panel, *kind.traces(part, brush, opacity=opacity), right=right)
    grid.add_reference_lines("x", *panels.stream_boundaries(rows))
    border = min(rows.loc[heads, "layer"], default=0) - 0.5
    for panel in range(len(tasks) * len(kinds)):
        kind = kinds[panel % len(kinds)]
        is_split = kind.splits_head and heads.any()
        if is_split:
            _add_head_axis(grid, panel, kind, has_labels=len(kinds) > 1 or grid.is_last_of_row(panel))
            grid.add_reference_lines("x", border, panel=panel)
        if kind.line is not None:
            grid.add_reference_lines("y", kind.line, panel=panel, ends=(0.5, border) if is_split else ())
    grid.set_axes(x=panels.layer_axis_settings(run), y=[kind.axis for kind in kinds])
    return grid.figure


def _add_head_axis(grid: panels.PanelGrid, panel: int, kind: CurvePanel, *, has_labels: bool) -> None:
    """Give a panel a right axis for the head, with the scale of the other panels of its kind."""
    first = 0 if grid.kinds == 1 or not kind.name or "matches" in kind.axis else panel % grid.kinds
    # A linear axis starts at 0, and needs no level of the other layers.
    axis = {**kind.axis, "rangemode": "tozero", "autorangeoptions": None} if kind.line is not None else kind.axis
    unit = kind.title.rpartition(" (")[2]
    title = {"text": f"head ({unit}", "standoff": 2} if has_labels else None
    grid.add_right_axis(panel, first, **{**axis, "showticklabels": has_labels, "title": title, "nticks": 4})


def shaded_band(
    rows: pd.DataFrame, low: str, high: str, brush: theme.VariantPlotter, *, opacity: float
) -> theme.TraceSettings:
    """Return a shaded area between two columns over layers, with a gap where a number is missing.

    Args:
        rows: rows of one variant and task.
        low: column of the lower end.
        high: column of the upper end.
        brush: the colours of the figure.
        opacity: of the area, in [0, 1].
    """
    variant = str(rows["variant"].iloc[0])
    x: list[float | None] = []
    y: list[float | None] = []
    values = rows[["layer", low, high]].astype(float).to_numpy().tolist()
    for is_gap, run in itertools.groupby(values, lambda row: any(map(math.isnan, row))):
        if is_gap:
            continue
        layers, lows, highs = map(list, zip(*run, strict=True))
        # A single layer has no area without some width.
        if len(layers) == 1:
            layers, lows, highs = [layers[0] - _LONE, layers[0] + _LONE], lows * 2, highs * 2
        # Forward along the low ends, back along the high ones; None separates areas.
        x += [*layers, *reversed(layers), None]
        y += [*lows, *reversed(highs), None]
    return theme.scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=theme.with_opacity(brush.style_of(variant).colour, opacity),
        legendgroup=variant,
        showlegend=False,
        hoverinfo="skip",
    )


def _finish_layer_chart(
    run: DriftRun,
    figure: go.Figure,
    rows: pd.DataFrame,
    *columns: str,
    alt: str,
    notes: Sequence[str] = (),
) -> Drawn:
    data = rows[["task", "variant", "layer", "role", "path", "n", *columns]]
    return Drawn(figure, alt, data, (*words.layer_sample_notes(run, rows), *notes))


_DRIFTS = {
    **{"drift_l2_mean": "mean drift", "drift_rel": "relative drift"},
    **{"drift_l2_q10": "10 % quantile", "drift_l2_q90": "90 % quantile"},
}


def _drift_column(options: ChartOptions) -> tuple[str, str]:
    """Return the column of the chosen drift, relative or absolute, and its title."""
    return ("drift_rel", "drift / expert norm") if options.relative else ("drift_l2_mean", "mean L2 drift")


@chart(
    "layer-drift",
    title="Drift by layer",
    section="drift",
    rank=10,
    presets=("summary", "standard", "calibration"),
    needs=("layers", ("drift_l2_mean",)),
    caption="Drift from the task's expert after each layer: mean and band over diagnosis samples, one panel per task.",
    hint="Calibration helps where its line is below that of merged. Feature scales differ between layers, so a rise is "
    "not a fault by itself: see relative drift, and amplification for inherited drift (full state).",
)
def _draw_layer_drift(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = picking.layer_rows(run, options).rename(columns=_DRIFTS)
    source, quantity = _drift_column(options)
    band, note = ("10 % quantile", "90 % quantile"), "Band: 10 % to 90 % quantiles over samples."
    if options.relative:
        band, note = (), "Relative drift is a ratio of sums over samples, without a band."
    title, axis = panels.title_with_unit(quantity, "layers", source), panels.value_axis_settings(options)
    kind = CurvePanel(_DRIFTS[source], title, axis, band=band, splits_head=not options.relative)
    figure = draw_layer_curves(run, rows, kind, dark=options.dark)
    alt = f"{quantity[0].upper()}{quantity[1:]} by layer. {words.final_layer_sentence(rows, kind.column)}"
    return _finish_layer_chart(run, figure, rows, kind.column, *band, alt=alt, notes=[note])


_PARTS = {
    "mismatch": ("mismatch_l2_mean", "|m|"),
    "propagation": ("propagation_l2_mean", "|p|"),
    "cross term": ("cross_term", "2⟨m, p⟩ / |e|²"),
}


@chart(
    "decomposition",
    title="Mismatch and propagation",
    section="mismatch",
    rank=10,
    presets=("standard",),
    needs=("layers", ("mismatch_l2_mean", "propagation_l2_mean", "cross_term")),
    caption="Local mismatch m (the layer's own error), propagation p (inherited error) and their cross term, by "
    "layer. Mean norms over diagnosis samples; the cross term is a ratio of sums.",
    hint="Large m: the layer's own weights are at fault. Large p: it passes on earlier errors. Where the cross term is "
    "positive the two add up, where negative they cancel in part. Norms of m and p do not sum to the drift; "
    "contributions do.",
)
def _draw_decomposition(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = picking.layer_rows(run, options).rename(columns={source: name for name, (source, _) in _PARTS.items()})
    norms = panels.value_axis_settings(options)
    axes = [norms, {**norms, "matches": "y"}, _AROUND_ZERO]  # norms in one unit compare
    kinds = [
        CurvePanel(
            name, panels.title_with_unit(quantity, "layers", source), axis, name, line=line, splits_head=line is None
        )
        for (name, (source, quantity)), axis, line in zip(_PARTS.items(), axes, (None, None, 0.0), strict=True)
    ]
    figure = draw_layer_curves(run, rows, *kinds, dark=options.dark)
    alt = "Local mismatch, propagation and cross term by layer. "
    alt += f"Mismatch: {words.peak_sentence(rows, 'mismatch')} Propagation: {words.peak_sentence(rows, 'propagation')}"
    return _finish_layer_chart(run, figure, rows, "reference", *_PARTS, alt=alt)


_GAINS = {
    **{"amplification_low": "amplification low", "amplification_high": "amplification high"},
    **{"random_gain_mean": "random gain", "jacobian_error": "Jacobian error"},
    "jacobian_samples": "jacobian samples",
}


@chart(
    "amplification",
    title="Amplification",
    section="amplification",
    rank=20,
    presets=("standard",),
    needs=("layers", ("amplification",)),
    caption="Norm of the propagated drift relative to the incoming drift; open markers: mean gain on random "
    "directions. Ratios of sums over diagnosis samples; band: relative error of the path-averaged "
    "Jacobian.",
    hint="Above 1 a layer enlarges inherited drift, below 1 it damps it. Far above the open markers, it enlarges the "
    "drift's direction more than a random one. The stem inherits nothing. A visible band means that the Jacobian "
    "does not explain the layer.",
)
def _draw_amplification(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = picking.layer_rows(run, options).rename(columns=_GAINS)
    center, spread = rows["amplification"].astype(float), rows["Jacobian error"].astype(float)
    rows = rows.assign(lower=center * (1 - spread), upper=center * (1 + spread))
    ends = [name for name in ("amplification low", "amplification high") if rows[name].notna().any()]
    kind = CurvePanel(
        "amplification",
        error=ends,
        title=panels.title_with_unit("amplification", "layers", "amplification"),
        axis=panels.value_axis_settings(options, zero=False, include=[1.0]),
        band=("lower", "upper"),
        markers=("random gain", "mean gain on random directions"),
        line=1.0,
        splits_head=True,
    )
    note = "Without Jacobians there is no band and no random gain."
    if spread.notna().any():
        note = f"Largest Jacobian error {format_error(float(spread.max()))}, relative to the propagation."
    figure = draw_layer_curves(run, rows, kind, dark=options.dark)
    columns = ("amplification", *ends, "lower", "upper", "random gain", "Jacobian error", "jacobian samples")
    note = f"Whiskers: 95 % bootstrap intervals over samples. {note}" if ends else note
    alt = f"Amplification by layer, with a line at 1. {words.peak_sentence(rows, 'amplification')}"
    return _finish_layer_chart(run, figure, rows, *columns, alt=alt, notes=[note])


CONTRIBUTED, REST = "share of final drift", "remainder"
_SHARE_LOW, _SHARE_HIGH = f"{CONTRIBUTED} low", f"{CONTRIBUTED} high"
_SHARES = {
    "final_share": CONTRIBUTED,
    "final_share_low": _SHARE_LOW,
    "final_share_high": _SHARE_HIGH,
    "remainder_share": REST,
}
# Pixels: of a row of cells, and of a panel.
_ROW, _LEAST = 26, 72
# Pixels of the colour bar below the panels, with its title and numbers.
_BAR_BELOW = 66


@chart(
    "contributions-heatmap",
    title="Contributions by task and layer",
    section="contributions",
    rank=20,
    presets=("standard",),
    needs=("layers", ("final_share",)),
    caption="Signed share of the final drift from each layer's local mismatch, by task and layer; last column: "
    "remainder. Ratios of sums over diagnosis samples, one panel per variant.",
    hint="Orange layers cause final drift, blue ones reduce it. Each row sums to 100 % with its remainder; a large "
    "remainder means that the quadrature of the Jacobians was too coarse.",
)
def _draw_contributions_heatmap(run: DriftRun, options: ChartOptions) -> Drawn:
    rows = picking.layer_rows(run, options).rename(columns=_SHARES)
    rows = rows[rows[CONTRIBUTED].notna().groupby(rows["variant"]).transform("any")]
    ends = [name for name in (_SHARE_LOW, _SHARE_HIGH) if rows[name].notna().any()]
    figure = _draw_share_heatmaps(run, rows, dark=options.dark)
    peaks = words.peak_sentence(rows, CONTRIBUTED, format_percent)
    alt = f"Heatmap of signed shares of the final drift by task and layer. {peaks}"
    notes = words.empty_cell_notes(run, rows, CONTRIBUTED)
    return _finish_layer_chart(run, figure, rows, CONTRIBUTED, *ends, REST, alt=alt, notes=notes)


def _draw_share_heatmaps(run: DriftRun, rows: pd.DataFrame, *, dark: bool) -> go.Figure:
    """Draw heatmaps of drift shares (task by layer), one per variant, with a common colour bar."""
    # Layers without rows are gaps too: left out, their neighbours' cells would grow over them.
    layers = [layer.index for layer in run.manifest.layers]
    # The remainder is a column after the last layer.
    columns = [*layers, layers[-1] + 1]
    tasks, variants = list(dict.fromkeys(rows["task"])), rows["variant"].unique()
    rows = rows.assign(interval=theme.interval_hover_texts(rows, _SHARE_LOW, _SHARE_HIGH))
    wide = rows.pivot(index=["variant", "task"], columns="layer", values=[CONTRIBUTED, "interval"])
    rest = rows.groupby(["variant", "task"])[REST].max()
    grid = panels.panel_grid(
        [words.variant_label(str(variant)) for variant in variants],
        x_title=panels.layer_axis_title(run),
        y_titles=["task"],
        columns=1,
        height=max(_ROW * len(tasks) + 8, _LEAST),
        legend=None,
        dark=dark,
    )
    places = [words.escape_plotly(run.layer_name(layer)) for layer in layers]
    texts = [[f"{words.escape_plotly(task)}, {place}" for place in (*places, REST)] for task in tasks]
    # Cells of more layers have no room for numbers.
    has_numbers = len(layers) <= 16 and not panels.has_stacked_panels()
    for index, variant in enumerate(variants):
        table = wide.loc[variant].reindex(tasks)
        shares = table[CONTRIBUTED].reindex(columns=layers).assign(**{REST: rest.loc[variant]})
        cells = theme.heatmap(
            x=columns,
            y=list(range(len(tasks))),
            z=shares.to_numpy(dtype=float),
            xgap=1,
            ygap=1,
            hoverongaps=False,
            coloraxis="coloraxis",
            text=texts,
            texttemplate="%{z:.0%}" if has_numbers else None,
            textfont={"size": theme.SMALL - 1},
            hovertext=table["interval"].fillna("").reindex(columns=columns, fill_value="").to_numpy().tolist(),
            hovertemplate=f"%{{text}}<br>%{{z:{theme.SHARE}}}%{{hovertext}}<extra></extra>",
        )
        grid.add(index, cells)
    grid.add_reference_lines("x", *panels.stream_boundaries(run.layers()))
    longest = words.LONGEST_OF_TWO if panels.has_stacked_panels() else words.LONGEST
    names = [words.escaped_label(task, longest) for task in tasks]
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
    first_on_top = {"range": [len(names) - 0.5, -0.5]}
    grid.set_axes(x={**panels.layer_axis_settings(run, "rest"), "showgrid": False}, y={**ticks, **first_on_top})
    height, margin = grid.layout["height"], grid.layout["margin"]
    bar = {
        **{"thickness": 14, "outlinewidth": 0, "tickformat": theme.SHARE, "orientation": "h"},
        "title": {"text": "share of final drift (%)", "side": "top"},
        # Measured from the container, a low chart would have no room left for its cells.
        **{"y": -margin["b"] / (height - margin["t"] - margin["b"]), "yanchor": "top"},
    }
    # One symmetric scale for all panels: colours compare, and the middle is 0.
    highest = float(rows[[CONTRIBUTED, REST]].astype(float).abs().max(axis=None))
    ends = {"cmin": -highest, "cmax": highest, "colorscale": theme.palette(dark).diverging}
    grid.update_layout(
        plot_bgcolor=theme.palette(dark).gap,
        height=height + _BAR_BELOW,
        margin={"b": margin["b"] + _BAR_BELOW},
        coloraxis={**ends, "colorbar": bar},
    )
    return grid.figure


_MEAN, _CHANGE = "mean drift", "change of mean drift"


def draw_mean_drift(run: DriftRun, options: ChartOptions) -> Drawn:
    """Draw the mean drift over tasks by layer: a thick line per variant, a thin one per task."""
    column, quantity = _drift_column(options)
    # The mean is over all tasks; chosen ones are only emphasised.
    rows = picking.layer_rows(run, replace(options, tasks=None))
    if not rows[column].notna().any():
        raise DataError("no drift was measured in this run", hint=f"`{LAYERS.command_to_fill([column])}` adds it.")
    kind = CurvePanel(
        _MEAN,
        panels.title_with_unit(quantity, "layers", column),
        panels.value_axis_settings(options),
        splits_head=not options.relative,
    )
    by_task = rows.pivot_table(index=["variant", "layer"], columns="task", values=column, sort=False)
    # A mean over fewer tasks would jump.
    means = by_task.mean(axis=1, skipna=False).rename(_MEAN).reset_index()
    means = picking.filter_and_sort(means.assign(task="mean over tasks"), ["mean over tasks"], run.variants)
    means = _add_layer_columns(run, means)
    where = {layer: words.escape_plotly(place) for layer, place in zip(rows["layer"], rows["where"], strict=True)}
    is_head = separate_head(run, by_task.index.get_level_values("layer").to_series(by_task.index)) & kind.splits_head
    thin = {
        right: _thin_task_curves(run, part, where, options, mode="markers" if right else "lines")
        for right, part in ((False, by_task[~is_head]), (True, by_task[is_head]))
        if len(part)
    }
    figure = draw_layer_curves(run, means, kind, dark=options.dark, below=thin, titles=[""])
    # Zoom is kept when tasks or theme change, not when the unit does.
    figure.layout.uirevision = f"{run.id} mean {options.relative}"
    alt = f"{quantity[0].upper()}{quantity[1:]} by layer, mean over tasks. {words.final_layer_sentence(means, _MEAN)}"
    return Drawn(
        figure,
        alt,
        data=means[["variant", "layer", "role", "path", _MEAN]],
        notes=(f"Thick: mean over {pluralize(len(run.tasks), 'task')}; thin: each task.",),
    )


def _thin_task_curves(
    run: DriftRun, by_task: pd.DataFrame, where: Mapping[int, str], options: ChartOptions, mode: str
) -> list[theme.TraceSettings]:
    """Return one thin drift curve per task; the selected tasks are emphasised."""
    selected = set(options.tasks or ())
    brush = theme.VariantPlotter(run.roles, options.dark)
    thin = []
    for (variant, values), is_chosen in itertools.product(
        by_task.reset_index("layer").groupby("variant", sort=False), (False, True)
    ):
        tasks = [task for task in by_task if (task in selected) == is_chosen]
        if not tasks:
            continue
        thin.append(
            brush.line(
                str(variant),
                # One trace for all tasks, as each has its price.
                [*values["layer"], None] * len(tasks),
                pd.Series([value for task in tasks for value in (*values[task], math.nan)]),
                mode=mode,
                marker={"size": 3},
                line={"width": 1.5 if is_chosen else 0.75, "dash": None},
                opacity=1.0 if is_chosen else 0.45,
                showlegend=False,
                text=[*map(where.get, values["layer"]), ""] * len(tasks),
                customdata=[label for label in map(words.escaped_label, tasks) for _ in range(len(values) + 1)],
                hovertemplate=f"%{{customdata}}, {words.variant_label(str(variant))}: %{{y:{theme.NUMBER}}}, %{{text}}"
                "<extra></extra>",
            )
        )
    return thin


def draw_running_drift(
    run: DriftRun, name: str, drifts: Mapping[int, float], *, dark: bool, method: str = ""
) -> Drawn:
    """Draw the mean drift by layer of the merged model and of the layers calibrated so far by a running job.

    Args:
        run: the run.
        name: name of the calibration.
        drifts: mean drift by layer.
        dark: True for the dark theme.
        method: its method, which decides the colour; empty if its name begins with it.
    """
    measured, variant = run.layers(), calibrated_variant(name)
    merged = measured[measured["variant"] == "merged"].groupby("layer")["drift_l2_mean"].mean()
    lines = {"merged": merged, variant: pd.Series(drifts, dtype=float).sort_index()}
    rows = pd.concat(lines, names=["variant", "layer"]).rename(_MEAN).reset_index()
    rows = _add_layer_columns(run, rows)
    rows = rows.fillna({"role": "layer", "path": ""}).assign(task="mean over tasks")
    title = panels.title_with_unit("mean L2 drift", "layers", "drift_l2_mean")
    kind = CurvePanel(_MEAN, title, panels.value_axis_settings(ChartOptions()), splits_head=True)
    # The style depends on the variants before it, so the line keeps it after the calibration.
    roles = {variant: method or name.partition("-")[0]} | run.roles
    roles = {**run.roles, variant: roles[variant]}
    figure = draw_layer_curves(run, rows, kind, dark=dark, roles=roles, titles=[""])
    figure.layout.uirevision = f"{run.id} running {name}"
    state = "No layer is calibrated yet."
    if drifts:
        layer = max(drifts)
        before = f", merged {format_number(float(merged[layer]))}" if layer in merged else ""
        done = f"{pluralize(len(drifts), 'layer')} of {len(run.manifest.layers)}"
        state = f"{done} so far; at {run.layer_name(layer)}: calibrated {format_number(drifts[layer])}{before}."
    return Drawn(
        figure,
        alt=f"Mean drift by layer while the calibration runs. {state}",
        data=rows[["variant", "layer", "role", "path", _MEAN]],
        notes=(
            "Mean over tasks.",
            "Merged: diagnosis samples; calibration: calibration samples.",
        ),
    )


def _add_layer_columns(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    layers = [{"layer": entry.index, "role": entry.role, "path": entry.path} for entry in run.manifest.layers]
    return picking.add_layer_names(run, rows.merge(pd.DataFrame(layers), on="layer", how="left"))


def draw_drift_change(comparison: Comparison, *, dark: bool) -> Drawn:
    """Draw the change of mean drift by layer between two runs: a panel per task, a line per pair of variants."""
    run = comparison.after
    # The compared layers as rows of a layer table, each pair under the name of the variant after.
    rows = comparison.layers.rename(columns={"after": "variant", "drift_change": _CHANGE})
    kind = CurvePanel(
        _CHANGE, "change of L2 drift (feature units)", {"tickformat": theme.TICK_NUMBER}, line=0.0, splits_head=True
    )
    text, last = "Nothing was measured at the last layer.", rows[rows["layer"] == rows["layer"].max()]
    change = last[_CHANGE].dropna()
    if len(change):
        fewer, mean = int((change < 0).sum()), format_number(float(change.mean()))
        text = f"At the last layer it falls in {fewer} of {len(change)} comparisons; the mean change is {mean}."
    figure = draw_layer_curves(run, rows, kind, dark=dark)
    figure.layout.uirevision = f"{comparison.before.id} {comparison.after.id} {comparison.pairs}"
    return Drawn(
        figure,
        alt=f"Change of mean drift by layer. {text}",
        data=comparison.layers,
        notes=("Mean over diagnosis samples, after minus before: below zero is an improvement.",),
    )
