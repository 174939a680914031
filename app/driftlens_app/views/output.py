"""What feature drift does to scores, decisions and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import streamlit as st

from driftlens.base.variants import title
from driftlens_app.samples import show_wall
from driftlens_app.selection import TASK, VARIANTS, Selection, selection
from driftlens_app.show import note, show_part, show_table
from driftlens_reports.charts.chart import SECTIONS
from driftlens_reports.charts.picking import scored_samples

_MOST_ROWS = 200


def show(part: str) -> None:
    """Draw `part` of the page Samples."""
    chosen = selection(TASK, VARIANTS, with_base=part == SECTIONS["accuracy"].part)
    if chosen.run.outputs().empty:
        note(
            "The run has no class scores. A task has them when its spec names a head: `heads` with `classes` and "
            "`templates`, or a file with the rows of a classifier."
        )
    show_part("samples", part, chosen.run, chosen.options())
    if part == SECTIONS["decisions"].part:
        _flips(chosen)
    if part == SECTIONS["accuracy"].part:
        _answers(chosen)


def _flips(chosen: Selection) -> None:
    st.subheader(
        "Flipped decisions", anchor=False, help="The most certain decisions of the expert come first."
    )
    options = chosen.options()
    decided = scored_samples(chosen.run, options, "flipped")
    rows = flipped(decided)
    if rows.empty:
        if decided.empty:
            note("Decisions were not measured for these tasks and variants.")
        else:
            note("No decision flips.", "check")
        return
    counts = rows["task"].value_counts()
    task = _one_of(chosen, rows, "flips-of", lambda name: f"{name} ({counts[name]} flips)")
    ids = rows.loc[rows["task"] == task, "sample_id"].drop_duplicates().tolist()
    show_wall(chosen.run, task, ids, options, key="flips-wall")


def _one_of(chosen: Selection, rows: pd.DataFrame, key: str, name: Callable[[str], str] = str) -> str:
    """The task of a table, of those that the rows are of."""
    tasks = [task for task in chosen.tasks if (rows["task"] == task).any()]
    if len(tasks) == 1:
        return tasks[0]
    return st.selectbox("Task of the table", tasks, format_func=name, key=key, bind="query-params")


def _answers(chosen: Selection) -> None:
    """What models said on test samples, where answers were generated or chosen."""
    rows = chosen.run.scores()
    rows = rows[rows["task"].isin(chosen.tasks) & rows["answer"].notna()]
    if rows.empty:
        return
    st.subheader("Answers", anchor=False, help="Test samples on which the models differ come first.")
    task = _one_of(chosen, rows, "answers-of")
    shown = answers(rows[rows["task"] == task], [*chosen.run.variants, "expert"])
    show_table(shown.head(_MOST_ROWS), {}, key="answers-table", alt=f"Answers on the test samples of {task}")


def answers(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """A row per test sample of one task: what was wanted, and what each model said; first those where they differ."""
    wide = rows.pivot_table(
        index=["sample_id", "target"], columns="variant", values="answer", aggfunc="first", sort=False
    )
    wide = wide[[name for name in variants if name in wide]]
    wide = wide.loc[wide.nunique(axis=1).sort_values(ascending=False, kind="stable").index]
    return wide.rename(columns=title).reset_index(names=["sample", "target"])


def flipped(decided: pd.DataFrame) -> pd.DataFrame:
    """Of measured decisions, those unlike the expert's: a row per task, sample and model, by falling margin."""
    rows = decided[decided["flipped"].astype(bool)]
    rows = rows.assign(model=rows["variant"].map(title)).sort_values("margin", ascending=False, kind="stable")
    return rows[["task", "sample_id", "model", "margin"]].reset_index(drop=True)
