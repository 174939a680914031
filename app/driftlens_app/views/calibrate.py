"""Calibrate: settings, an estimate, the button, progress by layer, and what came of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn, TextColumn

from driftlens.records.before_after import (
    AccuracyChange,
    accuracy_change_note,
    accuracy_changes,
    compared_variants,
    credit_sentences,
    selection_sentences,
)
from driftlens.records.layout import begun_calibration, calibration_folder, calibration_weights
from driftlens.records.run import DriftRun
from driftlens_app.calibration import CalibrationSettings, calibration_form
from driftlens_app.jobs import Job, View, start, watch
from driftlens_app.jobs.command_line import ask
from driftlens_app.jobs.log import running_drift
from driftlens_app.jobs.requests import calibrate_request
from driftlens_app.live import BAD_ENDS, show_ended, show_live
from driftlens_app.outlook import show_findings, show_outlook
from driftlens_app.pages import Page, path_of
from driftlens_app.runs import Stamp, opened, stamp
from driftlens_app.selection import selection
from driftlens_app.settings import Settings, is_file_inside
from driftlens_app.show import note, plain, show_chart, show_data, show_drawn, show_table, shown_errors
from driftlens_reports.charts.page_curves import running_curve
from driftlens_reports.verdicts import before_after
from driftlens_reports.wording import points_interval, share_interval, size

PAGE = Page(
    "Calibrate",
    icon=":material/tune:",
    order=10,
    section="Calibration",
    says="Move the merged model's features back towards each expert's, layer by layer.",
)

_ESTIMATE = "_calibration_estimate"
_SHOWN = "_calibrations_shown"

_MOST_BYTES = 1_000_000_000
"""Streamlit holds a download in memory; larger files are named instead."""

_COLUMNS = {
    "drift": NumberColumn(format="%.4g", help="Mean L2 norm of the final drift."),
    "drift_error": NumberColumn("±", format="%.2g", help="Half the 95 % interval of that mean."),
    "relative": NumberColumn(format="%.1f %%", help="Against the expert's feature norm."),
    "cosine": NumberColumn(format="%.4g", help="Of the final feature to the expert's."),
    "accuracy": NumberColumn(format="%.1f %%", help="On test samples."),
    "interval": TextColumn(help="95 % Wilson interval of the accuracy, in percent."),
}

_CHANGES = {
    "change": NumberColumn(format="%+.1f", help="On test samples, in points."),
    "interval": TextColumn("95 % interval"),
    "answered": TextColumn("answers", help="Stored ones: both models' to the same sample."),
    "gained": NumberColumn("to right", help="Answers that were wrong and became right."),
    "lost": NumberColumn("to wrong", help="Answers that were right and became wrong."),
    "p_value": NumberColumn("p", format="%.2g", help="McNemar's test of the answers that changed."),
}
"""Short labels: the table has two thirds of a page."""

_MOST_MOVES = 5
_MOVES = {
    "site": TextColumn("module"),
    "weight_change": NumberColumn(
        "weight change", format="%.2f %%", help="Norm of the change against the norm of the weights."
    ),
    "objective": NumberColumn(
        "objective left",
        format="%.1f %%",
        help="After against before, on calibration samples; 100 % is unchanged.",
    ),
}


def show() -> None:
    """Draw the page."""
    run, settings = selection().run, Settings.from_environment()
    newest, job = watch(run.path), watch(run.path, "calibrate")
    is_live = newest is not None and newest.is_live
    if settings.read_only:
        note("This dashboard is read-only: it starts no jobs.", "lock")
    left, right = st.columns([1, 2])
    blocked = is_live or settings.read_only
    with left, shown_errors():
        wanted, pressed = calibration_form(
            _last(run, job),
            taken=run.manifest.calibrations,
            blocked=blocked,
            may_export=not settings.is_one_run,
        )
        _act(run, wanted, pressed, blocked=blocked)
    with right:
        show_live(run.path, functools.partial(_curve, run))
        if job is not None and job.state in BAD_ENDS:
            show_ended(job)
            if not settings.read_only:
                _offer_to_continue(run, job.job, may_export=not settings.is_one_run)
        _results(run, job)


def _last(run: DriftRun, job: View | None) -> CalibrationSettings | None:
    """The newest job's settings, as they were if it is to be tried again, else under a name that is free."""
    if job is None:
        return None
    last = CalibrationSettings.from_dict(job.job.settings)
    is_again = job.state != "done" and last.replace
    return last if is_again else last.with_free_name(run.manifest.calibrations)


def _act(run: DriftRun, wanted: CalibrationSettings, pressed: str, *, blocked: bool) -> None:
    if pressed == "calibrate":
        start(calibrate_request(run, wanted))
        st.rerun()
    if pressed == "estimate":
        wanted.require_free_name(run.manifest.calibrations)
        arguments = ("calibrate", str(run.path), *wanted.arguments(run.path), "--dry-run", "--json")
        with st.spinner("Checking weights and data"):
            st.session_state[_ESTIMATE] = (run.id, wanted, ask(arguments, run.path.parent))
    known = st.session_state.get(_ESTIMATE)
    if known is not None and known[:2] == (run.id, wanted):
        show_findings(known[2])
    elif not blocked:
        show_outlook(run)


def _offer_to_continue(run: DriftRun, job: Job, *, may_export: bool) -> None:
    if not (run.path / begun_calibration(job.name)).is_file():
        return  # It ended before it had begun: with a fresh start nothing is lost.
    if st.button("Continue where it stopped", icon=":material/resume:", key="resume-calibration"):
        with shown_errors():
            last = CalibrationSettings.from_dict(job.settings)
            # A record may say anything, and the folder of an export lies beside the run.
            save = last.save_weights and may_export
            start(calibrate_request(run, replace(last, resume=True, replace=False, save_weights=save)))
            st.rerun()


def _curve(run: DriftRun, view: View) -> None:
    if view.job.kind != "calibrate":
        return
    name = view.job.name
    if opened(run.path).manifest.calibrations.get(name) != run.manifest.calibrations.get(name):
        st.rerun()  # the first numbers are there, and the page shows them beside the work that goes on
    found = running_drift(view.job)
    if not found:
        st.caption("The drift of each layer appears here once it is calibrated.")
        return
    drawn = running_curve(run, view.job.name, found, dark=selection().options().dark)
    show_drawn("running", run.id, drawn)


def _results(run: DriftRun, job: View | None) -> None:
    names = list(run.manifest.calibrations)
    if not names:
        if job is None:
            note("This run has no calibrated variant yet. The defaults are the paper's for CLIP.")
        return
    _choose_newest(run, names, job)
    # The default stays out of the URL, so it is none: the newest calibration is another one tomorrow.
    name = st.selectbox("Calibration", names, index=None, key="calibration", bind="query-params")
    if name is None:
        return
    if job is not None and job.job.name == name and job.state == "done":
        st.success(f"Calibration {plain(name)} is done.", icon=":material/check_circle:")
    elif job is not None and job.job.name == name and job.is_live and not job.job.settings.get("replace"):
        st.info("Drift and accuracy are measured; where the drift comes from is still being computed.")
    st.subheader(f"Before and after {plain(name)}", anchor=False)
    _show_result(run, name)


def _choose_newest(run: DriftRun, names: Sequence[str], job: View | None) -> None:
    """Show the calibration that finished last: whenever another one has finished, and where the URL names none."""
    finished = (run.id, tuple(names), job.job.log.name if job is not None and job.state == "done" else "")
    is_chosen = st.session_state.get("calibration", st.query_params.get("calibration")) in names
    if not is_chosen or st.session_state.get(_SHOWN, finished) != finished:
        st.session_state["calibration"] = names[-1]  # the manifest lists them as they were finished
    st.session_state[_SHOWN] = finished


def _show_result(run: DriftRun, name: str) -> None:
    """Draw the result of the calibration `name`; a table that can't be read takes no other part along."""
    with shown_errors():
        for sentence in [*credit_sentences(run, name), *selection_sentences(run, name)]:
            st.markdown(f"- {plain(sentence)}")
        alt = "Drift, cosine and accuracy by task, merged and calibrated"
        show_table(_readable(before_after(run, name)), _COLUMNS, key="before-after", alt=alt)
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
    alt = "Change of accuracy by task with its interval, and the answers that changed"
    show_table(pd.DataFrame([_change(entry) for entry in found]), _CHANGES, key="accuracy-changes", alt=alt)
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


def _weight_moves(run: DriftRun, name: str) -> pd.DataFrame:
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
    rows = _weight_moves(run, name)
    if rows.empty:
        return
    st.subheader("Largest weight moves", anchor=False)
    shown = rows.assign(**{column: 100 * rows[column] for column in ("weight_change", "objective")})
    alt = f"The {len(rows)} modules whose weights moved furthest"
    show_table(shown, _MOVES, key="weight-moves", alt=alt)


def _readable(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with shares in percent and the interval in words."""
    shown = rows[["task", "model", "drift", "drift_error", "relative", "cosine", "accuracy"]].copy()
    shown[["relative", "accuracy"]] *= 100
    shown["interval"] = [*map(share_interval, rows["low"], rows["high"])]
    return shown


def _downloads(run: DriftRun, name: str) -> None:
    weights = run.path / calibration_weights(name)
    if is_file_inside(weights):
        length = weights.stat().st_size
        if length > _MOST_BYTES:
            st.caption(f"Calibrated checkpoint: {plain(weights.relative_to(run.path))}, {size(length)}")
        else:
            _download(run, name, weights, f"Calibrated checkpoint ({size(length)})", "download")
    card = run.path / calibration_folder(name) / "README.md"
    if is_file_inside(card):
        _download(run, name, card, "Model card", "description")


def _download(run: DriftRun, name: str, file: Path, label: str, icon: str) -> None:
    st.download_button(
        label,
        data=file.read_bytes,
        file_name=f"{run.id}-{name}{file.suffix}",
        mime="text/markdown" if file.suffix == ".md" else "application/octet-stream",
        on_click="ignore",
        icon=f":material/{icon}:",
        key=f"download-{file.name}",
    )


if __name__ == "__main__":
    show()
