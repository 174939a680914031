"""The picture of e = m + p: how much of each layer's drift is its own mismatch, and how much is inherited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pandas as pd

from driftlens.results.formatting import format_number
from driftlens.results.verdict import shown_repair
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import RunError, pluralize, start_sentence
from driftlens.utils.variants import calibration_name
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import shaded_band

_DRIFT, _OWN, _INHERITED = "relative drift", "m along e", "p along e"
_PARTS = {_INHERITED: "propagation p", _OWN: "local mismatch m"}
_OPACITY = {_INHERITED: 0.22, _OWN: 0.75}
_ALL = "mean over tasks"
# Distance of the head's bar from the last block, and its width, in layers.
_HEAD_GAP, _HEAD_WIDTH = 0.75, 0.5


def drift_parts_by_task(run: DriftRun) -> pd.DataFrame:
    """Return each layer's relative drift by task and variant, split into mismatch and propagation along the drift.

    The norms of m and p don't add up to |e|, but their components along e do: <m, e> / |e| + <p, e> / |e| = |e|. With
    e = m + p, <m, e> = (|e|^2 + |m|^2 - |p|^2) / 2, so the stored norms of each sample are enough.
    """
    samples = run.samples()[["task", "variant", "layer", "drift_l2", "mismatch_l2", "propagation_l2"]]
    drift, own, inherited = (samples[name].astype(float) for name in samples.columns[3:])
    samples = samples.assign(own=(drift + (own**2 - inherited**2) / drift.where(drift > 0)) / 2)
    # A sample without drift has no direction, and nothing to split.
    samples["own"] = samples["own"].mask(drift == 0, 0.0)
    keys = ["task", "variant", "layer"]
    sums = (
        samples.astype({"drift_l2": float})
        .groupby(keys, sort=False)[["drift_l2", "own"]]
        .agg(lambda column: column.sum(skipna=False))
    )
    rows = run.layers().merge(sums.reset_index(), on=keys, how="left")
    share = (rows["own"] / rows["drift_l2"].where(rows["drift_l2"] > 0)).mask(rows["drift_l2"] == 0, 0.0)
    relative = rows["drift_rel"].astype(float)
    return rows.assign(**{_DRIFT: relative, _OWN: share * relative, _INHERITED: (1 - share) * relative})


def compared_variants(run: DriftRun, options: ChartOptions) -> list[str]:
    """Return the chosen variants; by default the merged model and the repair that the verdict is on."""
    names = picking.chosen_variants(run, options)
    if options.variants is not None:
        return names
    merged = next((name for name in names if not calibration_name(name)), "")
    repairs = [name for name in names if calibration_name(name)]
    if len(repairs) > 1:
        # A damaged table of scores must not hide the drift.
        with contextlib.suppress(RunError):
            repairs = [shown_repair(run)]
    # Further variants would make the pair too small to compare.
    return [name for name in (merged, *repairs[-1:]) if name in names]


@chart(
    "drift-parts",
    title="Drift e = m + p by layer",
    section="drift",
    rank=5,
    presets=("standard", "calibration"),
    needs=("samples", ("drift_l2", "mismatch_l2", "propagation_l2")),
    caption="Line: relative drift e; strong: local mismatch m (the layer's own); faint: propagation p (inherited). "
    "Ratios of sums over diagnosis samples, mean over tasks; before and after repair, head apart.",
    hint="m and p are projected on e, sample by sample, so that the areas add up to the line exactly; their norms "
    "don't. Where the strong area lies below the line's faint one, m cancels part of p. Thick strong areas are the "
    "layers to repair.",
)
def _draw_drift_parts(run: DriftRun, options: ChartOptions) -> Drawn:
    names = compared_variants(run, options)
    tasks = picking.chosen_tasks(run, options)
    by_task = picking.filter_and_sort(drift_parts_by_task(run), tasks, names)
    columns = [_DRIFT, _OWN, _INHERITED]
    groups = by_task.groupby(["variant", "layer"], sort=False)
    # A mean over fewer tasks would jump.
    means = groups[columns].agg(lambda column: column.mean(skipna=False))
    rows = groups[["role", "path", *(["stream"] if "stream" in by_task else [])]].first().join(means).reset_index()
    rows = picking.add_layer_names(run, rows.assign(task=_ALL))
    shown = [name for name in names if rows.loc[rows["variant"] == name, _OWN].notna().any()]
    grid = panels.panel_grid(
        [words.variant_label(name) for name in shown],
        x_title=panels.layer_axis_title(run),
        y_titles=[panels.title_with_unit("drift / expert norm", "layers", "drift_rel")],
        columns=2,
        height=260,
        legend=[*_PARTS.values(), "drift e = m + p"],
        dark=options.dark,
    )
    brush = theme.VariantPlotter(run.roles, options.dark)
    for panel, name in enumerate(shown):
        grid.add(panel, *_panel_traces(rows[rows["variant"] == name], brush, in_legend=panel == 0))
    grid.add_reference_lines("x", *panels.stream_boundaries(rows))
    x = panels.layer_axis_settings(run)
    *ticks, last = x["tickvals"]
    x |= {"tickvals": [*ticks, last - 1 + _HEAD_GAP], "ticktext": [*map(str, ticks), "head"]}
    grid.set_axes(x=x, y={"rangemode": "tozero", "tickformat": theme.TICK_NUMBER})
    grid.update_layout(barmode="overlay")
    final = rows[rows["layer"] == rows["layer"].max()].set_index("variant").reindex(shown)
    parts = words.join_by_variant(
        (name, f"{format_number(final.at[name, _DRIFT])}, of which m {format_number(final.at[name, _OWN])}")
        for name in shown
    )
    over = f"mean over {pluralize(len(tasks), 'task')}" if len(tasks) > 1 else f"task {tasks[0]}"
    keys = ["task", "variant", "layer", "role", "path"]
    return Drawn(
        grid.figure,
        alt=f"Relative drift by layer as the sum of mismatch and propagation, {over}. At the last layer: {parts}.",
        data=pd.concat([rows[[*keys, *columns]], by_task[[*keys, *columns]]], ignore_index=True),
        notes=(
            f"{start_sentence(over)}; m and p are projected on e, so that they add up to it.",
            *words.layer_sample_notes(run, by_task),
        ),
    )


def _panel_traces(
    rows: pd.DataFrame, brush: theme.VariantPlotter, *, in_legend: bool
) -> Iterator[theme.TraceSettings]:
    """Yield the areas of m and p and the line of e over the layers, then the same as bars of the head."""
    variant = str(rows["variant"].iloc[0])
    colour = brush.style_of(variant).colour
    is_head = (rows["role"] == "head").to_numpy()
    blocks = panels.insert_stream_gaps(rows[~is_head]) if not is_head.all() else rows[~is_head]
    blocks = blocks.assign(zero=0 * blocks[_DRIFT])
    texts = [
        f"{words.escape_plotly(where)}<br>e {format_number(drift)} = m {format_number(own)} + p {format_number(rest)}"
        for where, drift, own, rest in rows[["where", _DRIFT, _OWN, _INHERITED]].itertuples(index=False)
    ]
    ends = {_INHERITED: ("zero", _INHERITED), _OWN: (_INHERITED, _DRIFT)}
    for part, (low, high) in ends.items() if len(blocks) else ():
        area = shaded_band(blocks, low, high, brush, opacity=_OPACITY[part])
        yield area.update(name=_PARTS[part], legendgroup=part, showlegend=in_legend)
    head = rows[is_head]
    for part, base in ((_INHERITED, head[_INHERITED] * 0), (_OWN, head[_INHERITED])):
        fill = {"color": theme.with_opacity(colour, _OPACITY[part])}
        x, wide = head["layer"] - 1 + _HEAD_GAP, [_HEAD_WIDTH] * len(head)
        yield theme.bar(x=[*x], y=[*head[part]], base=[*base], width=wide, marker=fill, hoverinfo="skip").update(
            showlegend=False
        )
    line = {"name": "drift e = m + p", "legendgroup": "e", "hovertemplate": "%{text}<extra></extra>"}
    hover = {"text": [text for text, of_head in zip(texts, is_head, strict=True) if not of_head]}
    yield brush.line(variant, rows[~is_head]["layer"], rows[~is_head][_DRIFT], **hover, **line, showlegend=in_legend)
    hover = {"text": [text for text, of_head in zip(texts, is_head, strict=True) if of_head]}
    places = head["layer"] - 1 + _HEAD_GAP
    yield brush.line(variant, places, head[_DRIFT], **hover, **line, mode="markers", showlegend=False)
