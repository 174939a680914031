"""Layers: how far each layer's features are from the expert's, where that comes from, how it grows, and theory."""

from __future__ import annotations

import streamlit as st

from driftlens_app.job_panel import offer_attribution
from driftlens_app.selection import LAYER, MEASURE, TASK, VARIANTS, current_selection
from driftlens_app.show import Page, select_page_part, show_data_expander, show_part_charts
from driftlens_reports.charts.chart import SECTIONS, chart_names_by_heading
from driftlens_reports.charts.picking import select_rows

PAGE = Page(
    "Layers",
    icon=":material/show_chart:",
    order=30,
    says="Distance of each layer's output features from the expert's, by task.",
)

_DRIFT, _SOURCES, _THEORY = (SECTIONS[name].part for name in ("drift", "contributions", "features"))
_CONTROLS = {_DRIFT: (MEASURE,), _THEORY: (LAYER,)}


def show() -> None:
    """Draw the page Layers: charts over layers."""
    part = select_page_part([*chart_names_by_heading("layers")], key="layers")
    view = current_selection(TASK, VARIANTS, *_CONTROLS.get(part, ()))
    run = view.run
    if part not in (_DRIFT, _THEORY):
        offer_attribution(run)
    log = part == _DRIFT and st.checkbox("Logarithmic axis", key="log", bind="query-params")
    options = view.options(log=log)
    show_part_charts("layers", part, run, options)
    # Some diagnostics (CKA, spectral norms) have no chart and are shown in these tables only.
    tables = {"layers": run.layers()}
    if part == _SOURCES:
        tables["adjoint"] = run.adjoint()
    for name, rows in tables.items():
        if len(rows):
            label = f"All numbers of table {name}"
            show_data_expander(select_rows(run, options, rows), f"{run.id}-{name}", key=f"table-{name}", label=label)


if __name__ == "__main__":
    show()
