"""Layer drift: how far each layer's features are from the expert's, and how drift grows from layer to layer."""

from __future__ import annotations

import streamlit as st

from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.show import show_parts

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
    chosen = selection()
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
        log = st.checkbox("Logarithmic axis", key="log", bind="query-params")
    show_parts("layer_drift", chosen.run, chosen.options(band=band, log=log), key="layers")


if __name__ == "__main__":
    show()
