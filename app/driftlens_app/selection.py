"""What the reader chose in the sidebar: a run and the part of it to look at. All of it stands in the URL."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from driftlens.errors import DataError
from driftlens.records.listing import RunSummary
from driftlens.records.run import DriftRun
from driftlens_app.jobs.watching import is_at_work
from driftlens_app.runs import folder_of, listed_runs, opened, run_ids
from driftlens_app.settings import Settings
from driftlens_app.show import is_dark
from driftlens_reports.charts.chart import ChartOptions

RUN, TASK, VARIANTS, LAYER, MEASURE = "run", "task", "variants", "layer", "measure"
"""Keys of the widgets, which are the names in the URL."""

FINAL = "final"
_MEASURES = ("L2", "relative")
_CHOSEN, _IN_URL = "_selection", "_run_in_url"


@dataclass(frozen=True)
class Selection:
    """What the reader chose: without a task all, without variants all but the base; drift in which measure."""

    run: DriftRun
    task: str | None
    variants: tuple[str, ...]
    layer: int | str
    relative: bool

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks to show: the chosen one, or all."""
        return self.run.tasks if self.task is None else (self.task,)

    def options(self, **others: Any) -> ChartOptions:
        """Options for a chart: the selection and the theme, with `others` over them."""
        chosen = ChartOptions(
            tasks=None if self.task is None else (self.task,),
            variants=self.variants or None,
            layer=self.layer,
            relative=self.relative,
            dark=is_dark(),
        )
        return dataclasses.replace(chosen, **others)


def selection() -> Selection:
    """What the reader chose; the shell has drawn the sidebar before the page runs."""
    chosen: Selection = st.session_state[_CHOSEN]
    return chosen


def choose_run(settings: Settings) -> DriftRun | None:
    """The run that is chosen in the sidebar, or None when there is none to choose; refuses a URL that names no run."""
    ids = run_ids(settings)
    if not ids:
        return None
    # Streamlit's own binding leaves a default out of the URL, and the newest run is another one tomorrow.
    asked = st.query_params.get(RUN)
    if asked is not None and asked != st.session_state.get(_IN_URL):
        st.session_state[RUN] = asked if asked in ids else None
    elif st.session_state.get(RUN, "") not in ids:
        asked = st.session_state.get(RUN)
        st.session_state[RUN] = ids[0] if asked is None else None
    chosen: str | None = st.sidebar.selectbox("Run", ids, key=RUN, help="By id, newest first.")
    if chosen is None:
        broken = ", ".join(run.path.name for run in _unreadable(settings))
        reason = f" {broken} can't be read; the page Runs says why." if broken else ""
        raise DataError(f"the run {asked!r} is not here", hint=f"Choose one in the sidebar.{reason}")
    st.session_state[_IN_URL] = st.query_params[RUN] = chosen
    return opened(folder_of(settings, chosen))


def require_no_unreadable(settings: Settings) -> None:
    """Refuse to call a folder empty whose runs can't be read; names the first one, and why."""
    for run in _unreadable(settings):
        raise DataError(
            f"there is no run to look at: {run.path.name} can't be read: {run.problem}", hint=run.hint
        )


def _unreadable(settings: Settings) -> list[RunSummary]:
    """Runs that can't be read, but for those that are just being made."""
    return [run for run in listed_runs(settings) if run.problem and not is_at_work(run.path)]


def choose_view(run: DriftRun) -> Selection:
    """Draw the sidebar's choices within a run; `selection` returns the result."""
    layers = [entry.index for entry in run.manifest.layers]
    about = "The run lists no layers yet."
    if layers:
        about = f"1 is the stem, {layers[-1]} the head, which is also called final."
    one = functools.partial(st.selectbox, bind="query-params")
    with st.sidebar:
        task = one("Task", run.tasks, index=None, placeholder="All tasks", key=TASK)
        variants = st.multiselect(
            "Variants", run.variants, placeholder="All but the base", key=VARIANTS, bind="query-params"
        )
        layer = one("Layer", [FINAL, *map(str, layers)], key=LAYER, help=about)
        measure = st.radio(
            "Drift",
            _MEASURES,
            horizontal=True,
            key=MEASURE,
            bind="query-params",
            help="L2: in the features' own unit. Relative: against the norm of the expert's features.",
        )
    index = layer if layer == FINAL else int(layer)
    chosen = Selection(run, task, tuple(variants), index, measure == _MEASURES[1])
    st.session_state[_CHOSEN] = chosen
    return chosen


def show_link() -> None:
    """The address of what is shown, to copy."""
    drawer = st.expander("Link to this view", key="link", on_change="rerun")
    if drawer.open:
        place = (st.context.url or "").partition("?")[0]
        asked = urlencode(st.query_params.to_dict())
        drawer.code(f"{place}?{asked}" if asked else place, language=None, wrap_lines=True)
