"""The user's selection: a run in the sidebar, and task, variants, layer and measure on the page; all are in the URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from driftlens.results.listing import RunSummary
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError
from driftlens_app.processes import has_live_job
from driftlens_app.run_cache import list_runs, open_cached_run, readable_runs
from driftlens_app.settings import Settings
from driftlens_app.show import is_dark, page_path
from driftlens_reports.charts.chart import ChartOptions

RUN, TASK, VARIANTS, LAYER, MEASURE = "run", "task", "variants", "layer", "measure"
"""Keys of the widgets, also the names in the URL."""

FINAL = "final"
_MEASURES = ("relative", "L2")
# Relative is the default: units of features differ between the last block and the head.
# More points per chart would need WebGL, which takes browsers long to initialize.
_MAX_POINTS = 4000
_CHOSEN, _IN_URL, _KEPT = "_selection", "_run_in_url", "_view_in_url"


@dataclass(frozen=True)
class Selection:
    """The selected run, task, variants, layer and drift measure. No task is all; no variants are all but the base.

    Attributes:
        name: the run's name in the sidebar and in URLs, that of its folder.
    """

    run: DriftRun
    name: str
    task: str | None
    variants: tuple[str, ...]
    layer: int | str
    relative: bool

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks to show: the selected one, or all."""
        return self.run.tasks if self.task is None else (self.task,)

    def options(self, **others: Any) -> ChartOptions:
        """Return chart options for the selection and the theme; `others` override them."""
        chosen = ChartOptions(
            tasks=None if self.task is None else (self.task,),
            variants=self.variants or None,
            layer=self.layer,
            relative=self.relative,
            dark=is_dark(),
            max_points=_MAX_POINTS,
        )
        return dataclasses.replace(chosen, **others)


def current_selection(*controls: str, with_base: bool = False) -> Selection:
    """Return the current selection; show the named controls."""
    if controls:
        _show_controls(controls, "All" if with_base else "All but the base")
    chosen: Selection = st.session_state[_CHOSEN]
    return chosen


def open_page(view: str, *, query: Mapping[str, str] | None = None, **others: str) -> NoReturn:
    """Open a page with the current selection, updated by `others`: `open_page("layers", task="cars")`.

    This is one step in the browser's history.
    """
    for name, chosen in others.items():
        _stored_selection()[name] = [chosen]
    st.switch_page(page_path(view), query_params=query)


def select_run(settings: Settings) -> DriftRun | None:
    """Return the run selected in the sidebar, None without runs; raise DataError for an unknown run in the URL."""
    runs = readable_runs(settings)
    if not runs:
        return None
    # Streamlit's own binding leaves defaults out of the URL, but the newest run changes with time.
    from_page = _stored_selection().pop(RUN, [None])
    requested = st.query_params.get(RUN, from_page[0])
    if requested not in runs:
        # Links written by earlier versions have the id.
        requested = next((name for name, run in runs.items() if run.id == requested), requested)
    shown = st.session_state.get(_IN_URL)
    if requested not in (None, shown):
        st.session_state[RUN] = st.session_state[_IN_URL] = requested
    # A removed run is reported below instead of silently showing another one.
    elif st.session_state.get(RUN) not in runs:
        st.session_state[RUN] = st.session_state.get(RUN) or shown or next(iter(runs))
    if st.session_state[RUN] not in runs:
        st.session_state[_IN_URL], st.session_state[RUN] = st.session_state[RUN], None
    # Assigning the value makes Streamlit send the label again, which may have changed.
    st.session_state[RUN] = st.session_state[RUN]
    chosen: str | None = st.sidebar.selectbox("Run", [*runs], key=RUN, help="Newest first.")
    if chosen is None:
        broken = ", ".join(run.path.name for run in _unreadable_runs(settings))
        reason = f" Unreadable: {broken}; see the page Runs." if broken else ""
        missing = st.session_state[_IN_URL]
        raise DataError(f"the run {missing!r} is not here", hint=f"Choose one in the sidebar.{reason}")
    st.session_state[_IN_URL] = chosen
    return open_cached_run(runs[chosen].path)


def require_readable_runs(settings: Settings) -> None:
    """Raise DataError with the reason if the folder has runs that can't be read."""
    for run in _unreadable_runs(settings):
        raise DataError(f"no readable run: {run.path.name} can't be read: {run.problem}", hint=run.hint)


def _unreadable_runs(settings: Settings) -> list[RunSummary]:
    """Return the runs that can't be read, except those that a live job is writing."""
    # Copies have another state: their files can be read.
    unread = [run for run in list_runs(settings) if run.state == RunSummary(run.path).state]
    return [run for run in unread if not has_live_job(run.path)]


def restore_selection(run: DriftRun) -> None:
    """Restore the selection of task, variants and layer from the URL, or from the previous page."""
    layers = [FINAL, *(str(entry.index) for entry in run.manifest.layers)]
    offered = {TASK: run.tasks, VARIANTS: run.variants, LAYER: layers, MEASURE: _MEASURES}
    selected = {name: _selected_values(name, values) for name, values in offered.items()}
    # Set at once and without defaults, since every change of the URL adds an entry to the browser's history.
    shown = {name: chosen for name, chosen in selected.items() if _is_shown_in_url(name, chosen)}
    for name in {*offered} - {*shown}:
        st.query_params.pop(name, None)
    st.query_params.update({RUN: st.session_state[RUN], **shown})
    layer = next(iter(selected[LAYER]), FINAL)
    st.session_state[_CHOSEN] = Selection(
        run,
        st.session_state[RUN],
        next(iter(selected[TASK]), None),
        tuple(selected[VARIANTS]),
        layer if layer == FINAL else int(layer),
        selected[MEASURE] != [_MEASURES[1]],
    )


def _stored_selection() -> dict[str, list[str]]:
    """Return the selection stored in the session, for pages whose URL lacks it."""
    kept: dict[str, list[str]] = st.session_state.setdefault(_KEPT, {})
    return kept


def select_value(name: str, chosen: Any) -> None:
    """Set one selected value by name and update the URL."""
    # Runs as a callback before the script, which may be interrupted when the user leaves the page.
    _stored_selection()[name] = listed = [chosen] if isinstance(chosen, str) else [*(chosen or ())]
    if _is_shown_in_url(name, listed):
        st.query_params[name] = listed
    else:
        st.query_params.pop(name, None)


def _is_shown_in_url(name: str, chosen: list[str]) -> bool:
    return bool(chosen) and (name, chosen) not in ((LAYER, [FINAL]), (MEASURE, [_MEASURES[0]]))


def _selected_values(name: str, options: Sequence[str]) -> list[str]:
    """Return the selected values of a control, even on pages that do not show it."""
    # Streamlit forgets widgets that a page leaves out, and clears the URL when the page changes.
    kept, values = _stored_selection(), st.query_params.get_all(name)
    # After a step in the browser's history the URL is complete, so a missing name means the default.
    if not values and not getattr(get_script_run_ctx(), "is_history_navigation", False):
        values = kept.get(name, [])
    chosen = [value for value in values if value in options]
    kept[name] = chosen
    return chosen


def _show_controls(names: Sequence[str], everything: str) -> None:
    """Show the selection controls in a row; `everything` labels an empty choice of variants."""
    chosen = current_selection()
    run = chosen.run
    layers = {FINAL: FINAL} | {str(layer.index): run.layer_name(layer.index) for layer in run.manifest.layers}
    now = {TASK: chosen.task, VARIANTS: [*chosen.variants], LAYER: str(chosen.layer)}
    now[MEASURE] = _MEASURES[not chosen.relative]
    draw: dict[str, Callable[..., Any]] = {
        TASK: partial(st.selectbox, "Task", run.tasks, placeholder="All tasks", width=200),
        VARIANTS: partial(st.multiselect, "Variants", run.variants, placeholder=everything, width=360),
        LAYER: partial(st.selectbox, "Layer", [*layers], format_func=layers.__getitem__, width=220),
        MEASURE: partial(
            st.radio,
            "Drift",
            _MEASURES,
            horizontal=True,
            help="L2: absolute. Relative: divided by the norm of the expert's features.",
        ),
    }
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for name in names:
            st.session_state[name] = now[name]
            draw[name](key=name, on_change=lambda name=name: select_value(name, st.session_state[name]))
