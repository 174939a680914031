"""Alignment: do features, decisions and task vectors move towards the experts together?"""

from __future__ import annotations

import streamlit as st

from driftlens.variants import part_of, title
from driftlens_app.pages import Page
from driftlens_app.selection import selection
from driftlens_app.show import note, plain, show_parts

PAGE = Page(
    "Alignment",
    icon=":material/compare_arrows:",
    order=50,
    section="Analysis",
    says="Whether features, accuracy and parameters come closer to the experts together.",
)


def show() -> None:
    """Draw the page."""
    chosen = selection()
    known = sorted(
        chosen.run.variants, key=lambda variant: (variant != "merged", part_of(variant) != "baseline")
    )
    if not known:
        note("The run has no merged model to look at yet.")
        return
    baseline = st.selectbox(
        "Baseline",
        known,
        format_func=title,
        key="baseline",
        bind="query-params",
        help="Gains are counted from this variant.",
        width=260,
    )
    if not any(part_of(variant) == "baseline" for variant in known):
        st.caption(f"The run has no other baseline; gains are counted from {plain(title(baseline))}.")
    show_parts("alignment", chosen.run, chosen.options(baseline=baseline), key="alignment")


if __name__ == "__main__":
    show()
