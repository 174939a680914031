"""Jobs as a visitor meets them: offered, redrawn every second while they run, awaited, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import streamlit as st

from driftlens.results.verdict import Verdict, shareable
from driftlens.runs.run import DriftRun, is_analyzed, is_live
from driftlens.utils.progress import duration
from driftlens.utils.variants import is_explained, title
from driftlens_app.processes import (
    MAKING,
    Job,
    JobRequest,
    View,
    cancel,
    dismiss,
    is_at_work,
    is_finished_since,
    jobs_beside,
    live_job,
    log_text,
    start,
    watch,
)
from driftlens_app.requests import SUITES, demo_request, explain_request, resume_request
from driftlens_app.selection import lead
from driftlens_app.settings import Settings, require_root
from driftlens_app.show import note, page_title, path_of, plain, show_error, shown_errors

# States of jobs that ended without success.
BAD_ENDS = ("failed", "stopped", "cancelled")

STAGES: Mapping[str, str] = {
    "check": "Checking the weights",
    "choose": "Choosing",
    "calibrate": "Solving",
    "analyze": "Measuring drift",
    "evaluate": "Measuring accuracy",
    "explain": "Attributing the drift to layers",
}
"""Labels of phases; other phases are shown by name."""

# Interval at which a live job is redrawn.
SECONDS = 1.0
_LOG_LINES = 40
_WORDS = {
    "starting": "Loading libraries and models",
    "running": "Running",
    "cancelling": "Stopping at the next batch",
}
_HOW_TO = """
Or measure your own models:

1. Write a spec with `driftlens init`; fill in base, experts and data.
2. Check it with `driftlens validate run.yaml`.
3. Start it on the page **New run**, or with `driftlens analyze run.yaml --out runs/mine`.
"""


_STEPS = {
    " --resume": "Resume the analysis",
    " calibrate ": "Repair",
    " sweep ": "Repair",
    " report ": "Write a report",
}
"""Labels of the buttons that replace a command, by a part of the command. Other commands are shown as text."""
# Icon and page of each button; "Resume" starts a job instead.
_STEP_PAGES = {"Repair": ("build", "repair"), "Write a report": ("description", "export")}


def show_live(run: Path, more: Callable[[View], None] | None = None) -> bool:
    """Show the run's live job with a button to cancel it, and `more` below its progress; return True if it is live."""
    if is_live := is_at_work(run):
        _show_live_job(run, more)
    return is_live


def begin(request: JobRequest) -> None:
    """Start a job and rerun the page; show errors here."""
    with shown_errors():
        start(request)
        st.rerun()


def offer_attribution(run: DriftRun) -> None:
    """Offer the attribution of drift to layers, if some variants lack it."""
    rows = run.layers()
    # Without rows, `map` returns no booleans to select by.
    is_traceable = rows["variant"].map(is_explained).astype(bool)
    traced = rows[is_traceable].groupby(["variant", "task"])["jacobian_samples"].count()
    lacking = {variant for variant, _ in traced[traced == 0].index}
    if not lacking or not is_analyzed(run.manifest) or is_live(run.manifest):
        return
    names = "; ".join(title(variant) for variant in run.variants if variant in lacking)
    note(f"Drift not attributed to layers yet: {plain(names)}.")
    request = explain_request(run)
    is_busy = show_live(run.path)
    show_bad_end(watch(run.path, request.kind))
    if is_busy or Settings.from_environment().read_only:
        return
    label = "Attribute the drift to layers"
    if st.button(label, type="primary", icon=":material/play_arrow:", key=request.kind):
        begin(request)


def link_to_repair() -> None:
    """Show a link to the repair form."""
    st.page_link(
        path_of("repair"),
        label="Repair this run",
        icon=":material/tune:",
        query_params={"repair": "Calibrate"},
    )


def show_new_runs(settings: Settings) -> bool:
    """Show the live and failed jobs that make runs; return True if one is live."""
    runs = list(dict.fromkeys(job.run for job in jobs_beside(settings.root)))
    live = [run for run in runs if show_live(run)]
    for view in map(watch, runs):
        # Other jobs, such as calibrations, are shown on their own page.
        if view is None or view.job.kind not in MAKING or view.state not in BAD_ENDS:
            continue
        if view.job.dismissed or is_finished_since(view.job):
            continue
        with st.container(border=True):
            st.markdown(f"**{_job_title(view.job)}**")
            show_bad_end(view)
            with shown_errors():
                if not settings.read_only and st.button(
                    "Dismiss", key=f"dismiss-{_job_widget_key(view.job)}", icon=":material/close:"
                ):
                    dismiss(view.job)
                    st.rerun()
    return bool(live)


def state_of(run: Path) -> str:
    """Describe the run's live job in a few words; empty if none is live."""
    view = live_job(run)
    event = view.progress if view is not None and view.state == "running" else None
    if view is None or event is None:
        return "" if view is None else view.state
    doing = STAGES.get(event.phase, event.phase).lower()
    return f"{doing} {f'{100 * event.done / event.total:.0f} %' if event.total else event.done}"


def show_bad_end(view: View | None) -> bool:
    """Show cause, hint and log of a job that failed; return True if it did."""
    if view is None or view.state not in BAD_ENDS:
        return False
    if view.state == "cancelled":
        again = " To resume, start it again under the same name." if view.job.kind == "analyze" else ""
        note(f"{_job_title(view.job)} was cancelled. The run is unchanged.{again}", "cancel")
    elif view.state == "stopped":
        show_error(
            "Worker stopped",
            f"{view.job.name} stopped unexpectedly (killed or the machine restarted)",
            "Start it again; finished phases are kept. See the log for details.",
        )
    elif view.failure is not None:
        show_error(view.failure.type, view.failure.message, view.failure.hint)
    _show_log(view.job)
    return True


def _show_log(job: Job) -> None:
    drawer = st.expander("Log", key=f"open-log-{_job_widget_key(job)}", on_change="rerun")
    if not drawer.open:
        return
    text = log_text(job.log)
    with drawer:
        if not text:
            st.caption("The log is empty.")
            return
        st.code("\n".join(text.splitlines()[-_LOG_LINES:]), language=None, wrap_lines=True)
        st.download_button(
            "Download log",
            data=text,
            file_name=job.log.name,
            mime="text/plain",
            on_click="ignore",
            icon=":material/download:",
            key=f"log-{_job_widget_key(job)}",
        )


@st.fragment(run_every=SECONDS)
def _show_live_job(run: Path, more: Callable[[View], None] | None) -> None:
    with shown_errors():
        view = live_job(run)
        if view is None:
            st.rerun()
        with st.container(border=True):
            st.markdown(f"**{_job_title(view.job)}**")
            _show_progress(view)
            if more is not None:
                more(view)
            if not Settings.from_environment().read_only:
                is_pressed = st.button(
                    "Cancel",
                    key=f"cancel-{_job_widget_key(view.job)}",
                    icon=":material/stop_circle:",
                    disabled=view.state == "cancelling",
                )
                if is_pressed:
                    cancel(view.job)
                    st.rerun(scope="fragment")
            _show_log(view.job)


def _show_progress(view: View) -> None:
    event = view.progress
    share = event.done / event.total if event is not None and event.total else 0.0
    if event is None or view.state != "running":
        st.progress(min(1.0, max(0.0, share)), text=_WORDS[view.state])
        return
    count = str(event.done) if event.total is None else f"{event.done} of {event.total}"
    head = f"{plain(STAGES.get(event.phase, event.phase.capitalize()))}: {count}"
    st.progress(min(1.0, max(0.0, share)), text=head)
    left = "" if event.remaining is None else f", about {duration(event.remaining)} left"
    label = f"{plain(event.label)} · " if event.label else ""
    st.caption(f"{label}{duration(event.seconds)} so far{left}")


def _job_widget_key(job: Job) -> str:
    return f"{job.run.name}-{job.log.name}"


def _job_title(job: Job) -> str:
    words = {
        "analyze": "Analysis",
        "calibrate": "Calibration",
        "sweep": "Sweep of",
        "explain": "Attribution of",
    }
    return "Demo run" if job.kind == "demo" else plain(f"{words[job.kind]} {job.name}")


def welcome() -> None:
    """Show the page of a folder without runs."""
    settings = Settings.from_environment()
    require_root(settings.root)
    page_title(
        "Welcome to DriftLens",
        "This folder has no runs. The demo creates one, without network.",
    )
    is_live = show_new_runs(settings)
    if settings.read_only:
        note("This dashboard is read-only. Run `driftlens demo` in a terminal.", "lock")
    else:
        st.markdown("Merge, analyze and repair small models that come with DriftLens (about a minute).")
        suite = st.radio(
            "Models of", [*SUITES], format_func=SUITES.__getitem__, key="suite", disabled=is_live
        )
        if st.button(
            "Run the demo", type="primary", icon=":material/play_arrow:", disabled=is_live, key="demo"
        ):
            with shown_errors():
                start(demo_request(settings, suite))
                st.rerun()
    st.markdown(_HOW_TO)


def steps_of(run: DriftRun, found: Verdict) -> tuple[list[str], list[str]]:
    """Return buttons for the verdict's command, and the sentences of the verdict to show next to them."""
    # A button or a running job replaces the sentence with its command.
    command = found.command.replace("'", "")
    steps = [] if is_at_work(run.path) else [label for part, label in _STEPS.items() if part in command][:1]
    is_answered = steps or is_at_work(run.path)
    return steps, [text for text in found.sentences if not (is_answered and f"`{found.command}`" in text)]


def show_step_buttons(run: DriftRun, steps: Sequence[str], command: str, *others: str) -> None:
    """Show buttons for the next steps.

    Args:
        run: the run.
        steps: labels of the buttons for `command`.
        command: the recommended command, shown on hover.
        others: labels of further buttons.
    """
    for label in dict.fromkeys([*steps, *others]):
        icon, page = _STEP_PAGES.get(label, ("play_arrow", ""))
        kind: Literal["primary", "secondary"] = "primary" if label in steps else "secondary"
        about = shareable(run, command) if label in steps else None
        if st.button(label, type=kind, icon=f":material/{icon}:", key=f"to-{page or 'resume'}", help=about):
            if page:
                lead(page, run=run.id)
            begin(resume_request(run))
