"""One sample's story: its picture, what each model says it is, and how it drifts from layer to layer."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_app.pictures import pictures
from driftlens_app.show import show_drawn
from driftlens_app.texts import plain
from driftlens_app.trouble import shown_errors
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.sample_curves import sample_curves

_DECISION = {
    "pred": st.column_config.TextColumn("predicts"),
    "margin": st.column_config.NumberColumn(
        format="%.4g", help="The expert's best score minus its second best, in score units."
    ),
    "score_drift_inf": st.column_config.NumberColumn(
        "largest score change", format="%.4g", help="Below half of the margin, the decision can't flip."
    ),
    "score_bound": st.column_config.NumberColumn(
        "bound", format="%.4g", help="Certified bound on the norm of the score drift."
    ),
    "certified": st.column_config.CheckboxColumn(help="Whether the drift is too small to flip the decision."),
    "confidence": st.column_config.NumberColumn(format="%.3f", help="Largest class probability."),
    "ce": st.column_config.NumberColumn("loss", format="%.4g", help="Cross-entropy, in nats."),
}


def show_story(run: DriftRun, task: str, sample_id: str, options: ChartOptions) -> None:
    """Draw the story of one diagnosis sample."""
    st.subheader(f"Sample {plain(sample_id)}", anchor=False)
    with shown_errors():
        (picture,) = pictures(run, task, [sample_id])
        rows = decisions(run, task, sample_id)
        left, right = st.columns([1, 5], gap="medium") if picture is not None else (None, st.container())
        if left is not None and picture is not None:
            left.image(picture, width=128, caption=plain(sample_id), alt=f"Sample {sample_id}")
        with right:
            _show_decisions(rows)
        show_drawn("sample", run.id, sample_curves(run, task, sample_id, options))


def decisions(run: DriftRun, task: str, sample_id: str) -> pd.DataFrame:
    """What each model says of a sample, the expert first: class, scores and margin; empty without class scores.

    Raises:
        DataError: the run has no such task.
        RunError: the output table can't be read.
    """
    rows = run.outputs(task)
    rows = rows[rows["sample_id"] == sample_id]
    if rows.empty:
        return pd.DataFrame()
    first = rows.iloc[0]
    expert = {
        "model": "expert",
        "label": first["label"],
        "pred": first["expert_pred"],
        "margin": first["margin"],
        "ce": first["ce_expert"],
        "confidence": first["confidence_expert"],
    }
    others = rows.assign(model=rows["variant"].map(title), margin=None)
    columns = ["model", "label", *_DECISION]
    return pd.concat([pd.DataFrame([expert]), others[columns].astype(object)], ignore_index=True)[columns]


def _show_decisions(rows: pd.DataFrame) -> None:
    if rows.empty:
        st.info("The run has no class scores: its spec names no head for this task.", icon=":material/info:")
        return
    st.dataframe(
        rows.convert_dtypes(),
        hide_index=True,
        column_config=_DECISION,
        placeholder="–",
        key="sample-decisions",
        alt="What each model says the sample is",
    )
