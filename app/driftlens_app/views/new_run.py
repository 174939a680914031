"""New run: choose a spec and, if wanted, other merges of its experts, see what a preflight finds, start, watch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import PurePosixPath

import streamlit as st

from driftlens.records.layout import SPEC
from driftlens_app.calibration import Method, fields, methods
from driftlens_app.jobs import start
from driftlens_app.jobs.command_line import ask
from driftlens_app.jobs.requests import (
    Merges,
    analyze_request,
    compare_request,
    comparisons,
    merged_by,
    own_specs,
    spec_file,
    spec_files,
)
from driftlens_app.live import await_run, show_new_runs
from driftlens_app.outlook import show_findings
from driftlens_app.pages import Page
from driftlens_app.settings import Settings
from driftlens_app.show import is_dark, note, plain, show_drawn, show_sheet, shown_errors
from driftlens_reports.merges import draw_merges, merges_sheet, read_merges

PAGE = Page(
    "New run",
    icon=":material/add_circle:",
    order=15,
    is_listed=False,
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
    specs = [*spec_files(settings.root), *own_specs(settings.root)]
    if not specs:
        note(
            f"There is no spec in {plain(settings.root)}. `driftlens init --out run.yaml` writes a commented one."
        )
        return
    spec = st.selectbox(
        "Spec", specs, key="spec", help="YAML files in this folder and one level below, then those of runs."
    )
    if settings.read_only:
        note("This dashboard is read-only: it starts no jobs.", "lock")
    with shown_errors():
        _form(settings, spec, _chosen())
    with shown_errors():
        _comparisons(settings)


def _chosen() -> dict[str, Method]:
    """The merge methods that were chosen in place of the spec's, by name."""
    drawer = st.expander("New merge", icon=":material/merge:", key="new-merge", on_change="rerun")
    if not drawer.open:
        return {}
    with drawer:
        known = methods("merge_methods")
        names = st.multiselect(
            "Merge the experts by",
            [*known],
            format_func=lambda name: known[name].title,
            placeholder="what the spec says",
            key="merges",
            help="One is analyzed in place of the spec's merge; several are ranked without labels.",
        )
    return {name: known[name] for name in names}


def _form(settings: Settings, spec: str, chosen: Mapping[str, Method]) -> None:
    is_comparison, merges = len(chosen) > 1, {}
    with st.form("new-run", border=False):
        for method, known in chosen.items():
            with st.container(border=True):
                st.markdown(f"**{plain(known.title)}**")
                st.caption(plain(f"{known.source}. Reads {known.reads}. Empty fields stay as they read."))
                merges[method] = fields([*known.settings.values()], {}, f"merge.{method}")
        name = st.text_input(
            "Name of the folder",
            "-".join([proposed_name(spec), *(["merges"] if is_comparison else chosen)])[:80],
            key="-".join(["name-of", spec, *chosen]),
            help="Letters, digits, -, _ and .; the run, or the comparison, goes into a folder of this name.",
        )
        with st.container(horizontal=True):
            pressed = st.form_submit_button(
                "Compare the merges" if is_comparison else "Start the analysis",
                type="primary",
                icon=":material/play_arrow:",
                disabled=settings.read_only,
                key="start-analysis",
            )
            check = st.form_submit_button(
                "Check the spec", icon=":material/fact_check:", disabled=settings.read_only, key="check-spec"
            )
    _preflight(settings, spec, {} if is_comparison else merges, asked=check)
    if pressed and is_comparison:
        start(compare_request(settings, spec, name.strip(), merges))
        st.rerun()
    if pressed:
        await_run(start(analyze_request(settings, spec, name.strip(), merges)).run)
        st.rerun()


def _preflight(settings: Settings, spec: str, merges: Merges, *, asked: bool) -> None:
    file = spec_file(settings.root, spec)
    if asked:
        with st.spinner("Reading headers, data and class names"):
            found = ask(("validate", str(file), *merged_by(merges), "--json"), settings.root)
        st.session_state[_FOUND] = (spec, file.stat().st_mtime_ns, merges, found)
    known = st.session_state.get(_FOUND)
    if known is not None and known[:3] == (spec, file.stat().st_mtime_ns, merges):
        show_findings(known[3])


def _comparisons(settings: Settings) -> None:
    names = comparisons(settings.root)
    if not names:
        return
    st.subheader("Compared merges", anchor=False)
    name = st.selectbox("Comparison", names, label_visibility="collapsed", key="comparison")
    found = read_merges(settings.root / name)
    show_drawn("merges", name, draw_merges(found, dark=is_dark()))
    show_sheet(merges_sheet(found))


def proposed_name(spec: str) -> str:
    """A name for the run's folder that the form accepts, from the spec's: `mein spec ü.yaml` gives `mein-spec-u`."""
    file = PurePosixPath(spec)
    called = file.parent.name if file.name == SPEC and file.parent.name else file.stem
    plain_letters = unicodedata.normalize("NFKD", called).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain_letters).strip("-.")[:80] or "run"


if __name__ == "__main__":
    show()
