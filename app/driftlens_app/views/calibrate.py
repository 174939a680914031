"""Calibrate: settings, an estimate, the button, progress by layer, and what came of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import streamlit as st

from driftlens.records.layout import begun_calibration
from driftlens.records.run import DriftRun
from driftlens_app.calibration import CalibrationSettings
from driftlens_app.calibration_form import calibration_form
from driftlens_app.calibration_result import show_result
from driftlens_app.findings import show_findings
from driftlens_app.jobs import Job, View, start, watch
from driftlens_app.jobs.ask import ask
from driftlens_app.jobs.curve import running_drift
from driftlens_app.jobs.requests import calibrate_request
from driftlens_app.live import BAD_ENDS, show_ended, show_live
from driftlens_app.outlook import show_outlook
from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.settings import Settings
from driftlens_app.show import page_title, show_drawn
from driftlens_app.texts import plain
from driftlens_app.trouble import shown_errors
from driftlens_reports.charts.running_curve import running_curve

PAGE = Page("Calibrate", icon=":material/tune:", order=10, section="Calibration")

_ESTIMATE = "_calibration_estimate"
_SHOWN = "_calibrations_shown"


def show() -> None:
    """Draw the page."""
    run, settings = selection().run, Settings.from_environment()
    page_title("Calibrate", "Move the merged model's features back towards each expert's, layer by layer.")
    newest, job = watch(run.path), watch(run.path, "calibrate")
    is_live = newest is not None and newest.is_live
    if settings.read_only:
        st.info("This dashboard is read-only: it starts no jobs.", icon=":material/lock:")
    left, right = st.columns([1, 2])
    blocked = is_live or settings.read_only
    with left:
        wanted, pressed = calibration_form(
            _beginning(run, job),
            taken=run.manifest.calibrations,
            blocked=blocked,
            may_export=not settings.is_one_run,
        )
        with shown_errors():
            _act(run, wanted, pressed, blocked=blocked)
    with right:
        show_live(run.path, read_only=settings.read_only, more=functools.partial(_curve, run))
        if job is not None and job.state in BAD_ENDS:
            show_ended(job)
            if not settings.read_only:
                _offer_to_continue(run, job.job, may_export=not settings.is_one_run)
        _results(run, job)


def _beginning(run: DriftRun, job: View | None) -> CalibrationSettings:
    """What the form begins with: the newest job's settings, as they were if it is to be tried again."""
    if job is None:
        return CalibrationSettings().with_free_name(run.manifest.calibrations)
    last = CalibrationSettings.from_dict(job.job.settings)
    if job.state != "done" and last.replace:
        return last
    return last.with_free_name(run.manifest.calibrations)


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
    settings = CalibrationSettings.from_dict(job.settings)
    if st.button("Continue where it stopped", icon=":material/resume:", key="resume-calibration"):
        with shown_errors():
            # A record may say anything, and the folder of an export lies beside the run.
            resumed = replace(settings.resumed(), save_weights=settings.save_weights and may_export)
            start(calibrate_request(run, resumed))
            st.rerun()


def _curve(run: DriftRun, view: View) -> None:
    if view.job.kind != "calibrate":
        return
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
            st.info(
                "This run has no calibrated variant yet. The defaults are the paper's for CLIP.",
                icon=":material/info:",
            )
        return
    _choose_newest(run, names, job)
    # The default stays out of the URL, so it is none: the newest calibration is another one tomorrow.
    name = st.selectbox("Calibration", names, index=None, key="calibration", bind="query-params")
    if name is None:
        return
    if job is not None and job.state == "done" and job.job.name == name:
        st.success(f"Calibration {plain(name)} is done.", icon=":material/check_circle:")
    st.subheader(f"Before and after {plain(name)}", anchor=False)
    show_result(run, name)


def _choose_newest(run: DriftRun, names: Sequence[str], job: View | None) -> None:
    """Show the calibration that finished last: whenever another one has finished, and where the URL names none."""
    finished = (run.id, tuple(names), job.job.log.name if job is not None and job.state == "done" else "")
    is_chosen = st.session_state.get("calibration", st.query_params.get("calibration")) in names
    if not is_chosen or st.session_state.get(_SHOWN, finished) != finished:
        st.session_state["calibration"] = names[-1]  # the manifest lists them as they were finished
    st.session_state[_SHOWN] = finished


if __name__ == "__main__":
    show()
