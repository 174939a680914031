"""What a calibration did: a table by task, curves before and after, the largest weight moves, files to take away."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st

from driftlens.records.before_after import (
    AccuracyChange,
    accuracy_change_note,
    accuracy_changes,
    compared_variants,
    credit_sentences,
    selection_sentences,
)
from driftlens.records.layout import calibration_folder, calibration_weights
from driftlens.records.run import DriftRun
from driftlens_app.pages import path_of
from driftlens_app.runs import Stamp, stamp
from driftlens_app.selection import selection
from driftlens_app.show import show_chart, show_data
from driftlens_app.texts import plain
from driftlens_app.trouble import shown_errors
from driftlens_reports.before_after import before_after
from driftlens_reports.wording import points_interval, size

_CARD = "README.md"
_MOST_BYTES = 1_000_000_000
"""Streamlit holds a download in memory; larger files are named instead."""

_COLUMNS = {
    "drift": st.column_config.NumberColumn(format="%.4g", help="Mean L2 norm of the final drift."),
    "drift_error": st.column_config.NumberColumn(
        "±", format="%.2g", help="Half the 95 % interval of that mean."
    ),
    "relative": st.column_config.NumberColumn(format="%.1f %%", help="Against the expert's feature norm."),
    "cosine": st.column_config.NumberColumn(format="%.4g", help="Of the final feature to the expert's."),
    "accuracy": st.column_config.NumberColumn(format="%.1f %%", help="On test samples."),
    "interval": st.column_config.TextColumn(help="95 % Wilson interval of the accuracy, in percent."),
}

_CHANGES = {
    "change": st.column_config.NumberColumn(format="%+.1f", help="On test samples, in points."),
    "interval": st.column_config.TextColumn("95 % interval"),
    "answered": st.column_config.TextColumn("answers", help="Stored ones: both models' to the same sample."),
    "gained": st.column_config.NumberColumn("to right", help="Answers that were wrong and became right."),
    "lost": st.column_config.NumberColumn("to wrong", help="Answers that were right and became wrong."),
    "p_value": st.column_config.NumberColumn(
        "p", format="%.2g", help="McNemar's test of the answers that changed."
    ),
}
"""Short labels: the table has two thirds of a page."""

_MOST_MOVES = 5
_MOVES = {
    "site": st.column_config.TextColumn("module"),
    "weight_change": st.column_config.NumberColumn(
        "weight change", format="%.2f %%", help="Norm of the change against the norm of the weights."
    ),
    "objective": st.column_config.NumberColumn(
        "objective left",
        format="%.1f %%",
        help="After against before, on calibration samples; 100 % is unchanged.",
    ),
}


def show_result(run: DriftRun, name: str) -> None:
    """Draw the result of the calibration `name`; a table that can't be read takes no other part along."""
    with shown_errors():
        for sentence in [*credit_sentences(run, name), *selection_sentences(run, name)]:
            st.markdown(f"- {plain(sentence)}")
        rows = before_after(run, name)
        st.dataframe(
            _readable(rows),
            hide_index=True,
            column_config=_COLUMNS,
            placeholder="–",
            key="before-after",
            alt="Drift, cosine and accuracy by task, merged and calibrated",
        )
    with shown_errors():
        _show_changes(run, name)
    with shown_errors(), st.container(horizontal=True):
        _downloads(run, name)
    with st.container(horizontal=True):
        st.page_link(path_of("features"), label="Features", icon=":material/scatter_plot:")
        st.page_link(path_of("report"), label="Report & export", icon=":material/description:")
    with shown_errors():
        variants = [variant for variant in compared_variants(run, name) if variant != "expert"]
        show_chart("layer-drift", run, selection().options(variants=variants))
    with shown_errors():
        _show_moves(run, name)
        solved = run.calibration(name)
        show_data(solved, f"{run.id}-calibration-{name}", key="calibration-log", label="Solved modules")
    for notice in run.manifest.calibrations[name].notices:
        st.caption(plain(notice))


@st.cache_data(max_entries=64, show_spinner=False)
def _changes(run_id: str, run_stamp: Stamp, name: str, _run: DriftRun) -> list[AccuracyChange]:
    return accuracy_changes(_run, name)


def _show_changes(run: DriftRun, name: str) -> None:
    found = _changes(run.id, stamp(run.path), name, run)
    if not found:
        return
    st.subheader("Change of accuracy, in points", anchor=False, help="Calibrated minus merged.")
    st.dataframe(
        pd.DataFrame([_change(entry) for entry in found]),
        hide_index=True,
        column_config=_CHANGES,
        placeholder="–",
        key="accuracy-changes",
        alt="Change of accuracy by task with its interval, and the answers that changed",
    )
    st.caption(plain(accuracy_change_note(found)))


def _change(entry: AccuracyChange) -> dict[str, object]:
    paired = entry.paired
    return {
        "task": entry.task,
        "change": 100 * entry.change,
        "interval": points_interval(entry.low, entry.high),
        "answered": f"{paired.n} {entry.split}" if paired else "",
        "gained": paired.gained if paired else None,
        "lost": paired.lost if paired else None,
        "p_value": paired.p_value if paired else None,
    }


def weight_moves(run: DriftRun, name: str) -> pd.DataFrame:
    """The solved modules whose weights moved furthest, relative to their norm, the furthest first.

    Raises:
        RunError: the calibration table can't be read.
    """
    rows = run.calibration(name)
    rows = rows[rows["weight_change"].notna()].sort_values("weight_change", ascending=False, kind="stable")
    before = rows["objective_before"].astype(float)
    left = rows["objective_after"].astype(float) / before.where(before > 0)
    return rows.assign(objective=left)[["layer", "site", "weight_change", "objective"]].head(_MOST_MOVES)


def _show_moves(run: DriftRun, name: str) -> None:
    rows = weight_moves(run, name)
    if rows.empty:
        return
    st.subheader("Largest weight moves", anchor=False)
    shares = ["weight_change", "objective"]
    st.dataframe(
        rows.assign(**{column: 100 * rows[column] for column in shares}),
        hide_index=True,
        column_config=_MOVES,
        placeholder="–",
        key="weight-moves",
        alt=f"The {len(rows)} modules whose weights moved furthest",
    )


def _readable(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with shares in percent and the interval in words."""
    shown = rows[["task", "model", "drift", "drift_error", "relative", "cosine", "accuracy"]].copy()
    shown[["relative", "accuracy"]] *= 100
    shown["interval"] = [
        f"{100 * low:.1f} to {100 * high:.1f}" if low == low and high == high else ""  # false for NaN
        for low, high in zip(rows["low"], rows["high"], strict=True)
    ]
    return shown


def _downloads(run: DriftRun, name: str) -> None:
    weights = run.path / calibration_weights(name)
    card = run.path / calibration_folder(name) / _CARD
    if _is_own_file(run, weights):
        length = size(weights.stat().st_size)
        if weights.stat().st_size > _MOST_BYTES:
            st.caption(f"Calibrated checkpoint: {plain(weights.relative_to(run.path))}, {length}")
        else:
            _download(run, name, weights, f"Calibrated checkpoint ({length})", ":material/download:")
    if _is_own_file(run, card):
        _download(run, name, card, "Model card", ":material/description:")


def _is_own_file(run: DriftRun, file: Path) -> bool:
    return file.is_file() and file.resolve().is_relative_to(run.path.resolve())


def _download(run: DriftRun, name: str, file: Path, label: str, icon: str) -> None:
    st.download_button(
        label,
        data=file.read_bytes,
        file_name=f"{run.id}-{name}{file.suffix}",
        mime="text/markdown" if file.suffix == ".md" else "application/octet-stream",
        on_click="ignore",
        icon=icon,
        key=f"download-{file.name}",
    )
