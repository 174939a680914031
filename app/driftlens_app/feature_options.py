"""The controls of the feature scatter."""

from __future__ import annotations

import streamlit as st

from driftlens.projection import METHODS
from driftlens.projection.layouts import FEWEST_POINTS
from driftlens.records.run import DriftRun
from driftlens_app.selection import Selection
from driftlens_reports.charts.chart import ChartOptions

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_COLOURS = {"role": "model", "class": "class", "drift": "drift"}
_POINTS = (250, 500, 1000, 2000)
MOST_FOLLOWED = 20
"""Samples that a click follows; more lines hide one another."""


def feature_options(chosen: Selection, task: str) -> ChartOptions:
    """Draw the controls and return what the reader chose, for one task."""
    run = chosen.run
    few = len(run.sample_ids(task)) < FEWEST_POINTS
    with st.container(horizontal=True, vertical_alignment="bottom"):
        method = st.selectbox(
            "Method",
            METHODS[:1] if few else METHODS,
            format_func=_METHODS.__getitem__,
            key="method",
            bind="query-params",
            help="PCA is drawn at once; the others are computed by a job of their own and kept in the run.",
            width=130,
        )
        seed = 0
        if method != "pca":
            seed = st.number_input("Seed", 0, 2**31 - 1, 0, key="seed", bind="query-params", width=130)
        colour = st.selectbox(
            "Colour",
            [*_COLOURS],
            format_func=_COLOURS.__getitem__,
            key="colour",
            bind="query-params",
            width=130,
        )
        points = st.selectbox(
            "Most points",
            _POINTS,
            index=len(_POINTS) - 1,
            key="points",
            bind="query-params",
            help="Over all panels together; samples beyond are left out, evenly over classes.",
            width=130,
        )
        classes = st.multiselect(
            "Classes",
            known_classes(run, task),
            placeholder="All classes",
            key="classes",
            bind="query-params",
            width=300,
        )
        highlight = st.multiselect(
            "Follow samples",
            run.sample_ids(task),
            placeholder="By id",
            key="highlight",
            bind="query-params",
            help="Lines show where these samples are for the expert and for each variant.",
            width=300,
        )
    if few:
        st.caption(f"Only PCA: UMAP and t-SNE need {FEWEST_POINTS} samples or more, and there are fewer.")
    return chosen.options(
        tasks=(task,),
        method=method,
        seed=int(seed),
        colour=colour,
        max_points=points,
        classes=tuple(classes) or None,
        highlight=tuple(highlight),
    )


def known_classes(run: DriftRun, task: str) -> list[str]:
    """The classes that the task's diagnosis samples have, sorted; none without labels.

    Raises:
        RunError: the sample table can't be read.
    """
    return sorted(str(label) for label in run.samples(task)["label"].dropna().unique())
