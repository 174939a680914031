"""Repair: settings, the button, progress by layer, and what came of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from urllib.parse import urlencode

import streamlit as st

from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest
from driftlens.results.calibration_summary import (
    calibration_effect_tables,
    calibration_sentences,
    leaderboard_table,
)
from driftlens.results.formatting import format_bytes
from driftlens.results.verdict import task_table, verdict
from driftlens.runs.manifest import (
    calibrated_weights_file,
    calibration_folder,
    calibration_marker,
    require_unlocked,
)
from driftlens.runs.run import DriftRun, has_live_modules, unfinished_phases
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import RunLockedError, join_names, shorten_list, start_sentence
from driftlens.utils.variants import calibrated_variant
from driftlens_app import calibration
from driftlens_app.job_panel import (
    recommended_steps,
    show_failed_job,
    show_live_job,
    show_step_buttons,
    start_and_rerun,
)
from driftlens_app.job_requests import calibrate_request, compare_methods_request, sweep_request
from driftlens_app.processes import Job, JobStatus, drift_so_far, has_live_job, poll_job
from driftlens_app.run_cache import open_cached_run
from driftlens_app.sample_explorer import show_explorer
from driftlens_app.selection import current_selection
from driftlens_app.settings import Settings, is_file_inside
from driftlens_app.show import (
    Page,
    escape_markdown,
    is_dark,
    page_path,
    select_page_part,
    show_before_after,
    show_caption,
    show_chart,
    show_data_expander,
    show_drawn_chart,
    show_errors_in_place,
    show_headline,
    show_note,
    show_report_table,
    verdict_markdown,
)
from driftlens_app.views import compare
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.layer_curves import draw_running_drift

PAGE = Page("Repair", icon=":material/tune:", order=50)

_SHOWN = "_calibrations_shown"
# Repairs that take this many times as long as FeatCal are compared only on request.
_PATIENCE = 5.0
# Streamlit holds a download in memory, so that larger files are named instead.
_MAX_BYTES = 1_000_000_000


def show() -> None:
    """Draw the page Repair: calibration form, results and method comparison."""
    # Without a subtitle, which would push the result off the first screen.
    st.title(PAGE.title, anchor=False, help="Move the merged model's features towards the experts', layer by layer.")
    if select_page_part(("Calibrate", "Compare"), key="repair") == "Compare":
        compare.show()
        return
    run, settings = current_selection().run, Settings.from_environment()
    job = poll_job(run.path, "calibrate")
    if settings.read_only:
        show_note("This dashboard is read-only.", "lock")
    at_work = has_live_job(run.path)
    blocked = at_work or settings.read_only
    reason = "" if blocked else calibration_obstacle(run)
    # Progress takes the place of the buttons.
    top = st.container()
    with show_errors_in_place():
        request, pressed = calibration.show_calibration_form(
            None if at_work else top,
            taken=run.manifest.calibrations,
            blocked=blocked,
            obstacle=reason,
            exports=None if settings.is_single_run else str(run.path),
            model_kinds=run.manifest.model_kinds,
            counts={task: len(ids) for task, ids in run.manifest.sample_ids.get("calibration", {}).items()},
        )
        if pressed:
            with top:
                start_and_rerun(calibrate_request(run, request))
    with top:
        if not show_live_job(run.path, functools.partial(_show_running_drift, run)) and at_work:
            # The job ended while the form was drawn.
            st.rerun()
        if not (blocked or run.manifest.finished):
            show_step_buttons(run, *recommended_steps(run, verdict(run))[:1], verdict(run).command)
        if show_failed_job(job) and job is not None and not settings.read_only:
            _show_resume_button(run, job.job)
    _show_calibration_results(run, job)
    if run.manifest.calibrations:
        _show_setting_sweeps(run, blocked=blocked)
    _show_method_comparison(run, blocked=blocked)


def calibration_obstacle(run: DriftRun) -> str:
    """Return the reason why the run cannot be calibrated in its present state; empty if it can."""
    try:
        require_unlocked(run.path)
    except RunLockedError as error:
        return f"{error.message}. {error.hint}"
    if has_live_modules(run.manifest):
        return "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    missing = shorten_list(unfinished_phases(run.manifest))
    return f"the run is unfinished; still to be done: {missing}. Resume its analysis first" if missing else ""


def _show_resume_button(run: DriftRun, job: Job) -> None:
    if not (run.path / calibration_marker(job.name)).is_file():
        # It ended before the first layer was stored, so there is nothing to resume.
        return
    if st.button("Continue where it stopped", icon=":material/resume:", key="resume-calibration"):
        with show_errors_in_place():
            last = CalibrationRequest(**job.settings)
            # Records are not trusted, so the path of the export is built here.
            is_one_run = Settings.from_environment().is_single_run
            place = None if last.save_weights is None or is_one_run else f"{run.path}-{job.name}"
            # The old calibration is kept until the new one is solved.
            stays = last.replace and job.name in run.manifest.calibrations
            paths = {"save_weights": place, "save_adapter": None, "rank": None}
            begun = last.with_changes(name=job.name, resume=True, replace=stays, **paths)
            start_and_rerun(calibrate_request(run, begun))


def _show_running_drift(run: DriftRun, view: JobStatus) -> None:
    """Draw drift by layer while the calibration solves layers; rerun the page once results are measured."""
    if view.job.kind != "calibrate":
        return
    name = view.job.name
    if open_cached_run(run.path).manifest.calibrations.get(name) != run.manifest.calibrations.get(name):
        # The page shows the first numbers while the job continues.
        st.rerun()
    if drifts := drift_so_far(view.job):
        dark, method = current_selection().options().dark, view.job.settings.get("method") or ""
        drawn = draw_running_drift(run, name, drifts, dark=dark, method=method)
        show_drawn_chart("running", run.id, drawn)


def _show_calibration_results(run: DriftRun, job: JobStatus | None) -> None:
    names = list(run.manifest.calibrations)
    if not names:
        with show_errors_in_place():
            show_headline(run)
        if job is None:
            show_note("No repair yet: the buttons above make one.")
        return
    _select_newest_calibration(run, names, job)
    heading, pin, choice = st.columns([2, 1, 1], vertical_alignment="center")
    # Streamlit leaves the default out of the URL, so there is none: the newest calibration changes with time.
    field = {"key": "calibration", "bind": "query-params", "label_visibility": "collapsed"}
    name = choice.selectbox("Calibration", names, index=None, **field)
    if name is None:
        return
    heading.header(f"Before and after {escape_markdown(name)}", anchor=False)
    if job is not None and job.job.name == name and job.state == "done":
        st.caption(f":material/check_circle: Calibration {escape_markdown(name)} is done.")
    elif job is not None and job.job.name == name and job.is_live and not job.job.settings.get("replace"):
        st.caption(":material/pending: Drift and accuracy are measured; attribution to layers is still running.")
    if len(names) > 1:
        with pin:
            _show_pin(run, name)
    _show_single_calibration(run, name)


def _show_pin(run: DriftRun, name: str) -> None:
    """Show a switch that makes this calibration the one of headline, exhibits and cards, instead of the best."""
    is_pinned = run.manifest.pinned == name
    blocked = Settings.from_environment().read_only or has_live_job(run.path)
    about = "Headline, exhibits and cards show this calibration. Without a pin they show the best one."
    key = f"pin-{run.id}-{name}-{is_pinned}"
    if st.toggle("Pin to the headline", is_pinned, key=key, disabled=blocked, help=about) != is_pinned:
        with show_errors_in_place():
            with RunWriter.resume(run.path) as writer:
                writer.pin_calibration("" if is_pinned else name)
            st.rerun()


def _select_newest_calibration(run: DriftRun, names: Sequence[str], job: JobStatus | None) -> None:
    """Select the newest calibration after another one has finished, or if the URL names none."""
    finished = (run.id, tuple(names), job.job.log.name if job is not None and job.state == "done" else "")
    is_chosen = st.session_state.get("calibration", st.query_params.get("calibration")) in names
    if not is_chosen or st.session_state.get(_SHOWN, finished) != finished:
        # The manifest lists calibrations in the order in which they finished.
        st.session_state["calibration"] = names[-1]
    st.session_state[_SHOWN] = finished


def _show_single_calibration(run: DriftRun, name: str) -> None:
    """Show the results of one calibration; errors of one table do not hide the others."""
    options = ChartOptions(variants=("merged", calibrated_variant(name)), relative=True, dark=is_dark())
    with show_errors_in_place():
        show_before_after(run, options, functools.partial(show_headline, run, name))
    with show_errors_in_place():
        # The chart above shows the drift.
        show_report_table(task_table(run, verdict(run, name)), {"relative drift"})
    with show_errors_in_place():
        st.header("What the repair fixed, and what it did not", anchor=False)
        show_explorer(run, "wall", urlencode({"as": "groups", "repair": calibrated_variant(name)}))
    with show_errors_in_place(), st.container(horizontal=True, vertical_alignment="center"):
        _show_downloads(run, name)
        st.page_link(page_path("samples"), label="Samples", icon=":material/scatter_plot:")
        st.page_link(page_path("export"), label="Export", icon=":material/description:")
    with show_errors_in_place():
        judged = verdict(run, name)
        for sentence in (*recommended_steps(run, judged)[1], *calibration_sentences(run, name)):
            st.markdown(f"- {verdict_markdown(run, sentence, judged.command)}")
        drawer = st.expander("All numbers", key="all-numbers", on_change="rerun")
        with drawer:
            for sheet in calibration_effect_tables(run, name) if drawer.open else ():
                # With the column of samples, a table would be wider than a window.
                show_report_table(sheet, {"samples"})
    with show_errors_in_place():
        solved = run.calibration(name)
        show_data_expander(solved, f"{run.id}-calibration-{name}", key="calibration-log", label="Solved modules")
    for notice in run.manifest.calibrations[name].notices:
        show_caption(start_sentence(notice), 90)


def _show_setting_sweeps(run: DriftRun, *, blocked: bool) -> None:
    show_failed_job(poll_job(run.path, "sweep"))
    without = "Run a sweep to see how each setting affects accuracy."
    show_chart("sweeps", run, current_selection().options(variants=None), without)
    swept = join_names(calibration.available_methods()[DEFAULT_METHOD].swept)
    if st.button(f"Sweep {swept}", icon=":material/grid_on:", key="sweep", disabled=blocked):
        with show_errors_in_place():
            start_and_rerun(sweep_request(run))


def _show_method_comparison(run: DriftRun, *, blocked: bool) -> None:
    """Show the gain of calibrations against their cost, and a form that runs further methods."""
    without = "Compare at least two repairs to see this chart."
    show_chart("arena", run, ChartOptions(dark=is_dark()), without)
    if len(run.manifest.calibrations) > 1:
        with show_errors_in_place():
            # With the column of cosines, the table would be wider than a window.
            show_report_table(leaderboard_table(run), {"cosine"})
    with show_errors_in_place(), st.container(horizontal=True, vertical_alignment="bottom"):
        calibrators = calibration.available_methods()
        chosen = st.multiselect(
            "Repairs to compare",
            [*calibrators],
            default=[name for name, method in calibrators.items() if method.effort < _PATIENCE],
            format_func=lambda name: calibrators[name].title,
            key="arena-methods",
            width=760,
            help="Each with its preset or defaults; those that are left out at first take minutes and more.",
        )
        if st.button("Compare repairs", icon=":material/swords:", key="arena", disabled=blocked):
            start_and_rerun(compare_methods_request(run, chosen))


def _show_downloads(run: DriftRun, name: str) -> None:
    places = {
        "download": calibrated_weights_file(name),
        "description": f"{calibration_folder(name)}/README.md",
    }
    for icon, place in places.items():
        file = run.path / place
        if not is_file_inside(file):
            continue
        label = "Model card"
        if icon == "download":
            label = f"Calibrated checkpoint ({format_bytes(file.stat().st_size)})"
            if file.stat().st_size > _MAX_BYTES:
                st.caption(f"{label}: {escape_markdown(place)}")
                continue
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
