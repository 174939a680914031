"""Elements for jobs: buttons that start them, live progress, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import streamlit as st

from driftlens.results.verdict import Verdict, hide_run_path
from driftlens.runs.run import DriftRun, has_live_modules, is_analyzed
from driftlens.utils.progress import format_duration, phase_title
from driftlens.utils.variants import display_name, has_attribution
from driftlens_app.job_requests import (
    SUITES,
    attribution_request,
    compare_merges_request,
    demo_request,
    resume_request,
)
from driftlens_app.processes import (
    MAKING,
    Job,
    JobRequest,
    JobStatus,
    cancel_job,
    dismiss_job,
    has_live_job,
    is_run_finished_since,
    live_job,
    log_tail,
    new_run_jobs,
    poll_job,
    start_job,
)
from driftlens_app.selection import open_page
from driftlens_app.settings import Settings, require_root_exists
from driftlens_app.show import (
    escape_markdown,
    page_path,
    show_error,
    show_errors_in_place,
    show_note,
    show_page_title,
)

# States of jobs that ended without success.
BAD_ENDS = ("failed", "stopped", "cancelled")

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

COMPARE_MERGES = "Compare merges"
_STEPS = {
    " --resume": "Resume the analysis",
    " merge ": COMPARE_MERGES,
    " calibrate ": "Repair",
    " sweep ": "Repair",
    " report ": "Write a report",
}
"""Labels of the buttons that replace a command, by a part of the command. Other commands are shown as text."""
# Icon and page of each button; without a page it starts a job instead.
_STEP_PAGES = {
    "Repair": ("build", "repair"),
    "Write a report": ("description", "export"),
    COMPARE_MERGES: ("leaderboard", ""),
}


def show_live_job(run: Path, more: Callable[[JobStatus], None] | None = None) -> bool:
    """Show the progress of the run's live job with a cancel button; return True if there is one."""
    if is_live := has_live_job(run):
        _live_job_panel(run, more)
    return is_live


def start_and_rerun(request: JobRequest) -> None:
    """Start a job and rerun the page; show errors in place."""
    with show_errors_in_place():
        start_job(request)
        st.rerun()


def offer_attribution(run: DriftRun) -> bool:
    """Show a button that attributes drift to layers, and return True, if some variants have no attribution yet."""
    rows = run.layers()
    # Without rows, `map` returns no booleans to select by.
    is_traceable = rows["variant"].map(has_attribution).astype(bool)
    traced = rows[is_traceable].groupby(["variant", "task"])["jacobian_samples"].count()
    lacking = {variant for variant, _ in traced[traced == 0].index}
    if not lacking or not is_analyzed(run.manifest) or has_live_modules(run.manifest):
        return False
    names = "; ".join(display_name(variant) for variant in run.variants if variant in lacking)
    show_note(f"Drift not attributed to layers yet: {escape_markdown(names)}.")
    request = attribution_request(run)
    is_busy = show_live_job(run.path)
    show_failed_job(poll_job(run.path, request.kind))
    label = "Attribute the drift to layers"
    if not (is_busy or Settings.from_environment().read_only) and st.button(
        label, type="primary", icon=":material/play_arrow:", key=request.kind
    ):
        start_and_rerun(request)
    return True


def show_repair_link() -> None:
    """Show a link to the calibration form."""
    st.page_link(
        page_path("repair"),
        label="Repair this run",
        icon=":material/tune:",
        query_params={"repair": "Calibrate"},
    )


def show_new_run_jobs(settings: Settings) -> bool:
    """Show live and failed jobs that create runs; return True if one is live."""
    runs = list(dict.fromkeys(job.run for job in new_run_jobs(settings.root)))
    live = [run for run in runs if show_live_job(run)]
    for view in map(poll_job, runs):
        # Other jobs, such as calibrations, are shown on their own page.
        if view is None or view.job.kind not in MAKING or view.state not in BAD_ENDS:
            continue
        if view.job.dismissed or is_run_finished_since(view.job):
            continue
        with st.container(border=True):
            st.markdown(f"**{_job_title(view.job)}**")
            show_failed_job(view)
            with show_errors_in_place():
                if not settings.read_only and st.button(
                    "Dismiss", key=f"dismiss-{_job_widget_key(view.job)}", icon=":material/close:"
                ):
                    dismiss_job(view.job)
                    st.rerun()
    return bool(live)


def live_job_text(run: Path) -> str:
    """Describe the progress of the run's live job in a few words; empty if none is live."""
    view = live_job(run)
    event = view.progress if view is not None and view.state == "running" else None
    if view is None or event is None:
        return "" if view is None else view.state
    return f"{phase_title(event.phase)} {f'{100 * event.done / event.total:.0f} %' if event.total else event.done}"


def show_failed_job(view: JobStatus | None) -> bool:
    """Show cause, hint and log of a job that failed, stopped or was cancelled; return True if it did."""
    if view is None or view.state not in BAD_ENDS:
        return False
    if view.state == "cancelled":
        again = " To resume, start it again under the same name." if view.job.kind == "analyze" else ""
        show_note(f"{_job_title(view.job)} was cancelled. The run is unchanged.{again}", "cancel")
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
    text = log_tail(job.log)
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
def _live_job_panel(run: Path, more: Callable[[JobStatus], None] | None) -> None:
    with show_errors_in_place():
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
                    cancel_job(view.job)
                    st.rerun(scope="fragment")
            _show_log(view.job)


def _show_progress(view: JobStatus) -> None:
    event = view.progress
    share = event.done / event.total if event is not None and event.total else 0.0
    if event is None or view.state != "running":
        st.progress(min(1.0, max(0.0, share)), text=_WORDS[view.state])
        return
    count = str(event.done) if event.total is None else f"{event.done} of {event.total}"
    head = f"{escape_markdown(phase_title(event.phase).capitalize())}: {count}"
    st.progress(min(1.0, max(0.0, share)), text=head)
    left = "" if event.remaining is None else f", about {format_duration(event.remaining)} left"
    label = f"{escape_markdown(event.label)} · " if event.label else ""
    st.caption(f"{label}{format_duration(event.seconds)} so far{left}")


def _job_widget_key(job: Job) -> str:
    return f"{job.run.name}-{job.log.name}"


def _job_title(job: Job) -> str:
    words = {
        "analyze": "Analysis",
        "calibrate": "Calibration",
        "sweep": "Sweep of",
        "explain": "Attribution of",
        "merge": "Comparison of merges of",
    }
    return "Demo run" if job.kind == "demo" else escape_markdown(f"{words[job.kind]} {job.name}")


def show_welcome_page() -> None:
    """Show the page for a folder without runs, with a button that runs the demo."""
    settings = Settings.from_environment()
    require_root_exists(settings.root)
    show_page_title(
        "Welcome to DriftLens",
        "This folder has no runs. The demo creates one, without network.",
    )
    is_live = show_new_run_jobs(settings)
    if settings.read_only:
        show_note("This dashboard is read-only. Run `driftlens demo` in a terminal.", "lock")
    else:
        st.markdown("Merge, analyze and repair small models that come with DriftLens (about a minute).")
        suite = st.radio("Models of", [*SUITES], format_func=SUITES.__getitem__, key="suite", disabled=is_live)
        if st.button("Run the demo", type="primary", icon=":material/play_arrow:", disabled=is_live, key="demo"):
            start_and_rerun(demo_request(settings, suite))
    st.markdown(_HOW_TO)


def recommended_steps(run: DriftRun, found: Verdict) -> tuple[list[str], list[str]]:
    """Return button labels for the verdict's command, and the verdict sentences to show next to them.

    Sentences whose numbers the tiles and the table of tasks have are left out.
    """
    # A button or a running job replaces the sentence with its command.
    command = found.command.replace("'", "")
    steps = [] if has_live_job(run.path) else [label for part, label in _STEPS.items() if part in command][:1]
    if steps == [COMPARE_MERGES] and Settings.from_environment().read_only:
        steps = []
    is_answered = steps or has_live_job(run.path)
    told = found.sentences[bool(found.means) :]
    told = [text for text in told if not (found.means and text.startswith("Worst: "))]
    return steps, [text for text in told if not (is_answered and f"`{found.command}`" in text)]


def show_step_buttons(run: DriftRun, steps: Sequence[str], command: str, *others: str) -> None:
    """Show buttons for recommended next steps, such as Repair.

    Args:
        run: the run.
        steps: labels of the buttons for `command`.
        command: the recommended command, shown on hover.
        others: labels of further buttons.
    """
    for label in dict.fromkeys([*steps, *others]):
        icon, page = _STEP_PAGES.get(label, ("play_arrow", ""))
        kind: Literal["primary", "secondary"] = "primary" if label in steps else "secondary"
        about = hide_run_path(run, command) if label in steps else None
        if st.button(label, type=kind, icon=f":material/{icon}:", key=f"to-{page or icon}", help=about):
            if page:
                open_page(page)
            start_and_rerun(compare_merges_request(run) if label == COMPARE_MERGES else resume_request(run))
