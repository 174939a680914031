"""New run: choose a spec in the folder, see what a preflight finds, start the analysis, watch it."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath

import streamlit as st

from driftlens_app.jobs import start
from driftlens_app.jobs.command_line import ask
from driftlens_app.jobs.requests import analyze_request, spec_file, spec_files
from driftlens_app.live import await_run, show_new_runs
from driftlens_app.outlook import show_findings
from driftlens_app.pages import Page
from driftlens_app.settings import Settings
from driftlens_app.show import note, plain, shown_errors

PAGE = Page(
    "New run",
    icon=":material/add_circle:",
    order=20,
    section="Start",
    needs_run=False,
    says="Measure the drift of your own models: a spec says which, and where their data is.",
)

_FOUND = "_preflight"


def show() -> None:
    """Draw the page."""
    settings = Settings.from_environment()
    if settings.is_one_run:
        note(
            "The dashboard was opened on a single run. Open it on a folder to add runs: `driftlens ui FOLDER`."
        )
        return
    show_new_runs(settings)
    specs = spec_files(settings.root)
    if not specs:
        note(
            f"There is no spec in {plain(settings.root)}. `driftlens init --out run.yaml` writes a commented one."
        )
        return
    spec = st.selectbox("Spec", specs, key="spec", help="YAML files in this folder and one level below.")
    if settings.read_only:
        note("This dashboard is read-only: it starts no jobs.", "lock")
    _preflight(settings, spec)
    _start(settings, spec)


def _preflight(settings: Settings, spec: str) -> None:
    pressed = st.button(
        "Check the spec", icon=":material/fact_check:", disabled=settings.read_only, key="check-spec"
    )
    with shown_errors():
        if pressed:
            with st.spinner("Reading headers, data and class names"):
                file = spec_file(settings.root, spec)
                found = ask(("validate", str(file), "--json"), settings.root)
            st.session_state[_FOUND] = (spec, file.stat().st_mtime_ns, found)
        known = st.session_state.get(_FOUND)
        if known is not None and known[:2] == (spec, spec_file(settings.root, spec).stat().st_mtime_ns):
            show_findings(known[2])


def _start(settings: Settings, spec: str) -> None:
    with st.form("new-run", border=False):
        name = st.text_input(
            "Name of the run's folder",
            proposed_name(spec),
            key=f"name-of-{spec}",
            help="Letters, digits, -, _ and .; the run goes into a folder of this name.",
        )
        pressed = st.form_submit_button(
            "Start the analysis",
            type="primary",
            icon=":material/play_arrow:",
            disabled=settings.read_only,
            key="start-analysis",
        )
    if pressed:
        with shown_errors():
            job = start(analyze_request(settings, spec, name.strip()))
            await_run(job.run)
            st.rerun()


def proposed_name(spec: str) -> str:
    """A name for the run's folder that the form accepts, from the spec's: `mein spec ü.yaml` gives `mein-spec-u`."""
    plain_letters = unicodedata.normalize("NFKD", PurePosixPath(spec).stem).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain_letters).strip("-.")[:80] or "run"


if __name__ == "__main__":
    show()
