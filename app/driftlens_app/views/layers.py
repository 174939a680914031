"""Layers: how far each layer's features are from the expert's, where that comes from, how it grows, and theory."""

from __future__ import annotations

import streamlit as st

from driftlens_app.live import offer_attribution
from driftlens_app.selection import LAYER, MEASURE, TASK, VARIANTS, selection
from driftlens_app.show import Page, open_part, show_data, show_part
from driftlens_reports.charts.chart import SECTIONS, parts_of
from driftlens_reports.charts.picking import chosen

PAGE = Page(
    "Layers",
    icon=":material/show_chart:",
    order=30,
    says="Distance of each layer's output features from the expert's, by task.",
)

_DRIFT, _SOURCES, _THEORY = (SECTIONS[name].part for name in ("drift", "contributions", "features"))
_CONTROLS = {_DRIFT: (MEASURE,), _THEORY: (LAYER,)}


def show() -> None:
    """Draw the page."""
    part = open_part([*parts_of("layers")], key="layers")
    view = selection(TASK, VARIANTS, *_CONTROLS.get(part, ()))
    run = view.run
    if part not in (_DRIFT, _THEORY):
        offer_attribution(run)
    log = part == _DRIFT and st.checkbox("Logarithmic axis", key="log", bind="query-params")
    options = view.options(log=log)
    show_part("layers", part, run, options)
    # Some diagnostics (CKA, spectral norms, module groups) have no chart and are shown in these tables only.
    tables = {"layers": run.layers()}
    if part == _SOURCES:
        tables |= {"group_contributions": run.group_contributions(), "adjoint": run.adjoint()}
    for name, rows in tables.items():
        if len(rows):
            label = f"All numbers of table {name}"
            show_data(chosen(run, options, rows), f"{run.id}-{name}", key=f"table-{name}", label=label)


if __name__ == "__main__":
    show()
