"""Layer drift: how far each layer's features are from the expert's, and how drift grows from layer to layer."""

from __future__ import annotations

import streamlit as st

from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.show import show_parts
from driftlens_reports.charts.chart import ChartOptions

PAGE = Page(
    "Layer drift",
    icon=":material/show_chart:",
    order=20,
    section="Analysis",
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
    show_parts("layer_drift", selection().run, _options(), key="layers")


def _options() -> ChartOptions:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        band = st.selectbox(
            "Band",
            [*_BANDS],
            format_func=lambda name: _BANDS[name],
            key="band",
            bind="query-params",
            help="What the shaded band shows of the samples behind each mean.",
            width=260,
        )
        log = st.checkbox("Logarithmic axis", key="log", bind="query-params")
    return selection().options(band=band, log=log)


if __name__ == "__main__":
    show()
