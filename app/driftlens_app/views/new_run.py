"""New run: choose or paste a spec, and other merges of its experts, see what the check finds, start, watch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import streamlit as st

from driftlens.base.errors import SpecError
from driftlens.findings.reading import printable, size
from driftlens.runs.layout import SPEC
from driftlens_app.calibration import Method, fields, methods
from driftlens_app.drafts import GIVEN, PASTED, PASTED_AS, checked, draft, keep, kept_as
from driftlens_app.jobs import requests, start
from driftlens_app.live import await_run, show_new_runs
from driftlens_app.pages import Page
from driftlens_app.settings import Settings
from driftlens_app.show import caption, note, plain, shown_errors
from driftlens_app.views.compare import show_merges

PAGE = Page(
    "New run",
    icon=":material/add_circle:",
    order=15,
    is_listed=False,
    needs_run=False,
    says="Measure the drift of your own models: a spec says which, and where their data is.",
)

_FOUND = "_preflight"
_LEVELS = ("problem", "notice", "ok")
_SPEC, _MERGES, _DRAWER = "spec", "merges", "new-merge"
"""Keys that `drafts.begin_merge` fills, too."""


def show() -> None:
    """Draw the page."""
    settings = Settings.from_environment()
    if settings.is_one_run:
        note(
            "The dashboard was opened on a single run. Open it on a folder to add runs: `driftlens ui FOLDER`."
        )
        return
    show_new_runs(settings)
    files = requests.spec_files(settings.root)
    specs = [*files, *requests.own_specs(settings.root)]
    if settings.read_only:
        note("This dashboard is read-only: it starts no jobs.", "lock")
    else:
        specs.append(PASTED)
    if not specs:
        note(
            f"There is no spec in {plain(settings.root)}. `driftlens init` writes one of models, or a commented one."
        )
        return
    if st.session_state.get(_SPEC) not in specs:  # who comes without a spec of their own has models
        st.session_state[_SPEC] = PASTED if not files and PASTED in specs else specs[0]
    spec = st.selectbox(
        "Spec from",
        specs,
        key=_SPEC,
        help="YAML files in this folder and one level below, those of runs, or a text of your own.",
    )
    with shown_errors():
        text = draft(settings.root) if spec == PASTED else None
        _form(settings, spec, text, _chosen())
    with shown_errors():
        show_merges(settings)


def _chosen() -> dict[str, Method]:
    """The merge methods that were chosen in place of the spec's, by name."""
    drawer = st.expander("New merge", icon=":material/merge:", key=_DRAWER, on_change="rerun")
    if not drawer.open:
        return {}
    with drawer:
        mergers = methods("merge_methods")
        names = st.multiselect(
            "Merge the experts by",
            [*mergers],
            format_func=lambda name: mergers[name].title,
            placeholder="what the spec says",
            key=_MERGES,
            help="One is analyzed in place of the spec's merge; several are ranked without labels.",
        )
    return {name: mergers[name] for name in names}


def _form(settings: Settings, spec: str, text: str | None, chosen: Mapping[str, Method]) -> None:
    is_comparison, merges = len(chosen) > 1, _settings_of(chosen)
    instead = {} if is_comparison else merges  # of the spec's own
    file = spec if text is None else kept_as(text)
    name = st.text_input(
        "Name of the folder",
        "-".join([proposed_name(file or PASTED_AS), *(["merges"] if is_comparison else chosen)])[:80],
        key="-".join(["name-of", file, *chosen]),
        help="Letters, digits, -, _ and .; the run, or the comparison, goes into a folder of this name.",
    )
    buttons = st.container(horizontal=True)
    if buttons.button(
        "Check the spec",
        icon=":material/fact_check:",
        disabled=settings.read_only or text == "",
        key="check-spec",
    ):
        file = file if text is None else keep(settings.root, text)
        _check(settings, file, instead)
        st.rerun()  # the button to start stands before what was found
    document = _findings(settings, file, instead)
    is_ready = bool(document) and document["ready"] and not settings.read_only
    pressed = buttons.button(
        "Compare the merges" if is_comparison else "Start the analysis",
        type="primary",
        icon=":material/play_arrow:",
        disabled=not is_ready,
        key="start-analysis",
        help=None if is_ready else "Once the spec is checked and no problem is left.",
    )
    if document:
        _show_findings(document)
    if not is_ready:
        return
    asked = requests.compare_request if is_comparison else requests.analyze_request
    try:
        request = asked(settings, file, name.strip(), merges)
    except SpecError as error:
        if pressed:
            raise
        caption(f"{error.message}. {error.hint}")
        return
    st.caption("The same in a terminal, in this folder:")
    st.code(requests.in_terminal(request, settings.root), language="bash", wrap_lines=True)
    if pressed:
        job = start(request)
        if not is_comparison:
            await_run(job.run)
        st.rerun()


def _show_findings(document: Mapping[str, Any]) -> None:
    """Draw what `driftlens validate` finds: problems first, each with its line of the spec."""
    by_level = {
        level: [finding for finding in document["findings"] if finding["level"] == level] for level in _LEVELS
    }
    count, well = len(by_level["problem"]), len(by_level["ok"])
    needs = document["needs"].get("analyze")
    with st.container(border=True):
        if not document["ready"]:
            # One problem may have stopped the check before others.
            many = f"{count} problems to solve first."
            st.markdown(f"**{many if count > 1 else 'First problem to solve; more may follow.'}**")
        elif needs is None:
            st.success("Ready.", icon=":material/check:")
        else:
            memory, disk = size(needs["memory_bytes"]), size(needs["disk_bytes"])
            st.success(f"Ready: about {memory} of memory, {disk} on disk.", icon=":material/check:")
        for finding in by_level["problem"]:
            line = finding.get("line")
            st.error(f"{f'Line {line}: ' if line else ''}{_told(finding)}", icon=":material/error:")
            if line:
                st.code(f"{line}  {printable(finding['code'])}", language="yaml")
        for finding in by_level["notice"]:
            st.markdown(f":material/info: {_told(finding)}")
        if well:
            with st.expander(f"{well} check{'s' if well > 1 else ''} passed", icon=":material/check:"):
                st.markdown("\n".join(f"- {_told(finding)}" for finding in by_level["ok"]))


def _told(finding: Mapping[str, Any]) -> str:
    text, hint = finding["text"], finding["hint"]
    stop = "." if hint and not text.endswith((".", "?", "!", ":")) else ""
    return f"**{plain(finding['subject'])}**: {plain(text + stop)} {plain(hint)}".rstrip()


def _settings_of(chosen: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    merges = {}
    for method, merger in chosen.items():
        with st.container(border=True):
            st.markdown(f"**{plain(merger.title)}**")
            caption(f"{merger.source}. Reads {merger.reads}. Empty fields stay as they read.")
            given = st.session_state.get(GIVEN, {}).get(method, {})
            merges[method] = fields(merger.settings, given, f"merge.{method}")
    return merges


def _check(settings: Settings, spec: str, merges: requests.Merges) -> None:
    file = requests.spec_file(settings.root, spec)
    with st.spinner("Reading headers, data and class names"):
        document = checked(file, spec, requests.merged_by(merges), settings.root)
    st.session_state[_FOUND] = (spec, file.stat().st_mtime_ns, merges, document)


def _findings(settings: Settings, spec: str, merges: requests.Merges) -> dict[str, Any]:
    """What the last check found, if it was of this spec as it is now with these merges; else nothing."""
    stored = st.session_state.get(_FOUND)
    if not spec or stored is None or stored[0] != spec:
        return {}
    stamp = requests.spec_file(settings.root, spec).stat().st_mtime_ns
    return dict(stored[3]) if stored[1:3] == (stamp, merges) else {}


def proposed_name(spec: str) -> str:
    """A name for the run's folder that the form accepts, from the spec's: `mein spec ü.yaml` gives `mein-spec-u`."""
    file = PurePosixPath(spec)
    called = file.parent.name if file.name == SPEC and file.parent.name else file.stem
    plain_letters = unicodedata.normalize("NFKD", called).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain_letters).strip("-.")[:80] or "run"


if __name__ == "__main__":
    show()
