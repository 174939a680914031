"""What each layer accounts for: of the final drift, stacked and by two exact splits, and of loss and margin."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd

from driftlens.findings.reading import number, percent
from driftlens.runs.run import DriftRun
from driftlens_reports.charts import panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.layer_curves import of_layers

CONTRIBUTED, REST = "share of final drift", "remainder"
_CARRIED, _SWAPPED = "carried share", "swapped share"
_TARGETS = {"loss": "part of the loss change (nat)", "margin": "part of the margin change (score units)"}
_MEAN = "mean part"
_BAR, _LEAST = 30, 70
_INTERVALS = "Whiskers: 95 % intervals over the samples with Jacobians, which were drawn again (bootstrap)."


def share_rows(run: DriftRun, options: ChartOptions, names: Mapping[str, str]) -> pd.DataFrame:
    """Rows of the layer table with shares under other names, `NAME low` and `NAME high` where they have intervals."""
    ends = ("", "_low", "_high")
    new = {f"{share}{end}": f"{name}{end.replace('_', ' ')}" for share, name in names.items() for end in ends}
    rows = picking.layer_rows(run, options).rename(columns=new)
    intervals = [name for name in new.values() if name.endswith((" low", " high"))]
    return rows.drop(columns=[name for name in intervals if rows[name].isna().all()])


def with_ends(rows: pd.DataFrame, column: str) -> list[str]:
    """The column, and those of its intervals where it has some."""
    return [name for name in (column, f"{column} low", f"{column} high") if name in rows]


def _whiskers(rows: pd.DataFrame, column: str, colour: str) -> dict[str, Any] | None:
    # Of some bars alone, plotly would draw the others with whiskers of no length.
    column, *ends = with_ends(rows, column)
    if not ends or rows[[column, *ends]].isna().any(axis=None):
        return None
    return theme.whiskers(rows[column].astype(float), *(rows[end] for end in ends), colour, width=2)


@chart(
    "contributions",
    title="Contributions to the final drift",
    section="contributions",
    rank=10,
    needs=("layers", ("final_share",)),
    caption="The final drift as a stack of what each layer's local mismatch ends up as, signed projections on the "
    "final drift and ratios of sums over diagnosis samples without a band; the hatched bar is the remainder.",
    hint="Segments to the right make the final drift, segments to the left of zero work against it; with the remainder "
    "they sum to 100 %, marked by a line. Shares of different variants refer to different drifts: a larger share of "
    "a smaller drift may be less in feature units.",
)
def contributions(run: DriftRun, options: ChartOptions) -> Drawn:
    """A panel per task with one stack per variant; all panels have one x axis range."""
    rows = stacked(share_rows(run, options, {"final_share": CONTRIBUTED}))
    tasks, variants = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    grid = panels.panel_grid(
        words.labels(tasks),
        x_title="share of final drift (%)",
        y_titles=["variant"],
        height=max(_BAR * len(variants) + 12, _LEAST),
        dark=options.dark,
    )
    layers, remainders = rows[rows["role"] != REST], rows[rows["role"] == REST]
    brush, colours = theme.Brush(run.variants, options.dark), theme.palette(options.dark)
    hatch = {"shape": "x", "fgcolor": colours.ink, "bgcolor": colours.surface, "size": 5, "solidity": 0.4}
    for panel, task in enumerate(tasks):
        grid.add(panel, _layers(run, layers[layers["task"] == task], variants, options.dark))
        rest = remainders[remainders["task"] == task]
        segments = _segments(rest, [REST] * len(rest), variants, options.dark)
        grid.add(panel, segments.update(**brush.named(REST, REST), marker_pattern=hatch))
    grid.add_lines("x", 0.0, 1.0)
    titles = [words.shown(variant) for variant in variants]
    rows_of_bars = {"autorangeoptions": {"include": [-0.5, len(variants) - 0.5]}, "autorange": "reversed"}
    grid.set_axes(
        x={"tickformat": theme.TICK_SHARE, "autorangeoptions": {"include": [0.0, 1.0]}},
        y={"tickvals": list(range(len(titles))), "ticktext": titles, **rows_of_bars, "showgrid": False},
    )
    grid.add(0, _depth(run, options.dark))
    # Numbers of segments that are too narrow for one size are left out; hovering tells.
    written = {"minsize": theme.SMALL - 2, "mode": "hide"}
    grid.lay_out(barmode="overlay", uniformtext=written, margin=panels.room_beside(titles))
    alt = f"Stacked signed shares of the final drift by layer. {words.peak_share(layers, CONTRIBUTED)}"
    columns = [*with_ends(rows, CONTRIBUTED), "start"]
    notes = [_INTERVALS] if len(columns) > 2 else []
    return of_layers(run, grid.figure, rows, *columns, alt=alt, notes=notes)


def stacked(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a share, and where their segments start; the remainder is a row of its own, without a layer."""
    stacks, columns = [], ["task", "variant", "layer", "role", "path", "where", "n", "remainder_share"]
    rows = rows[rows.columns.intersection([*columns, *with_ends(rows, CONTRIBUTED)])]
    for _, layers in rows.groupby(["task", "variant"], sort=False):
        heads = layers[layers["remainder_share"].notna()]
        remainder = heads.drop(columns=with_ends(layers, CONTRIBUTED)).assign(
            **{CONTRIBUTED: heads["remainder_share"], "role": REST, "path": "", "layer": pd.NA}
        )
        parts = [part for part in (layers[layers[CONTRIBUTED].notna()], remainder) if len(part)]
        segments = pd.concat(parts or [remainder])
        values = segments[CONTRIBUTED].astype(float)
        stacks.append(segments.assign(start=values.groupby(values < 0).cumsum() - values))
    return pd.concat(stacks, ignore_index=True)


def _layers(run: DriftRun, rows: pd.DataFrame, variants: list[str], dark: bool) -> theme.Trace:
    """One segment per layer and variant, coloured by depth."""
    # Colours are worked out here: plotly can't choose readable text on those of a colour axis.
    scale, last = theme.palette(dark).sequential, panels.last_layer(run)
    colours = [theme.shade(scale, layer / last) for layer in rows["layer"]]
    return _segments(rows, [*map(words.literal, rows["where"])], variants, dark).update(
        error_x=_whiskers(rows, CONTRIBUTED, theme.palette(dark).ink),
        marker_color=colours,
        insidetextfont_color=[*map(theme.readable, colours)],
        text=rows["layer"].astype(str).tolist(),
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        showlegend=False,
    )


def _segments(rows: pd.DataFrame, places: list[str], variants: list[str], dark: bool) -> theme.Trace:
    pairs = zip(rows["task"], rows["variant"], strict=True)
    texts = theme.interval_texts(rows, f"{CONTRIBUTED} low", f"{CONTRIBUTED} high")
    return theme.bar(
        orientation="h",
        x=rows[CONTRIBUTED].astype(float).tolist(),
        base=rows["start"].tolist(),
        y=[variants.index(variant) for variant in rows["variant"]],
        width=0.7,
        marker_line={"color": theme.palette(dark).quiet, "width": 0.5},
        hovertext=[f"{words.literal(str(task))}, {words.shown(variant)}" for task, variant in pairs],
        customdata=list(zip(places, texts, strict=True)),
        hovertemplate="%{hovertext}<br>%{customdata[0]}<br>"
        f"share %{{value:{theme.SHARE}}}%{{customdata[1]}}<extra></extra>",
    )


def _depth(run: DriftRun, dark: bool) -> theme.Trace:
    """Nothing but the colour bar; 0 on it keeps the stem apart from the background."""
    title, ticks = {"text": "layer (index)", "side": "right"}, panels.layer_axis(run)["tickvals"]
    marker = {
        **{"color": [0], "cmin": 0, "cmax": panels.last_layer(run), "showscale": True},
        "colorscale": theme.palette(dark).sequential,
        "colorbar": theme.colour_bar(title=title, tickvals=ticks),
    }
    return theme.scatter(x=[None], y=[None], mode="markers", showlegend=False, marker=marker)


@chart(
    "splits",
    title="Both splits of the final drift",
    section="splits",
    rank=30,
    needs=("layers", ("final_share", "prefix_share")),
    caption="Signed share of the final drift that each layer's local mismatch accounts for, ratios of sums over "
    "diagnosis samples without a band: carried to the end by Jacobians (solid), by swapping model prefixes (hatched).",
    hint="Both splits are exact, but they answer different questions, so they may differ: swapping runs each layer on "
    "other inputs. Where they agree, the blame is robust; a large gap means that the layers behind bend the "
    "drift. Carried shares and the remainder in the notes sum to 100 %, swapped shares do so alone.",
)
def splits(run: DriftRun, options: ChartOptions) -> Drawn:
    """A row of panels per task, one per variant; all panels have one y axis range."""
    rows = share_rows(run, options, {"final_share": _CARRIED, "prefix_share": _SWAPPED})
    rows = rows[rows[[_CARRIED, _SWAPPED]].notna().any(axis=1).groupby(rows["variant"]).transform("any")]
    tasks, variants = list(dict.fromkeys(rows["task"])), list(dict.fromkeys(rows["variant"]))
    grid = panels.panel_grid(
        words.task_titles(tasks, [words.shown(variant) for variant in variants]),
        x_title=panels.layer_title(run),
        y_titles=["share of final drift (%)"],
        columns=min(len(variants), panels.MOST_COLUMNS),
        height=120,
        dark=options.dark,
    )
    names = {_CARRIED: "carried by Jacobians", _SWAPPED: "swapping prefixes"}
    brush = theme.Brush(run.variants, options.dark)
    for (task, variant), part in rows.groupby(["task", "variant"], sort=False):
        style = brush.look(variant)
        panel = tasks.index(task) * len(variants) + variants.index(variant)
        grid.add(panel, *(_bars(part, column, style.colour, options.dark) for column in names))
    # Entries in the colour of text: the marks mean the same whatever colour the variant has.
    quiet = theme.palette(options.dark).quiet
    for column, name in names.items():
        entry = {"name": name, "legendgroup": column, "offsetgroup": column}
        grid.add(0, theme.bar(x=[None], y=[None], marker=_fill(quiet, column, options.dark), **entry))
    grid.add_lines("y", 0.0)
    grid.add_lines("x", *panels.borders(rows))
    grid.set_axes(x=panels.layer_axis(run), y={"tickformat": theme.TICK_SHARE})
    grid.lay_out(barmode="group", bargap=0.25, bargroupgap=0)
    carried, swapped = (words.peak_share(rows, column) for column in names)
    columns = [*with_ends(rows, _CARRIED), *with_ends(rows, _SWAPPED)]
    notes, remainder = [_INTERVALS] if len(columns) > 2 else [], rows["remainder_share"].astype(float)
    if remainder.notna().any():
        row = rows.loc[remainder.abs().idxmax()]
        where = f"{words.called(row['task'])}, {words.title(row['variant'])}"
        notes.append(f"Largest remainder: {percent(float(row['remainder_share']))} ({where}).")
    rows, alt = rows.rename(columns={"remainder_share": REST}), "Two splits of the final drift by layer. "
    alt += f"Carried: {carried} Swapped: {swapped}"
    return of_layers(run, grid.figure, rows, *columns, REST, alt=alt, notes=notes)


def _bars(rows: pd.DataFrame, column: str, colour: str, dark: bool) -> theme.Trace:
    task, variant = words.literal(str(rows["task"].iloc[0])), words.shown(rows["variant"].iloc[0])
    return theme.bar(
        x=rows["layer"].tolist(),
        y=theme.gapped(rows[column].astype(float)),
        error_y=_whiskers(rows, column, theme.palette(dark).ink),
        name=column,
        marker=_fill(colour, column, dark),
        showlegend=False,
        legendgroup=column,
        offsetgroup=column,
        text=[f"{task}, {place}" for place in map(words.literal, rows["where"])],
        textposition="none",
        customdata=theme.interval_texts(rows, f"{column} low", f"{column} high"),
        hovertemplate=f"%{{text}}<br>{column} %{{y:{theme.SHARE}}}%{{customdata}}<extra>{variant}</extra>",
    )


def _fill(colour: str, column: str, dark: bool) -> dict[str, object]:
    if column == _CARRIED:
        return {"color": colour, "line": {"color": colour, "width": 1}}
    behind = theme.palette(dark).surface
    hatch = {"shape": "/", "fgcolor": colour, "bgcolor": behind, "size": 5, "solidity": 0.35}
    return {"color": theme.faded(colour, 1), "pattern": hatch, "line": {"color": colour, "width": 1}}


def _parts(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.adjoint()
    return picking.chosen(run, options, rows[rows["target"].isin(list(_TARGETS)) & rows["part"].notna()])


def _part_means(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean over samples by task, variant, target and layer; the remainder is a layer of its own behind the head."""
    key = ["task", "variant", "target"]
    parts = samples.groupby([*key, "layer"], sort=False)["part"].agg(["mean", "size"]).reset_index()
    parts = parts.assign(place=parts["layer"].astype(str)).rename(columns={"mean": _MEAN, "size": "n"})
    rest = samples[samples["remainder"].notna()].groupby(key, sort=False)["remainder"].agg(["mean", "size"])
    rest = rest.reset_index().assign(place=REST).rename(columns={"mean": _MEAN, "size": "n"})
    return pd.concat([parts, rest], ignore_index=True)


@chart(
    "adjoint",
    title="Which layers cost loss and margin",
    section="loss",
    rank=40,
    needs=("adjoint", ("part",)),
    rows=_parts,
    caption="Each layer's part of the change from expert to variant in loss and in margin, mean over the diagnosis "
    "samples of every task: bars for the mean of tasks, dots for the tasks, one panel per variant and target.",
    hint="Bars add up to the change, with the remainder that belongs to no layer. Positive parts of the loss are what "
    "a layer's local mismatch costs; negative parts of the margin push samples towards a flip. Bars of opposite sign "
    "cancel in the sum.",
)
def adjoint(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of bars by layer, one row per variant, one column per target."""
    rows = picking.chosen(run, options, _part_means(_parts(run, options)))
    means = rows.groupby(["variant", "target", "place"], sort=False)[_MEAN].mean().reset_index()
    means = means.assign(task="mean of tasks")  # every task weighs the same
    names, last = list(rows["variant"].unique()), panels.last_layer(run)
    targets = [target for target in _TARGETS if target in set(rows["target"])]
    grid = panels.panel_grid(
        [f"{words.shown(variant)}: {target}" for variant, target in product(names, targets)],
        x_title=f"layer (index: 1 stem, {last} head; rest: in no layer)",
        y_titles=[_TARGETS[target] for target in targets],
        columns=len(targets),
        dark=options.dark,
    )
    brush = theme.Brush(run.variants, options.dark)
    dots = {"color": brush.palette.ink, "symbol": "circle-open", "size": 5}
    for panel, (variant, target) in enumerate(product(names, targets)):
        mean, tasks = (
            table[(table["variant"] == variant) & (table["target"] == target)] for table in (means, rows)
        )
        bars = brush.bars(
            variant,
            _spots(mean, last),
            mean[_MEAN],
            text=[place if place == REST else run.layer_name(int(place)) for place in mean["place"]],
            hovertemplate=f"%{{text}}<br>mean of tasks %{{y:{theme.NUMBER}}}<extra></extra>",
        )
        grid.add(panel, bars)
        if rows["task"].nunique() > 1:
            points = theme.scatter(
                x=_spots(tasks, last),
                y=tasks[_MEAN].tolist(),
                text=[words.literal(str(task)) for task in tasks["task"]],
                mode="markers",
                marker=dots,
                hovertemplate=f"%{{text}}<br>%{{y:{theme.NUMBER}}}<extra></extra>",
            )
            grid.add(panel, points)
    grid.add_lines("y", 0)
    grid.set_axes(x=panels.layer_axis(run, "rest"), y={"tickformat": theme.TICK_NUMBER})
    grid.lay_out(bargap=0.25, showlegend=False)
    counts = words.ranged(rows.loc[rows["place"] != REST, "n"], "diagnosis sample")
    tasks = words.counted(rows["task"].nunique(), "task")
    return Drawn(
        grid.figure,
        alt=f"Parts by layer. Largest cost: {_worst_in_words(run, means, targets[0])}.",
        data=pd.concat([rows, means], ignore_index=True)[["task", "variant", "target", "place", "n", _MEAN]],
        notes=(f"{counts} per task, over {tasks}.", *words.overlap_notes(run)),
    )


def _spots(rows: pd.DataFrame, last: int) -> list[int]:
    return [last + 1 if place == REST else int(place) for place in rows["place"]]


def _worst_in_words(run: DriftRun, means: pd.DataFrame, target: str) -> str:
    """The layer with the largest part of the loss, or the most negative one of the margin, of each variant."""
    layers = means[(means["place"] != REST) & (means["target"] == target)]
    unit, end = ("nat of loss", "high") if target == "loss" else ("score units of margin", "low")
    return words.spans(
        layers, _MEAN, lambda row: f"{run.layer_name(int(row['place']))}, {number(row[_MEAN])} {unit}", end
    )
