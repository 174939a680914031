"""Final features of one task on a plane: expert and variants side by side, in one layout with shared axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from driftlens.base import variants
from driftlens.base.errors import DataError
from driftlens.findings.projection import Projection, project, stored_projection
from driftlens.findings.reading import number, percent
from driftlens.runs.run import DriftRun
from driftlens.spec.requests import ProjectionRequest
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_MOST_COLUMNS = 2
"""Panels in a row: more would be too narrow for their words in a telephone's window."""
_HEIGHT, _BELOW = 240, 42
"""Pixels: of a panel, and of the lines below it that need more than the room of the ticks, which there are none of."""
_TITLE = 22
"""Letters of a panel's title."""
_LONGEST_TEXT = 80
"""Letters of a sample's text beside its point."""
_BARE = {"showticklabels": False, "ticks": ""}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_MOST_NAMED = 10
"""Classes that a legend can name in a few lines."""
_BAR = 24
"""Pixels that the bar of drift colours needs beyond the room of a legend."""
_QUALITY = {
    "mean_cosine": "mean cosine",
    "mean_drift": "mean drift",
    "knn_overlap": "shared neighbours",
    "trustworthiness": "trustworthiness",
}
"""Quality columns of a projection, and what the plotted numbers call them."""
_KEPT, _FLIPPED = "kept", "flipped"
_NAMED = {"flip": "decision", "class": "label"}
"""The column that the legend's groups are of, by what colours points."""
_UNSCORED = "The run has no class scores of this task, so that colours tell models apart, not decisions."
_INDICATIVE = (
    "Distances on the plane are indicative only. The numbers below the panels come from the features: mean cosine to "
    "the expert, mean drift, share of nearest neighbours in common with the expert's, and trust, how few neighbours on "
    "the plane are none among the features (1 is best)."
)


def shown_task(run: DriftRun, options: ChartOptions) -> str:
    """The task that is drawn: of the chosen ones, that with the largest mean drift of the baseline."""
    tasks = picking.chosen_tasks(run, options)
    return picking.worst_task(run, tasks, options.baseline, options.layer) if len(tasks) > 1 else tasks[0]


def _projection(run: DriftRun, options: ChartOptions) -> Projection | None:
    """The stored layout of all variants, so that it stays where it is whichever are chosen; PCA at once without one."""
    asked = ProjectionRequest(layer=options.layer, method=options.method, seed=options.seed)
    task = shown_task(run, options)
    stored = stored_projection(run, task, asked)
    return stored or (project(run, task, asked, store_it=False) if options.method == "pca" else None)


def _laid_out(run: DriftRun, options: ChartOptions) -> list[str]:
    """The chosen variants that the layout has: it is that of all variants but the base."""
    return [name for name in picking.chosen_variants(run, options) if name != "base"]


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    task = shown_task(run, options)
    if not run.manifest.layers:
        return picking.absent("layers", ["drift_l2_mean"])
    laid_out = _laid_out(run, options)
    if not laid_out:
        return "shows the expert and all variants but the base, which the layout leaves out; choose another variant."
    try:
        run.sample_ids(task)
        is_there = options.method == "pca" or _projection(run, options) is not None
        for variant in ("expert", *laid_out):
            run.features(task, variant, options.layer)
    except DataError as error:
        return f"{error.message}. {error.hint}".strip()
    if is_there:
        return None
    command = f"driftlens view RUN --task {task} --method {options.method}"
    return f"needs the {options.method} layout of task {task}; `{command}` adds it."


@chart(
    "scatter",
    title="Features side by side",
    section="plane",
    rank=30,
    per_sample=True,
    needs=("samples", ("drift_l2",)),
    lacks=_missing,
    caption="Features of one task's diagnosis samples on a plane, expert and variants side by side in one joint layout "
    "with shared axes, and quality numbers from the features themselves below each panel.",
    hint="Look for clusters of the expert that the merged model blurs or shifts and the calibrated one restores. "
    "Panels share one layout, so positions compare; other tasks have layouts of their own and do not. Distances on the "
    "plane are indicative only: trust the numbers below the panels. `driftlens view RUN` writes a page in which these "
    "very samples move from model to model.",
)
def scatter_panels(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels with the same axes; arrows show where the samples that drift most have gone."""
    task, layout = shown_task(run, options), _projection(run, options)
    assert layout is not None  # `missing` says so before
    flips, unscored = _flips(run, task, options), []
    if options.colour == "flip" and flips.empty:
        options, unscored = replace(options, colour="role"), [_UNSCORED]
    names = ["expert", *_laid_out(run, options)]
    rows = _samples(run, task, layout.frame[layout.frame["variant"].isin(names)], flips, options)
    drawn, thinned = picking.thinned_samples(rows, options, len(names))
    x_title, y_title = _axis_titles(layout)
    groups = _groups(drawn, options)
    grid = panels.panel_grid(
        [words.label(variants.title(variant), _TITLE) for variant in names],
        x_title=x_title,
        y_titles=[y_title],
        columns=_MOST_COLUMNS,
        height=_HEIGHT,
        legend=[*groups],
        below=_BELOW,
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    for panel, variant in enumerate(names):
        grid.add(panel, *_points(drawn, variant, brush, groups, options))
        _write_below(grid, panel, x_title, layout.quality, variant)
    for name, marker in groups.items():
        entry = {"x": [None], "y": [None], "mode": "markers", "marker": {**marker, "size": 8}}
        grid.add(0, theme.scatter(**entry, name=name, legendgroup=name))
    if options.colour == "drift" and drawn["drift"].notna().any():
        _add_drift_bar(grid, drawn["drift"])
    moved = _draw_ways(grid, names, rows, options)
    grid.set_axes(x=_BARE, y=_BARE)
    grid.lay_out(margin={"l": 48}, yaxis={"scaleanchor": "x"})
    quality = layout.quality[["variant", *_QUALITY]].rename(columns=_QUALITY)
    cosines = quality[quality["variant"].isin(names[1:])]
    listed = words.by_variant(zip(cosines["variant"], cosines["mean cosine"].map(number), strict=True))
    return Drawn(
        grid.figure,
        alt=f"{layout.method} layout of the {picking.feature_name(run, options)} on {task}. "
        f"Mean cosine to the expert: {listed}.",
        data=drawn.merge(quality, on="variant", how="left"),
        notes=(*thinned, *moved, *unscored, *_notes(run, options, task, layout)),
    )


def _samples(
    run: DriftRun, task: str, rows: pd.DataFrame, flips: pd.DataFrame, options: ChartOptions
) -> pd.DataFrame:
    """The layout's rows of the chosen classes with what else is known of their samples."""
    drifts = run.samples(task, layer=options.layer)[["variant", "sample_id", "drift_l2"]]
    rows = rows.merge(drifts.rename(columns={"drift_l2": "drift"}), on=["variant", "sample_id"], how="left")
    rows = rows.merge(flips, on=["variant", "sample_id"], how="left")
    if texts := run.texts(task):
        rows["text"] = rows["sample_id"].map(texts)
    if options.classes is None:
        return rows
    rows = rows[rows["label"].isin(list(options.classes))].reset_index(drop=True)
    if rows.empty:
        problem = f"no sample shown is of the classes {', '.join(options.classes)}"
        raise DataError(problem, hint="Choose other classes.")
    return rows


def _points(
    drawn: pd.DataFrame, variant: str, brush: theme.Brush, groups: Mapping[str, Any], options: ChartOptions
) -> Iterator[theme.Trace]:
    """A variant's points of no group, then those of each."""
    part = drawn[drawn["variant"] == variant]
    of_group = part[_NAMED[options.colour]].map(_entry) if groups else pd.Series("", index=part.index)
    quiet = {"color": brush.palette.quiet, "symbol": "circle"} if groups else {}
    for name in ("", *groups):
        points = part[of_group == name]
        if points.empty:
            continue
        trace = brush.cloud(
            variant,
            points["x"],
            points["y"],
            total=len(drawn),
            name=name or words.shown(variant),
            legendgroup=name or None,
            showlegend=False,
            text=[_hover(row) for row in points.to_dict("records")],
            # What the app learns of points that a reader selects.
            customdata=points["sample_id"].tolist(),
            hovertemplate="%{text}<extra></extra>",
        )
        trace.update(marker={**quiet, **groups.get(name, {})})
        if options.colour == "class" and not groups:
            trace.update(marker=_class_marks(points["label"], drawn["label"], dark=options.dark))
        if options.colour == "drift" and points["drift"].notna().any():
            trace.update(marker={"color": points["drift"].tolist(), "coloraxis": "coloraxis", "opacity": 0.9})
        yield trace


def _axis_titles(layout: Projection) -> list[str]:
    if layout.explained_variance is None:
        return [f"{layout.method} {axis} (no unit)" for axis in (1, 2)]
    shares = [words.literal(percent(share)) for share in layout.explained_variance]
    return [f"PC {axis} ({share} of variance)" for axis, share in enumerate(shares, 1)]


def _hover(row: dict[str, Any]) -> str:
    lines = [words.literal(str(row["sample_id"]))]
    lines += [] if pd.isna(row["label"]) else [f"class {words.literal(str(row['label']))}"]
    lines += [f"decision {row['decision']}"] if isinstance(row.get("decision"), str) else []
    lines += [] if pd.isna(row["drift"]) else [f"drift {number(float(row['drift']))}"]
    lines += [words.label(row["text"], _LONGEST_TEXT)] if isinstance(row.get("text"), str) else []
    return "<br>".join(lines)


def _draw_ways(grid: panels.Grid, names: list[str], rows: pd.DataFrame, options: ChartOptions) -> list[str]:
    """Arrows from the expert's place of the samples that drift most to the variant's, and a note on them."""
    leading = options.baseline if options.baseline in names else names[-1]
    by_drift = rows[rows["variant"] == leading].sort_values("drift", ascending=False, kind="stable")
    ids = by_drift["sample_id"].head(options.arrows).tolist()
    starts = rows[rows["variant"] == "expert"].set_index("sample_id").loc[ids]
    for panel, variant in enumerate(names[1:] if ids else [], start=1):
        ends = rows[rows["variant"] == variant].set_index("sample_id").loc[ids]
        pairs = {letter: zip(starts[letter], ends[letter], strict=True) for letter in "xy"}
        places = {
            letter: [end for pair in both for end in (*pair, None)][:-1] for letter, both in pairs.items()
        }
        ink = theme.palette(options.dark).ink
        ways = theme.scatter(
            **places,
            mode="lines+markers",
            line={"color": ink, "width": 1},
            marker={
                **{"symbol": ["circle-open", "arrow", "circle"] * len(ids), "angleref": "previous"},
                **{"size": [4, 9, 0] * len(ids), "color": ink},
            },
            opacity=0.7,
            name=f"{words.shown(variant)}, moved",
            showlegend=False,
            hoverinfo="skip",
        )
        grid.add(panel, ways)
    many = words.counted(len(ids), "sample")
    return [f"Arrows: from the expert's place, the {many} that {leading} moves farthest."] if ids else []


def _notes(run: DriftRun, options: ChartOptions, task: str, layout: Projection) -> list[str]:
    notes = [f"Task {task}; {words.counted(int(layout.quality['n'].max()), 'diagnosis sample')}."]
    if len(picking.chosen_tasks(run, options)) > 1:
        notes.append(
            "Of the chosen tasks, the one with the largest drift is shown; choose one task to see another."
        )
    if "base" in picking.chosen_variants(run, options):
        notes.append("The layout is that of all variants but the base: the base has no panel.")
    if options.classes is not None:
        named = ", ".join(options.classes)
        notes.append(f"Only samples of the classes {named}; the layout is that of all samples.")
    count = layout.frame["label"].nunique()
    if options.colour == "class" and count == 0:
        notes.append("The samples have no labels, so that classes have no colours.")
    if options.colour == "class" and count > _MOST_NAMED:
        classes = words.counted(count, "class", "classes")
        notes.append(f"{classes}, told apart by colour and symbol; hovering names them.")
    return [*notes, *(f"{text}." for text in layout.notes), _INDICATIVE, *words.overlap_notes(run)]


def _class_marks(labels: pd.Series[Any], every: pd.Series[Any], *, dark: bool) -> dict[str, Any]:
    """Colour and symbol of each point by its class, the same in every panel of all points; without one it is quiet."""
    looks, unknown = _looks(every, dark), (theme.palette(dark).quiet, "circle")
    colours, symbols = zip(*(looks.get(name, unknown) for name in labels), strict=True)
    return {"color": [*colours], "symbol": [*symbols], "opacity": 0.8}


def _flips(run: DriftRun, task: str, options: ChartOptions) -> pd.DataFrame:
    """Of each variant's samples whether the decision is unlike the expert's; the expert's panel has the baseline's."""
    rows = run.outputs(task)[["variant", "sample_id", "flipped"]].dropna()
    rows = pd.concat([rows, rows[rows["variant"] == options.baseline].assign(variant="expert")])
    names = rows.pop("flipped").astype(bool).map({True: _FLIPPED, False: _KEPT})
    return rows.assign(decision=names)


def _groups(drawn: pd.DataFrame, options: ChartOptions) -> dict[str, dict[str, Any]]:
    """What the legend names, and hides and shows: marks by name; nothing where colours need none or are too many."""
    if options.colour == "flip":
        shades = theme.palette(options.dark).sequential
        line = {"width": 0.5, "color": theme.palette(options.dark).quiet}
        kept = {"color": shades[2], "symbol": "circle", "line": line, "opacity": 0.9}
        return {_KEPT: kept, _FLIPPED: {"color": shades[5], "symbol": "x", "size": 6, "opacity": 0.9}}
    if options.colour != "class" or drawn["label"].nunique() > _MOST_NAMED:
        return {}
    looks = _looks(drawn["label"], options.dark)
    return {
        _entry(name): {"color": colour, "symbol": symbol, "opacity": 0.8}
        for name, (colour, symbol) in looks.items()
    }


def _entry(name: Any) -> str:
    """What the legend calls a group; nothing for none."""
    return "" if pd.isna(name) else words.label(str(name))


def _looks(every: pd.Series[Any], dark: bool) -> dict[Any, tuple[str, str]]:
    colours = theme.CLASSES[dark]
    # After every round of colours the next symbol: 56 classes look different.
    return {
        name: (colours[index % len(colours)], _SYMBOLS[index // len(colours) % len(_SYMBOLS)])
        for index, name in enumerate(sorted(every.dropna().unique()))
    }


def _add_drift_bar(grid: panels.Grid, drifts: pd.Series[Any]) -> None:
    """Give all panels one colour scale of drift, from zero to the largest one, and its bar above them."""
    title = {"text": panels.titled("drift", "samples", "drift_l2"), "side": "bottom"}
    # Above the panels, for beside them it takes their room in a narrow window; and there in pixels of the figure, for
    # in the panels' units it pushes them onto the lines below them.
    place = {"orientation": "h", "x": 0.5, "xpad": 0, "yref": "container", "y": 1, "yanchor": "top"}
    bar = {"title": title, "tickformat": theme.TICK_NUMBER, "thickness": 10, "outlinewidth": 0, **place}
    # The first colours are nearly the background's: points would vanish.
    colours = theme.palette(grid.dark).sequential[2:]
    axis = {"cmin": 0, "cmax": float(drifts.max()) or 1.0, "colorscale": colours, "colorbar": bar}
    height, top = grid.layout["height"] + _BAR, grid.layout["margin"]["t"] + _BAR
    grid.lay_out(coloraxis=axis, height=height, margin={"t": top})


def _write_below(grid: panels.Grid, panel: int, x_title: str, quality: pd.DataFrame, variant: str) -> None:
    """Write the axis title and a variant's numbers below `panel`; the expert has none but trustworthiness."""
    row = quality[quality["variant"] == variant].iloc[0]
    # A line is no wider than a panel in a telephone's window.
    lines = [f"cosine {number(row['mean_cosine'])}, drift {number(row['mean_drift'])}"]
    lines = [] if variant == "expert" else [*lines, f"neighbours {number(row['knn_overlap'])}"]
    lines.append(f"trust {number(row['trustworthiness'])}")
    grid.set_axis("x", panel, title={"text": "<br>".join([x_title, *lines])})
