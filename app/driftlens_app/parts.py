"""Tabs of charts: a page in parts, of which only the open one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from driftlens.records.run import DriftRun
from driftlens_app.show import show_chart
from driftlens_reports.charts.chart import ChartOptions


def open_part(names: Sequence[str], *, key: str) -> str:
    """The part of a page that the reader has open; the choice stands in the URL as `key`.

    Charts of the other parts are not drawn, so that a page costs what it shows.
    """
    # A segmented control writes its open part in the accent, too faint on a dark page beside white on that accent.
    return st.radio(
        "Part of the page",
        names,
        horizontal=True,
        key=key,
        bind="query-params",
        label_visibility="collapsed",
    )


def show_parts(parts: Mapping[str, Sequence[str]], run: DriftRun, options: ChartOptions, *, key: str) -> None:
    """Tabs of charts: the names of the charts by the name of their part. Arguments else as for `show_chart`."""
    for name in parts[open_part([*parts], key=key)]:
        show_chart(name, run, options)
