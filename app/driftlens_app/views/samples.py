"""Samples: test samples in every model, their positions and predictions."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from driftlens.utils.variants import calibration_of, title
from driftlens_app.live import link_to_repair, offer_attribution
from driftlens_app.samples import offer_page, outcomes_of, show_explorer
from driftlens_app.selection import TASK, VARIANTS, Selection, selection
from driftlens_app.show import Page, note, open_part, show_chart, show_part, show_table
from driftlens_reports.charts.chart import SECTIONS, parts_of

PAGE = Page(
    "Samples",
    icon=":material/scatter_plot:",
    order=40,
    says="Test samples in the expert and each variant, in one projection per layer.",
)

_MOST_ROWS = 200


def show() -> None:
    """Draw the page."""
    part = open_part([*parts_of("samples")], key="part")
    if part == SECTIONS["plane"].part:
        _show_explorer_part(part)
    else:
        _show_output_part(part)


def _show_explorer_part(part: str) -> None:
    chosen = selection()
    if not (chosen.run.tasks and chosen.run.manifest.layers):
        note("The run has no features yet.")
        return
    show_explorer(chosen.run)
    with st.container(horizontal=True, vertical_alignment="center"):
        offer_page(chosen.run)
        if not any(map(calibration_of, chosen.run.variants)):
            link_to_repair()
    offer_attribution(chosen.run)
    for name in parts_of("samples")[part]:
        # The explorer replaces the scatter plot of reports.
        if name != "scatter":
            show_chart(name, chosen.run, chosen.options())


def _show_output_part(part: str) -> None:
    """Draw a part about scores, decisions and probabilities."""
    chosen = selection(TASK, VARIANTS, with_base=part == SECTIONS["accuracy"].part)
    if chosen.run.outputs().empty:
        note(
            "The run has no class scores. Add `heads` to the spec: `classes` and `templates`, or a classifier file."
        )
    show_part("samples", part, chosen.run, chosen.options())
    if part == SECTIONS["accuracy"].part:
        _show_answers(chosen)


def _show_answers(chosen: Selection) -> None:
    """Show the models' answers on test samples, if there are any."""
    rows = chosen.run.scores()
    rows = rows[rows["task"].isin(chosen.tasks) & rows["answer"].notna()]
    if rows.empty:
        return
    st.header("Answers", anchor=False, help="Samples on which models differ come first.")
    tasks = [task for task in chosen.tasks if (rows["task"] == task).any()]
    task = tasks[0]
    if len(tasks) > 1:
        task = st.selectbox("Task of the table", tasks, key="answers-of", bind="query-params")
    shown = _answers_by_model(rows[rows["task"] == task], [*chosen.run.variants, "expert"])
    outcomes = outcomes_of(chosen.run, task, chosen.options())
    if shown["sample"].isin(outcomes.index).any():
        shown.insert(1, "outcome", shown["sample"].map(outcomes))
    show_table(shown.head(_MOST_ROWS), {}, key="answers-table", alt=f"Answers on the test samples of {task}")


def _answers_by_model(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """Return one row per test sample of a task: target and every model's answer, differing ones first."""
    wide = rows.pivot_table(
        index=["sample_id", "target"], columns="variant", values="answer", aggfunc="first", sort=False
    )
    wide = wide[[name for name in variants if name in wide]]
    wide = wide.loc[wide.nunique(axis=1).sort_values(ascending=False, kind="stable").index]
    return wide.rename(columns=title).reset_index(names=["sample", "target"])


if __name__ == "__main__":
    show()
