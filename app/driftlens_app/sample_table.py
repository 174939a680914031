"""A table of samples to choose from, with their pictures."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from driftlens.records.run import DriftRun
from driftlens_app.pictures import pictures

MOST_ROWS = 200
"""Rows of the table; what comes after them is in the downloads."""


def choose_sample(
    run: DriftRun, task: str, rows: pd.DataFrame, columns: Mapping[str, Any], *, key: str, alt: str
) -> str | None:
    """Show `rows` of the samples of one task, and return the sample whose row is selected.

    Args:
        run: the run.
        task: the task.
        rows: a row per sample, the most telling first, with the column `sample_id`; the first ones are shown.
        columns: how columns look.
        key: of the table; its rows are added, for Streamlit keeps the number of a selected row when the rows change.
        alt: what the table shows.
    """
    shown = rows.head(MOST_ROWS)
    ids = shown["sample_id"].tolist()
    images = pictures(run, task, ids)
    if any(image is not None for image in images):
        shown = shown.assign(picture=images)[["picture", *shown.columns]]
    chosen = st.dataframe(
        shown,
        hide_index=True,
        column_config={
            "picture": st.column_config.ImageColumn(width="small"),
            "sample_id": st.column_config.TextColumn("sample"),
            **columns,
        },
        on_select="rerun",
        selection_mode="single-row",
        placeholder="–",
        key=f"{key}-{zlib.crc32(repr((run.id, task, ids)).encode())}",
        alt=alt,
    )
    if len(rows) > len(shown):
        st.caption(f"The first {len(shown)} of {len(rows):,} samples.")
    for position in chosen["selection"]["rows"]:
        if position < len(shown):
            return str(shown["sample_id"].iloc[position])
    return None
