"""Which layers cost loss and margin: each layer's part of the change from expert to variant."""

from __future__ import annotations

from itertools import product

import pandas as pd

from driftlens.records.reading import number
from driftlens.records.run import DriftRun
from driftlens_reports.charts import marks, panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

_TARGETS = {"loss": "part of the loss change (nat)", "margin": "part of the margin change (score units)"}
_MEAN, _REST = "mean part", "remainder"


def _samples(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.adjoint()
    return picking.chosen(run, options, rows[rows["target"].isin(list(_TARGETS)) & rows["part"].notna()])


def _rows(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean over samples by task, variant, target and layer; the remainder is a layer of its own behind the head."""
    key = ["task", "variant", "target"]
    parts = samples.groupby([*key, "layer"], sort=False)["part"].agg(["mean", "size"]).reset_index()
    parts = parts.assign(place=parts["layer"].astype(str)).rename(columns={"mean": _MEAN, "size": "n"})
    rest = samples[samples["remainder"].notna()].groupby(key, sort=False)["remainder"].agg(["mean", "size"])
    rest = rest.reset_index().assign(place=_REST).rename(columns={"mean": _MEAN, "size": "n"})
    return pd.concat([parts, rest], ignore_index=True)


@chart(
    "adjoint",
    title="Which layers cost loss and margin",
    section="loss",
    rank=40,
    needs=("adjoint", ("part",)),
    rows=_samples,
    caption="Each layer's part of the change from expert to variant in loss and in margin, mean over the diagnosis "
    "samples of every task: bars for the mean of tasks, dots for the tasks, one panel per variant and target.",
    hint="Bars add up to the change, with the remainder that belongs to no layer. Positive parts of the loss are what "
    "a layer's local mismatch costs; negative parts of the margin push samples towards a flip. Bars of opposite sign "
    "cancel in the sum.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Panels of bars by layer, one row per variant, one column per target."""
    rows = picking.chosen(run, options, _rows(_samples(run, options)))
    means = rows.groupby(["variant", "target", "place"], sort=False)[_MEAN].mean().reset_index()
    means = means.assign(task="mean of tasks")  # every task weighs the same
    names, last = list(rows["variant"].unique()), panels.last_layer(run)
    targets = [target for target in _TARGETS if target in set(rows["target"])]
    grid = panels.panel_grid(
        [f"{words.shown(variant)}: {target}" for variant, target in product(names, targets)],
        x_title=f"layer (index: 1 stem, {last} head; rest: in no layer)",
        y_titles=[_TARGETS[target] for target in targets],
        columns=len(targets),
        **words.themed(run, "adjoint", options),
    )
    dots = {"color": theme.palette(options.dark).ink, "symbol": "circle-open", "size": 5}
    for at, (variant, target) in enumerate(product(names, targets)):
        mean, tasks = (
            table[(table["variant"] == variant) & (table["target"] == target)] for table in (means, rows)
        )
        bars = marks.bar(
            x=_spots(mean, last),
            y=mean[_MEAN].tolist(),
            text=[place if place == _REST else f"layer {place}" for place in mean["place"]],
            textposition="none",
            marker=marks.hatched(theme.look(run.variants, variant, dark=options.dark)),
            hovertemplate=f"%{{text}}<br>mean of tasks %{{y:{theme.NUMBER}}}<extra></extra>",
        )
        grid.add(at, bars)
        if rows["task"].nunique() > 1:
            points = marks.scatter(
                x=_spots(tasks, last),
                y=tasks[_MEAN].tolist(),
                text=[words.literal(str(task)) for task in tasks["task"]],
                mode="markers",
                marker=dots,
                hovertemplate=f"%{{text}}<br>%{{y:{theme.NUMBER}}}<extra></extra>",
            )
            grid.add(at, points)
    grid.add_line("y", 0)
    grid.set_axes(x=panels.layer_axis(run, "rest"), y={"tickformat": theme.TICK_NUMBER})
    grid.figure.update_layout(bargap=0.25, showlegend=False)
    counts = words.ranged(rows.loc[rows["place"] != _REST, "n"], "diagnosis sample")
    tasks = words.counted(rows["task"].nunique(), "task")
    return Drawn(
        grid.figure,
        alt=f"Parts by layer. Largest cost: {_worst_in_words(means, targets)}.",
        data=pd.concat([rows, means], ignore_index=True)[["task", "variant", "target", "place", "n", _MEAN]],
        notes=(f"{counts} per task, over {tasks}.", *words.overlap_notes(run)),
    )


def _spots(rows: pd.DataFrame, last: int) -> list[int]:
    return [last + 1 if place == _REST else int(place) for place in rows["place"]]


def _worst_in_words(means: pd.DataFrame, targets: list[str]) -> str:
    """The layer with the largest part of the loss, or the most negative one of the margin, of each variant."""
    parts = []
    layers = means[(means["place"] != _REST) & (means["target"] == targets[0])]
    unit = "nat of loss" if targets[0] == "loss" else "score units of margin"
    for variant, rows in layers.groupby("variant", sort=False):
        at = rows[_MEAN].idxmax() if targets[0] == "loss" else rows[_MEAN].idxmin()
        parts.append((variant, f"layer {rows.at[at, 'place']}, {number(rows.at[at, _MEAN])} {unit}"))
    return words.by_variant(parts)
