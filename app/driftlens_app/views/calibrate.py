"""Calibrate: settings, an estimate, the button, progress by layer, and what came of it."""

from __future__ import annotations

import functools

import pandas as pd
import streamlit as st

from driftlens.records.run import DriftRun
from driftlens_app.calibration import CalibrationSettings
from driftlens_app.calibration_form import calibration_form
from driftlens_app.calibration_result import show_result
from driftlens_app.findings import show_findings
from driftlens_app.jobs import View, start, watch
from driftlens_app.jobs.ask import ask
from driftlens_app.jobs.curve import running_drift
from driftlens_app.jobs.requests import calibrate_request
from driftlens_app.live import BAD_ENDS, show_ended, show_live
from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.settings import Settings
from driftlens_app.show import page_title
from driftlens_app.texts import plain
from driftlens_app.trouble import shown_errors
from driftlens_reports.charts.theme import palette

PAGE = Page("Calibrate", icon=":material/tune:", order=10, section="Calibration")

_ESTIMATE = "_calibration_estimate"


def show() -> None:
    """Draw the page."""
    run, settings = selection().run, Settings.from_environment()
    page_title("Calibrate", "Move the merged model's features back towards each expert's, layer by layer.")
    newest, job = watch(run.path), watch(run.path, "calibrate")
    is_live = newest is not None and newest.is_live
    if settings.read_only:
        st.info("This dashboard is read-only: it starts no jobs.", icon=":material/lock:")
    left, right = st.columns([1, 2], gap="medium")
    with left:
        begin = CalibrationSettings.from_dict(job.job.settings) if job is not None else CalibrationSettings()
        wanted, pressed = calibration_form(
            begin, blocked=is_live or settings.read_only, may_export=not settings.is_one_run
        )
        with shown_errors():
            _act(run, wanted, pressed)
    with right:
        show_live(run.path, read_only=settings.read_only, more=functools.partial(_curve, run))
        if job is not None and job.state in BAD_ENDS:
            show_ended(job)
            if not settings.read_only:
                _offer_to_continue(run, begin)
        _results(run, job)


def _act(run: DriftRun, wanted: CalibrationSettings, pressed: str) -> None:
    if pressed == "calibrate":
        start(calibrate_request(run, wanted))
        st.rerun()
    if pressed == "estimate":
        arguments = ("calibrate", str(run.path), *wanted.arguments(run.path), "--dry-run", "--json")
        with st.spinner("Checking weights and data"):
            st.session_state[_ESTIMATE] = (run.id, wanted, ask(arguments, run.path.parent))
    known = st.session_state.get(_ESTIMATE)
    if known is not None and known[:2] == (run.id, wanted):
        show_findings(known[2])


def _offer_to_continue(run: DriftRun, settings: CalibrationSettings) -> None:
    if st.button("Continue where it stopped", icon=":material/resume:", key="resume-calibration"):
        with shown_errors():
            start(calibrate_request(run, settings.resumed()))
            st.rerun()


def _curve(run: DriftRun, view: View) -> None:
    """Mean drift behind each layer: the merged model's, and the calibrated one's as far as it has come."""
    if view.job.kind != "calibrate":
        return
    found = running_drift(view.job)
    if not found:
        st.caption("The drift of each layer appears here once it is calibrated.")
        return
    merged = run.layers(variant="merged").groupby("layer")["drift_l2_mean"].mean()
    rows = pd.DataFrame({"merged": merged, "calibrated": pd.Series(found)}).rename_axis("layer").reset_index()
    roles = palette(st.context.theme.type == "dark").roles
    st.line_chart(
        rows,
        x="layer",
        y=["merged", "calibrated"],
        x_label="layer",
        y_label="mean L2 drift",
        color=[roles["merged"][0], roles["calibrated"][0]],
        height=260,
    )
    st.caption("Merged: diagnosis samples. Calibrated: calibration samples, while it runs. Mean over tasks.")


def _results(run: DriftRun, job: View | None) -> None:
    names = list(run.manifest.calibrations)
    if not names:
        if job is None:
            st.info(
                "This run has no calibrated variant yet. The defaults are the paper's for CLIP.",
                icon=":material/info:",
            )
        return
    newest = job.job.name if job is not None and job.job.name in names else names[-1]
    name = st.selectbox("Calibration", names, index=names.index(newest), key="calibration")
    st.subheader(f"Before and after {plain(name)}", anchor=False)
    show_result(run, name)


if __name__ == "__main__":
    show()
