"""Theory: bounds, growth factors, exact splits and alignment, which only the theory of drift needs."""

from __future__ import annotations

import streamlit as st

from driftlens.base.variants import part_of, title
from driftlens.runs.run import DriftRun
from driftlens_app.live import offer_attribution, show_additions
from driftlens_app.pages import Page
from driftlens_app.selection import LAYER, TASK, VARIANTS, selection
from driftlens_app.show import caption, open_part, show_part
from driftlens_reports.charts.chart import SECTIONS, parts_of

PAGE = Page(
    "Theory",
    icon=":material/functions:",
    order=70,
    says="Bounds, growth factors and alignment: what theory predicts, held against what was measured.",
)


def show() -> None:
    """Draw the page."""
    part = open_part([*parts_of("theory")], key="theory")
    is_gain = part in (SECTIONS["features"].part, SECTIONS["gains"].part)
    chosen = selection(TASK, VARIANTS, *((LAYER,) if is_gain else ()))
    if not show_additions(chosen.run) and part == SECTIONS["splits"].part:
        offer_attribution(chosen.run)
    baseline = _baseline(chosen.run) if is_gain and chosen.run.variants else "merged"
    show_part("theory", part, chosen.run, chosen.options(baseline=baseline, controls=True))


def _baseline(run: DriftRun) -> str:
    """The variant that gains are counted from."""
    known = sorted(run.variants, key=lambda variant: (variant != "merged", part_of(variant) != "baseline"))
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
        caption(f"The run has no other baseline; gains are counted from {title(baseline)}.")
    return baseline


if __name__ == "__main__":
    show()
