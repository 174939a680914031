"""Output of `merge --compare`: a table for the terminal, files, and a chart for the dashboard."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from driftlens.results.formatting import Kind, Table, with_interval_ends
from driftlens.runs.manifest import COMPARISON
from driftlens.utils.errors import RunError, pluralize
from driftlens.utils.files import parse_json, write_json_atomic, write_text_atomic
from driftlens_reports.charts import theme, words
from driftlens_reports.charts.chart import Drawn

NAMES = {
    "disagreement": "expected disagreement with the experts",
    "hellinger": "Hellinger distance to the experts",  # by which earlier versions ranked, as by KL
    "kl": "KL to the experts (nat)",
    "drift_rel": "relative final drift",
}


def _ranking_frame(ranking: Mapping[str, Any]) -> pd.DataFrame:
    """Return a data frame with one row per merge, without the numbers by task."""
    # Numbers by task are nested and do not fit into a CSV cell.
    return pd.DataFrame(ranking["merges"]).drop(columns="by_task", errors="ignore")


def merge_ranking_table(ranking: Mapping[str, Any]) -> Table:
    """Return the ranking of merges as a table; its note lists ties and failed merges."""
    placed = [row for row in ranking["merges"] if row["place"]]
    heads = {key: name for key, name in NAMES.items() if any(row.get(key) is not None for row in placed)}
    columns: dict[str, tuple[Kind, str]] = {"merge": ("text", "merge"), "place": ("count", "place")}
    for key, name in {**heads, "behind": "distance to the first"}.items():
        columns |= with_interval_ends(name, "number", (key, f"{key}_low", f"{key}_high"))
    counts, tied = ranking["samples"], [row["merge"] for row in placed if row["is_tied"]]
    which = "that no method has read" if ranking["held_out"] else "without their labels"
    failed = [f"{row['merge']}: not made, as {row['reason']}" for row in ranking["merges"] if row["reason"]]
    overlap = ranking.get("trained_on", "")
    nearer = [row["merge"] for row in placed if (row.get("nearer_low") or 0) > 0]
    notes = [
        f"{'; '.join(failed)}." if failed else "",
        f"Ranked by {NAMES[ranking['score']]}: mean over {pluralize(len(counts), 'task')}, "
        f"{pluralize(sum(counts.values()), 'calibration sample')} {which}. Distance to the first: same samples, "
        "simultaneous intervals.",
        f"{', '.join(tied)}: not significantly worse than the first on these samples." if tied else "",
        f"Clearly nearer to the experts than the present merge, {ranking['present']}: {', '.join(nearer)}."
        if nearer
        else "",
        f"Unreliable: {overlap}. Compare on samples that no expert has seen." if overlap else "",
    ]
    return Table.from_rows("merges", f"Merges of {ranking['name']}", columns, placed, " ".join(filter(None, notes)))


def read_merge_ranking(folder: Path) -> dict[str, Any]:
    """Read the stored comparison of merges from a folder.

    Raises:
        RunError: there is none, or it can't be read.
    """
    try:
        ranking: dict[str, Any] = parse_json((folder / COMPARISON).read_text(encoding="utf-8"))
        # Raises for a file that is not a comparison, before a caller uses it.
        merge_ranking_table(ranking)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{folder} has no readable comparison of merges") from None
    return ranking


def draw_merge_ranking(ranking: Mapping[str, Any], *, dark: bool = False) -> Drawn:
    """Draw the measures of every merge with intervals, the best merge on top."""
    from plotly.subplots import make_subplots

    rows = _ranking_frame(ranking)
    # Reversed, as plotly draws the first row at the bottom.
    rows = rows[rows["place"].notna()][::-1]
    measures = [measure for measure in NAMES if measure in rows and rows[measure].notna().any()]
    figure = make_subplots(cols=len(measures), shared_yaxes=True, horizontal_spacing=0.05)
    look = theme.variant_style({}, "merged", dark=dark)
    for column, measure in enumerate(measures, 1):
        ends = (rows[f"{measure}_low"].astype(float), rows[f"{measure}_high"].astype(float))
        figure.add_scatter(
            x=rows[measure],
            y=[words.escape_plotly(name) for name in rows["merge"]],
            mode="markers",
            marker={"color": look.colour, "symbol": look.symbol, "size": 8},
            error_x=theme.error_bars(rows[measure].astype(float), *ends, look.colour),
            showlegend=False,
            row=1,
            col=column,
        )
        title = "<br>".join(textwrap.wrap(NAMES[measure], 14))  # both fit side by side on a phone
        figure.update_xaxes(title_text=title, rangemode="tozero", row=1, col=column)
    figure.update_layout(height=126 + 26 * len(rows), margin={"t": 20, "b": 66, "l": 160, "r": 20})
    worst, best = rows["merge"].iloc[[0, -1]]
    alt = f"{pluralize(len(rows), 'merge')} ranked by {NAMES[ranking['score']]}: {best} is first, {worst} last."
    return Drawn(figure, alt, rows[::-1])


def write_merge_ranking(ranking: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the ranking of merges to `merges.csv` and `merges.json`, replacing existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / "merges.csv", folder / "merges.json"]
    write_text_atomic(places[0], _ranking_frame(ranking).to_csv(index=False))
    write_json_atomic(places[1], ranking)
    return places
