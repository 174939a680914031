"""Repair: settings, the button, progress by layer, and what came of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn, TextColumn

from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest
from driftlens.results.calibration_summary import arena_sheet, calibration_sheets, selection_sentences
from driftlens.results.formatting import estimate, size, unbroken, written
from driftlens.results.measures import change_in_words
from driftlens.results.verdict import Verdict, task_sheet, verdict
from driftlens.runs.manifest import (
    begun_calibration,
    calibration_folder,
    calibration_weights,
    require_unlocked,
)
from driftlens.runs.run import DriftRun, is_live, unanalyzed
from driftlens.utils.errors import RunLockedError, counted, listed, some_of
from driftlens.utils.variants import calibrated, title
from driftlens_app import calibration
from driftlens_app.live import begin, show_bad_end, show_live, show_step_buttons, steps_of
from driftlens_app.processes import Job, View, is_at_work, running_drift, running_scores, watch
from driftlens_app.requests import calibrate_request, methods_request, sweep_request
from driftlens_app.runs import opened
from driftlens_app.samples import show_explorer
from driftlens_app.selection import selection
from driftlens_app.settings import Settings, is_file_inside
from driftlens_app.show import (
    Page,
    caption,
    is_dark,
    is_narrow,
    kept,
    note,
    open_part,
    path_of,
    plain,
    show_chart,
    show_data,
    show_drawn,
    show_headline,
    show_sheet,
    show_table,
    shown_errors,
    with_command,
)
from driftlens_app.views import compare
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.layer_curves import mean_curves, running_curve

PAGE = Page(
    "Repair",
    icon=":material/tune:",
    order=50,
    says="Move the merged model's features towards the experts', layer by layer.",
)

_SHOWN = "_calibrations_shown"
# Repairs that take this many times as long as FeatCal are compared only on request.
_PATIENCE = 5.0
# Streamlit holds a download in memory, so that larger files are named instead.
_MAX_BYTES = 1_000_000_000


def show() -> None:
    """Draw the page."""
    if open_part(("Calibrate", "Compare"), key="repair") == "Compare":
        compare.show()
        return
    run, settings = selection().run, Settings.from_environment()
    job = watch(run.path, "calibrate")
    if settings.read_only:
        note("This dashboard is read-only.", "lock")
    left, right = st.columns([1, 2])
    at_work = is_at_work(run.path)
    blocked = at_work or settings.read_only
    reason = "" if blocked else obstacle(run)
    with left, shown_errors():
        request, pressed = calibration.calibration_form(
            taken=run.manifest.calibrations,
            blocked=blocked,
            obstacle=reason,
            exports=None if settings.is_one_run else str(run.path),
            loader=run.manifest.architecture.get("loader", ""),
            counts={task: len(ids) for task, ids in run.manifest.sample_ids.get("calibration", {}).items()},
        )
        if pressed:
            begin(calibrate_request(run, request))
        if not (blocked or run.manifest.finished):
            show_step_buttons(run, *steps_of(run, verdict(run))[:1], verdict(run).command)
    with right:
        if not show_live(run.path, functools.partial(_show_running_curve, run)) and at_work:
            # The job ended while the form was drawn.
            st.rerun()
        if show_bad_end(job) and job is not None and not settings.read_only:
            _show_resume_button(run, job.job)
        _show_calibration_results(run, job)
    if run.manifest.calibrations:
        _show_setting_sweeps(run, blocked=blocked)
    _show_method_comparison(run, blocked=blocked)


def obstacle(run: DriftRun) -> str:
    """Return why the run's state prevents any calibration; empty if it does not."""
    try:
        require_unlocked(run.path)
    except RunLockedError as error:
        return f"{error.message}. {error.hint}"
    if is_live(run.manifest):
        return "the run's live modules are not here; `run.calibrate(...)` in Python takes them"
    missing = some_of(unanalyzed(run.manifest, scored=True))
    return f"the run is unfinished; still to be done: {missing}. Resume its analysis first" if missing else ""


def _show_resume_button(run: DriftRun, job: Job) -> None:
    if not (run.path / begun_calibration(job.name)).is_file():
        # It ended before the first layer was stored, so there is nothing to resume.
        return
    if st.button("Continue where it stopped", icon=":material/resume:", key="resume-calibration"):
        with shown_errors():
            last = CalibrationRequest(**job.settings)
            # Records are not trusted, so the path of the export is built here.
            is_one_run = Settings.from_environment().is_one_run
            place = None if last.save_weights is None or is_one_run else f"{run.path}-{last.name}"
            # The old calibration is kept until the new one is solved.
            stays = last.replace and job.name in run.manifest.calibrations
            begin(calibrate_request(run, last.changed(resume=True, replace=stays, save_weights=place)))


def _show_running_curve(run: DriftRun, view: View) -> None:
    """Draw the curve as far as layers are solved, and the whole page again once drift and accuracy are measured."""
    if view.job.kind != "calibrate":
        return
    name = view.job.name
    if opened(run.path).manifest.calibrations.get(name) != run.manifest.calibrations.get(name):
        # The page shows the first numbers while the job continues.
        st.rerun()
    if tried := running_scores(view.job):
        _show_tried_candidates(tried)
    if drifts := running_drift(view.job):
        drawn = running_curve(run, name, drifts, dark=selection().options().dark)
        show_drawn("running", run.id, drawn)


def _show_tried_candidates(scores: Mapping[str, float]) -> None:
    rows = pd.DataFrame(scores.items(), columns=["candidate", "distance"]).sort_values("distance")
    about = "Distance to the experts."
    looks = {"distance": NumberColumn("distance", format="%.4f", width=80, help=about)}
    # Long names would push the distances out of view.
    if is_narrow():
        looks |= {"candidate": TextColumn("candidate", width=165)}
    show_table(rows, looks, key="tried", alt=f"{counted(len(rows), 'candidate')} tried so far")
    caption("On held-out calibration samples, without labels. Lower is better.")


def _show_calibration_results(run: DriftRun, job: View | None) -> None:
    names = list(run.manifest.calibrations)
    if not names:
        with shown_errors():
            show_headline(run)
        if job is None:
            note("This run has no calibrated variant yet.")
        return
    _select_newest_calibration(run, names, job)
    # Streamlit leaves the default out of the URL, so there is none: the newest calibration changes with time.
    name = st.selectbox("Calibration", names, index=None, key="calibration", bind="query-params")
    if name is None:
        return
    if job is not None and job.job.name == name and job.state == "done":
        st.success(f"Calibration {plain(name)} is done.", icon=":material/check_circle:")
    elif job is not None and job.job.name == name and job.is_live and not job.job.settings.get("replace"):
        st.info("Drift and accuracy are measured; attribution to layers is still running.")
    st.header(f"Before and after the repair {plain(name)}", anchor=False)
    _show_single_calibration(run, name)


def _select_newest_calibration(run: DriftRun, names: Sequence[str], job: View | None) -> None:
    """Select the newest calibration if another one finished or the URL names none."""
    finished = (run.id, tuple(names), job.job.log.name if job is not None and job.state == "done" else "")
    is_chosen = st.session_state.get("calibration", st.query_params.get("calibration")) in names
    if not is_chosen or st.session_state.get(_SHOWN, finished) != finished:
        # The manifest lists calibrations in the order in which they finished.
        st.session_state["calibration"] = names[-1]
    st.session_state[_SHOWN] = finished


def _show_single_calibration(run: DriftRun, name: str) -> None:
    """Show one calibration; an unreadable table does not hide other parts."""
    with shown_errors():
        _show_before_and_after(run, verdict(run, name))
    with shown_errors():
        options = ChartOptions(variants=("merged", calibrated(name)), relative=True, dark=is_dark())
        st.header("Relative drift by layer, before and after", anchor=False, help="Layers has every task.")
        show_drawn("before-after", run.id, kept("before-after", run, mean_curves, options))
    with shown_errors():
        st.header("Broken by the merge, and fixed by the repair", anchor=False)
        show_explorer(run, "wall", urlencode({"as": "groups", "repair": calibrated(name)}))
    with shown_errors(), st.container(horizontal=True):
        _show_downloads(run, name)
        st.page_link(path_of("samples"), label="Samples", icon=":material/scatter_plot:")
        st.page_link(path_of("export"), label="Export", icon=":material/description:")
    with shown_errors():
        judged = verdict(run, name)
        steps, sentences = steps_of(run, judged)
        for sentence in (*sentences, *selection_sentences(run, name)):
            st.markdown(f"- {with_command(run, sentence, judged.command)}")
        # This page has buttons for repairs and a link to reports already.
        show_step_buttons(
            run, [label for label in steps if label not in ("Repair", "Write a report")], judged.command
        )
        drawer = st.expander("All numbers", key="all-numbers", on_change="rerun")
        with drawer:
            for sheet in calibration_sheets(run, name) if drawer.open else ():
                show_sheet(sheet)
    with shown_errors():
        solved = run.calibration(name)
        show_data(solved, f"{run.id}-calibration-{name}", key="calibration-log", label="Solved modules")
    for notice in run.manifest.calibrations[name].notices:
        caption(f"{notice[:1].upper()}{notice[1:]}", 90)


def _show_before_and_after(run: DriftRun, judged: Verdict) -> None:
    means, kind = judged.means, judged.measure.kind
    gap = next(
        (gap for gap in judged.gaps if (gap.variant, gap.against) == (judged.after, judged.merged)), None
    )
    if gap is not None:
        before, after = (written(means[model].value, kind) for model in (judged.merged, judged.after))
        head = f"{judged.measure.title.capitalize()} {before.removesuffix('%').rstrip()} → {after}"
        st.header(plain(head), anchor=False)
        models = [model for model in ("base", judged.merged, judged.after, "expert") if model in means]
        levels = ", ".join(f"{title(model)} {estimate(means[model], kind)}" for model in models)
        change = change_in_words(judged.measure, means[judged.merged].value, gap.change)
        sentence = f"{change}; {levels}. {counted(len(judged.tasks), 'task')}, n = {gap.change.n}."
        st.markdown(unbroken(plain(sentence)))
    # The chart below shows the drift.
    show_sheet(task_sheet(run, judged), {"relative drift"})


def _show_setting_sweeps(run: DriftRun, *, blocked: bool) -> None:
    show_bad_end(watch(run.path, "sweep"))
    without = "Run a sweep to see how each setting affects accuracy."
    show_chart("sweeps", run, selection().options(variants=None), without)
    swept = listed(calibration.methods()[DEFAULT_METHOD].swept)
    if st.button(f"Sweep {swept}", icon=":material/grid_on:", key="sweep", disabled=blocked):
        with shown_errors():
            begin(sweep_request(run))


def _show_method_comparison(run: DriftRun, *, blocked: bool) -> None:
    """Compare calibrations, gain against cost, and offer those of other methods."""
    without = "Compare at least two repairs to see this chart."
    show_chart("arena", run, ChartOptions(dark=is_dark()), without)
    if len(run.manifest.calibrations) > 1:
        with shown_errors():
            # With the column of cosines, the table would be wider than a window.
            show_sheet(arena_sheet(run), {"cosine"})
    with shown_errors(), st.container(horizontal=True, vertical_alignment="bottom"):
        calibrators = calibration.methods()
        chosen = st.multiselect(
            "Repairs to compare",
            [*calibrators],
            default=[name for name, method in calibrators.items() if method.effort < _PATIENCE],
            format_func=lambda name: calibrators[name].title,
            key="arena-methods",
            width=760,
            help="Each with its published settings; those that are left out at first take minutes and more.",
        )
        if st.button("Compare repairs", icon=":material/swords:", key="arena", disabled=blocked):
            begin(methods_request(run, chosen))


def _show_downloads(run: DriftRun, name: str) -> None:
    places = {"download": calibration_weights(name), "description": f"{calibration_folder(name)}/README.md"}
    for icon, place in places.items():
        file = run.path / place
        if not is_file_inside(file):
            continue
        label = "Model card"
        if icon == "download":
            label = f"Calibrated checkpoint ({size(file.stat().st_size)})"
            if file.stat().st_size > _MAX_BYTES:
                st.caption(f"{label}: {plain(place)}")
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
