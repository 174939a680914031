"""A comparison of merges, as `pipeline.search.merges` gives it: a table for a terminal, files, one picture."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from driftlens.files import atomic_path, write_json_atomic, write_text_atomic
from driftlens.records.reading import number, printable
from driftlens_reports.charts import marks, theme, words
from driftlens_reports.terminal import aligned

NAMES = {"kl": "KL to the experts (nat)", "drift_rel": "relative final drift"}


def table_of(found: Mapping[str, Any]) -> pd.DataFrame:
    """A row per merge, without the numbers by task."""
    return pd.DataFrame([{key: at for key, at in row.items() if key != "by_task"} for row in found["merges"]])


def merges_text(found: Mapping[str, Any]) -> str:
    """The ranking, which of its differences are none, and why a merge is missing."""
    lines = [
        ["", "merge", *(name for measure in NAMES.values() for name in (measure, "95 %")), "behind the first"]
    ]
    for row in found["merges"]:
        if not row["place"]:
            continue
        cells = [str(row["place"]), row["merge"]]
        for measure in NAMES:
            cells += [number(row[measure]), _span(row, measure)]
        behind = "" if row["place"] == 1 else f"{number(row['behind'])} ({_span(row, 'behind')})"
        lines.append([*cells, f"{behind}, tied" if row["is_tied"] else behind])
    counts, tied = found["samples"], [row["merge"] for row in found["merges"] if row.get("is_tied")]
    which = "that no method has read" if found["held_out"] else "without their labels"
    said = [
        f"Ranked by {NAMES[found['score']]}: mean over {len(counts)} tasks, {sum(counts.values())} calibration samples "
        f"{which}. Behind the first: on the same samples, with intervals that hold for all pairs together."
    ]
    if tied:
        said.append(f"{', '.join(tied)}: not told apart from the first by these samples.")
    said += [f"{row['merge']}: not made, as {row['reason']}." for row in found["merges"] if row["reason"]]
    return "\n".join([*aligned(lines, num_names=2), "", *map(printable, said)])


def draw_merges(found: Mapping[str, Any]) -> go.Figure:
    """Both measures of every merge with their intervals, best at the top."""
    from plotly.subplots import make_subplots

    rows = table_of(found)
    rows = rows[rows["place"].notna()][::-1]
    measures = [measure for measure in NAMES if rows[measure].notna().any()]
    figure = make_subplots(cols=len(measures), shared_yaxes=True, horizontal_spacing=0.05)
    look = theme.look(("merged",), "merged", dark=False)
    for column, measure in enumerate(measures, 1):
        ends = (rows[f"{measure}_low"].astype(float), rows[f"{measure}_high"].astype(float))
        figure.add_scatter(
            x=rows[measure],
            y=[words.literal(name) for name in rows["merge"]],
            mode="markers",
            marker={"color": look.colour, "symbol": look.symbol, "size": 8},
            error_x=marks.whiskers(rows[measure].astype(float), *ends, look.colour, thickness=1, width=3),
            showlegend=False,
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text=NAMES[measure], rangemode="tozero", row=1, col=column)
    figure.update_layout(height=110 + 26 * len(rows), margin={"t": 20, "b": 50, "l": 160, "r": 20})
    return figure


def write_merges(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """`merges.csv`, `.json`, `.png`, `.svg` and `.html` in a folder, in the place of those there.

    Raises:
        RunError: one can't be written.
    """
    from driftlens_reports.paper.static import draw_static
    from driftlens_reports.paper.style import PAGE, PAGE_WIDTH, encode, sheet

    places = {kind: folder / f"merges.{kind}" for kind in ("csv", "json", "png", "svg", "html")}
    with sheet(PAGE):
        figure = draw_static(draw_merges(found), PAGE_WIDTH)
    pictures = {kind: encode(figure, kind, PAGE) for kind in ("png", "svg")}
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(places["csv"], table_of(found).to_csv(index=False))
    write_json_atomic(places["json"], found)
    for kind, picture in pictures.items():
        with atomic_path(places[kind]) as path:
            path.write_bytes(picture)
    drawn = pictures["svg"].decode()
    body = f"{drawn[drawn.index('<svg') :]}<pre>{html.escape(merges_text(found))}</pre>"
    title = f"Merges of {html.escape(printable(found['name']))}"
    write_text_atomic(
        places["html"],
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>{body}</html>',
    )
    return list(places.values())


def _span(row: Mapping[str, Any], name: str) -> str:
    ends = (row[f"{name}_low"], row[f"{name}_high"])
    return "no interval" if None in ends else " to ".join(map(number, ends))
