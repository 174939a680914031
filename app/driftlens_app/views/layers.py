"""Layers: drift as mismatch plus propagation, its sources, Jacobians, cosines, task vectors and output drift."""

from __future__ import annotations

import zlib

import streamlit as st
from streamlit.column_config import AreaChartColumn, NumberColumn

from driftlens.runs.run import DriftRun
from driftlens.utils.variants import display_name
from driftlens_app.job_panel import offer_attribution
from driftlens_app.selection import LAYER, MEASURE, TASK, VARIANTS, current_selection
from driftlens_app.show import (
    Page,
    select_page_part,
    show_chart,
    show_chart_expanders,
    show_data_expander,
    show_errors_in_place,
    show_part_charts,
    show_table,
)
from driftlens_reports.charts.chart import SECTIONS, ChartOptions, chart_names_by_heading
from driftlens_reports.charts.drift_parts import compared_variants
from driftlens_reports.charts.picking import select_rows

PAGE = Page(
    "Layers",
    icon=":material/show_chart:",
    order=30,
    says="How far each layer's features are from the expert's, and where that comes from: e = m + p.",
)

_DRIFT, _SOURCES, _JACOBIANS, _COSINE = (
    SECTIONS[name].part for name in ("drift", "contributions", "amplification", "features")
)
_CONTROLS = {_DRIFT: (MEASURE,), _COSINE: (LAYER,), SECTIONS["scores"].part: (LAYER,)}
_PICTURE = "drift-parts"


def show() -> None:
    """Draw the page Layers: the picture of e = m + p, and charts over layers."""
    part = select_page_part([*chart_names_by_heading("layers")], key="layers")
    # A container on every part, so that the controls below keep their place when another part is opened.
    with st.container():
        if part == _DRIFT:
            _show_drift_parts()
    view = current_selection(TASK, VARIANTS, *_CONTROLS.get(part, ()))
    run = view.run
    if part in (_SOURCES, _JACOBIANS):
        offer_attribution(run)
    log = part == _DRIFT and st.checkbox("Logarithmic axis", key="log", bind="query-params")
    options = view.options(log=log)
    if part == _DRIFT:
        # A panel for every task would make the page many screens long.
        names = chart_names_by_heading("layers")[part]
        show_chart_expanders([name for name in names if name != _PICTURE], run, options)
    else:
        show_part_charts("layers", part, run, options)
    # Some diagnostics (CKA, spectral norms) have no chart and are shown in these tables only.
    tables = {"layers": run.layers()}
    if part == _SOURCES:
        tables["adjoint"] = run.adjoint()
    for name, rows in tables.items():
        if len(rows):
            label = f"All numbers of table {name}"
            show_data_expander(select_rows(run, options, rows), f"{run.id}-{name}", key=f"table-{name}", label=label)


def _show_drift_parts() -> None:
    """Show the picture of e = m + p, with a row per task below it; ticked rows are the tasks of the picture."""
    view = current_selection()
    run = view.run
    key = f"brushed-{zlib.crc32(repr((run.id, run.tasks)).encode())}"
    ticked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    tasks = tuple(run.tasks[row] for row in ticked) or view.tasks
    options = view.options(tasks=tasks)
    show_chart(_PICTURE, run, options)
    if len(run.tasks) > 1:
        with show_errors_in_place():
            _show_task_rows(run, options, key)


def _show_task_rows(run: DriftRun, options: ChartOptions, key: str) -> None:
    layers = run.layers().sort_values("layer")
    curves = layers.pivot_table(index="task", columns="variant", values="drift_rel", aggfunc=list, sort=False)
    rows, columns = curves.index.to_frame(index=False), {}
    rows, curves = rows.set_index("task").reindex(run.tasks).reset_index(), curves.reindex(run.tasks)
    # One scale, so that curves compare.
    top = float(layers["drift_rel"].max())
    for name in compared_variants(run, options):
        title = display_name(name)
        rows[title] = [100 * values[-1] for values in curves[name]]
        columns[title] = NumberColumn(title, format="%.1f %%", help="Relative drift of the final feature.")
        rows[f"{title} by layer"] = [*curves[name]]
        columns[f"{title} by layer"] = AreaChartColumn(f"{title} by layer", width=110, y_min=0.0, y_max=top)
    alt = "Relative drift of every task, final and by layer"
    show_table(rows, columns, key=key, alt=alt, on_select="rerun", selection_mode="multi-row")
    about = "Relative drift of the final feature, and by layer on one scale."
    st.caption(f"{about} Tick tasks to see their mean above; without a tick it is the mean over all.")


if __name__ == "__main__":
    show()
