"""Which layers cost loss and margin: each layer's part of the change from expert to variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from driftlens.records.reading import number
from driftlens.records.run import DriftRun
from driftlens_reports.charts import marks, panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.marks import Trace

_TARGETS = {"loss": "part of the loss change (nat)", "margin": "part of the margin change (score units)"}
_MEAN, _REST = "mean part", "remainder"


def _samples(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.adjoint()
    is_chosen = rows["task"].isin(picking.chosen_tasks(run, options)) & rows["variant"].isin(
        picking.chosen_variants(run, options)
    )
    return rows[is_chosen & rows["target"].isin(list(_TARGETS)) & rows["part"].notna()]


def _rows(samples: pd.DataFrame) -> pd.DataFrame:
    """Mean over samples by task, variant, target and layer; the remainder is a layer of its own behind the head."""
    key = ["task", "variant", "target"]
    parts = samples.groupby([*key, "layer"], sort=False)["part"].agg(["mean", "size"]).reset_index()
    parts = parts.assign(place=parts["layer"].astype(str)).rename(columns={"mean": _MEAN, "size": "n"})
    rest = samples[samples["remainder"].notna()].groupby(key, sort=False)["remainder"].agg(["mean", "size"])
    rest = rest.reset_index().assign(place=_REST).rename(columns={"mean": _MEAN, "size": "n"})
    return pd.concat([parts, rest], ignore_index=True)


def _means(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean over tasks of the rows, every task weighing the same."""
    means = rows.groupby(["variant", "target", "place"], sort=False)[_MEAN].mean().reset_index()
    return means.assign(task="mean of tasks")


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
    samples = _samples(run, options)
    rows = picking.ordered(
        _rows(samples), picking.chosen_tasks(run, options), picking.chosen_variants(run, options)
    )
    means = _means(rows)
    names = list(rows["variant"].unique())
    targets = [target for target in _TARGETS if target in set(rows["target"])]
    grid = panels.panel_grid(
        [f"{words.shown(variant)}: {target}" for variant in names for target in targets],
        x_title=f"layer (index: 1 stem, {panels.last_layer(run)} head; rest: in no layer)",
        y_titles=[_TARGETS[target] for target in targets],
        columns=len(targets),
        **words.themed(run, "adjoint", options),
    )
    last = panels.last_layer(run)
    spots = {str(layer): layer for layer in rows["layer"].dropna().astype(int).unique()}
    spots[_REST] = last + 1
    for at, (variant, target) in enumerate((variant, target) for variant in names for target in targets):
        mean, tasks = (
            table[(table["variant"] == variant) & (table["target"] == target)] for table in (means, rows)
        )
        filled = marks.hatched(theme.look(run.variants, variant, dark=options.dark))
        grid.add(at, _marks(marks.bar, mean, spots, marker=filled, textposition="none"))
        if rows["task"].nunique() > 1:
            dots = {"color": theme.palette(options.dark).ink, "symbol": "circle-open", "size": 5}
            grid.add(at, _marks(marks.scatter, tasks, spots, marker=dots, mode="markers"))
    grid.add_line("y", 0)
    grid.set_axes(x=panels.layer_axis(run, "rest"), y={"tickformat": theme.TICK_NUMBER})
    grid.figure.update_layout(bargap=0.25, showlegend=False)
    counts = rows.loc[rows["place"] != _REST, "n"]
    return Drawn(
        grid.figure,
        alt=f"Parts by layer. Largest cost: {_worst_in_words(means, targets)}.",
        data=pd.concat([rows, means], ignore_index=True)[["task", "variant", "target", "place", "n", _MEAN]],
        notes=(
            f"{words.ranged(counts, 'diagnosis sample')} per task, "
            f"over {words.counted(rows['task'].nunique(), 'task')}.",
            *words.overlap_notes(run),
        ),
    )


def _marks(draw: Callable[..., Trace], rows: pd.DataFrame, spots: dict[str, int], **settings: Any) -> Trace:
    """Bars of the means by layer, or dots of the tasks."""
    is_mean = draw is marks.bar
    texts = (
        [_where(place) for place in rows["place"]] if is_mean else rows["task"].astype(str).map(words.literal)
    )
    return draw(
        x=[spots[place] for place in rows["place"]],
        y=rows[_MEAN].tolist(),
        text=list(texts),
        hovertemplate=f"%{{text}}<br>{'mean of tasks ' if is_mean else ''}%{{y:{theme.NUMBER}}}<extra></extra>",
        **settings,
    )


def _where(place: str) -> str:
    return f"layer {place}" if place != _REST else _REST


def _worst_in_words(means: pd.DataFrame, targets: list[str]) -> str:
    """The layer with the largest part of the loss, or the most negative one of the margin, of each variant."""
    parts = []
    layers = means[(means["place"] != _REST) & (means["target"] == targets[0])]
    unit = "nat of loss" if targets[0] == "loss" else "score units of margin"
    for variant, rows in layers.groupby("variant", sort=False):
        at = rows[_MEAN].idxmax() if targets[0] == "loss" else rows[_MEAN].idxmin()
        parts.append((variant, f"layer {rows.at[at, 'place']}, {number(rows.at[at, _MEAN])} {unit}"))
    return words.by_variant(parts)
