"""Layers: how far each layer's features are from the expert's, where that comes from, and how it grows."""

from __future__ import annotations

import streamlit as st

from driftlens_app.live import offer_attribution, show_additions
from driftlens_app.pages import Page
from driftlens_app.selection import MEASURE, TASK, VARIANTS, selection
from driftlens_app.show import open_part, show_part
from driftlens_reports.charts.chart import SECTIONS, parts_of

PAGE = Page(
    "Layers",
    icon=":material/show_chart:",
    order=30,
    says="How far the features leaving each layer are from the expert's, task by task.",
)

_BANDS = {
    "q10-q90": "10 to 90 % of samples",
    "q25-q75": "25 to 75 % of samples",
    "std": "one standard deviation",
    "none": "none",
}


def show() -> None:
    """Draw the page."""
    part = open_part([*parts_of("layers")], key="layers")
    is_drift = part == SECTIONS["drift"].part
    chosen = selection(TASK, VARIANTS, *((MEASURE,) if is_drift else ()))
    is_traced = part in (SECTIONS["contributions"].part, SECTIONS["loss"].part)
    if not show_additions(chosen.run) and is_traced:
        offer_attribution(chosen.run)
    band, log = _axes() if is_drift else ("q10-q90", False)
    show_part("layers", part, chosen.run, chosen.options(band=band, log=log))


def _axes() -> tuple[str, bool]:
    """How the curves of drift are drawn: with which band, and whether the axis is logarithmic."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        band = st.selectbox(
            "Band",
            [*_BANDS],
            format_func=_BANDS.__getitem__,
            key="band",
            bind="query-params",
            help="What the shaded band shows of the samples behind each mean.",
            width=260,
        )
        return band, st.checkbox("Logarithmic axis", key="log", bind="query-params")


if __name__ == "__main__":
    show()
