"""Samples: test samples in every model, their positions and predictions."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from driftlens.results.measures import sample_outcomes
from driftlens.results.verdict import shown_repair, verdict
from driftlens.utils.variants import calibration_name, display_name
from driftlens_app.job_panel import offer_attribution, show_repair_link
from driftlens_app.sample_explorer import show_explorer, show_explorer_download
from driftlens_app.selection import TASK, VARIANTS, Selection, current_selection
from driftlens_app.show import Page, select_page_part, show_chart, show_note, show_part_charts, show_table
from driftlens_reports.charts.chart import SECTIONS, chart_names_by_heading
from driftlens_reports.charts.picking import chosen_variants

PAGE = Page(
    "Samples",
    icon=":material/scatter_plot:",
    order=40,
    says="Test samples in the expert and each variant, in one projection per layer.",
)

_MOST_ROWS = 200


def show() -> None:
    """Draw the page Samples: explorer, decisions and scores of single samples."""
    part = select_page_part([*chart_names_by_heading("samples")], key="part")
    if part == SECTIONS["plane"].part:
        _show_explorer_part(part)
    else:
        _show_output_part(part)


def _show_explorer_part(part: str) -> None:
    chosen = current_selection()
    if not (chosen.run.tasks and chosen.run.manifest.layers):
        show_note("The run has no features yet.")
        return
    show_explorer(chosen.run)
    with st.container(horizontal=True, vertical_alignment="center"):
        show_explorer_download(chosen.run)
        if not any(map(calibration_name, chosen.run.variants)):
            show_repair_link()
    offer_attribution(chosen.run)
    for name in chart_names_by_heading("samples")[part]:
        # The explorer replaces the scatter plot of reports.
        if name != "scatter":
            show_chart(name, chosen.run, chosen.options())


def _show_output_part(part: str) -> None:
    """Show the part of the page on scores, decisions or probabilities."""
    chosen = current_selection(TASK, VARIANTS, with_base=part == SECTIONS["accuracy"].part)
    if chosen.run.outputs().empty:
        show_note(
            "The run has no class scores. Add `heads` to the spec: `classes` and `templates`, or a classifier file."
        )
    show_part_charts("samples", part, chosen.run, chosen.options())
    if part == SECTIONS["accuracy"].part:
        _show_answers(chosen)


def _show_answers(chosen: Selection) -> None:
    """Show the generated answers of all models on test samples, if the run has any."""
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
    repaired = [name for name in chosen_variants(chosen.run, chosen.options()) if calibration_name(name)]
    if merged := verdict(chosen.run).merged:
        last = max(repaired, key=lambda name: name == shown_repair(chosen.run), default="")
        outcomes = sample_outcomes(chosen.run, task, merged, last)["outcome"]
        if shown["sample"].isin(outcomes.index).any():
            shown.insert(1, "outcome", shown["sample"].map(outcomes))
    show_table(shown.head(_MOST_ROWS), {}, key="answers-table", alt=f"Answers on the test samples of {task}")


def _answers_by_model(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """Return one row per test sample: target and the answer of every model, differing ones first."""
    wide = rows.pivot_table(
        index=["sample_id", "target"], columns="variant", values="answer", aggfunc="first", sort=False
    )
    wide = wide[[name for name in variants if name in wide]]
    wide = wide.loc[wide.nunique(axis=1).sort_values(ascending=False, kind="stable").index]
    return wide.rename(columns=display_name).reset_index(names=["sample", "target"])


if __name__ == "__main__":
    show()
