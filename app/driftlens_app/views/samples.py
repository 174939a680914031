"""Samples: the same samples seen by the expert and by each variant, side by side, and every sample's story."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import NumberColumn

from driftlens.projection import METHODS
from driftlens.projection.layouts import FEWEST_POINTS
from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_app.jobs.requests import project_request
from driftlens_app.live import offer
from driftlens_app.pages import Page
from driftlens_app.samples import show_hover_pictures, show_samples
from driftlens_app.selection import LAYER, TASK, VARIANTS, Selection, selection
from driftlens_app.show import note, open_part, plain, show_chart
from driftlens_app.views import output
from driftlens_reports.charts.chart import SECTIONS, ChartOptions, charts, parts_of
from driftlens_reports.charts.picking import chosen_variants
from driftlens_reports.charts.scatter import shown_task

PAGE = Page(
    "Samples",
    icon=":material/scatter_plot:",
    order=40,
    says="The same samples through the expert and through each variant, in one layout with shared axes.",
)

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_COLOURS = {"role": "model", "class": "class", "drift": "drift"}
_POINTS = (250, 500, 1000, 2000)
_MOST_FOLLOWED = 20
"""Samples that a click follows; more lines hide one another."""


def show() -> None:
    """Draw the page."""
    part = open_part([*parts_of("samples")], key="part")
    if part != SECTIONS["plane"].part:
        output.show(part)
        return
    chosen = selection(TASK, VARIANTS, LAYER)
    run = chosen.run
    if not run.tasks or not run.manifest.layers:
        note("The run has no features yet.")
        return
    task = shown_task(run, chosen.options())
    options = _options(chosen, task)
    # One layout serves every choice of variants.
    if options.method != "pca" and charts["scatter"].missing(run, replace(options, variants=None)):
        offer(project_request(run, task, options.layer, options.method, options.seed), "Compute this layout")
    event = show_chart("scatter", run, options, on_select="rerun", selection_mode=("points", "box", "lasso"))
    if event is not None:
        show_hover_pictures(run, task, "chart-scatter", run.sample_ids(task))
    _samples(run, task, options, _selected(event))
    for name in parts_of("samples")[SECTIONS["plane"].part]:
        if name != "scatter":
            show_chart(name, run, options)


def _options(chosen: Selection, task: str) -> ChartOptions:
    """Draw the controls and return what the reader chose, for one task."""
    run, seed = chosen.run, 0
    few = len(run.sample_ids(task)) < FEWEST_POINTS
    labels = run.samples(task)["label"].dropna().unique()
    one = functools.partial(st.selectbox, bind="query-params", width=130)
    several = functools.partial(st.multiselect, bind="query-params", width=300)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        method = one(
            "Method",
            METHODS[:1] if few else METHODS,
            format_func=_METHODS.__getitem__,
            key="method",
            help="PCA is drawn at once; the others are computed by a job of their own and kept in the run.",
        )
        if method != "pca":
            seed = st.number_input("Seed", 0, 2**31 - 1, 0, key="seed", bind="query-params", width=130)
        colour = one("Colour", [*_COLOURS], format_func=_COLOURS.__getitem__, key="colour")
        points = one(
            "Most points",
            _POINTS,
            index=len(_POINTS) - 1,
            key="points",
            help="Over all panels together; samples beyond are left out, evenly over classes.",
        )
        classes = several("Classes", sorted(map(str, labels)), placeholder="All classes", key="classes")
        highlight = several(
            "Follow samples",
            run.sample_ids(task),
            placeholder="By id",
            key="highlight",
            help="Lines show where these samples are for the expert and for each variant.",
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


def _selected(event: Any) -> list[str]:
    """Ids of the samples selected in the chart, each once."""
    points = event["selection"]["points"] if isinstance(event, Mapping) else []
    found = [point.get("customdata") for point in points]
    ids = [name[0] if isinstance(name, list | tuple) else name for name in found if name]
    return list(dict.fromkeys(str(name) for name in ids))


def _samples(run: DriftRun, task: str, options: ChartOptions, selected: list[str]) -> None:
    """The table of samples, those selected in the chart or all of them, and the story of one."""
    st.subheader(
        f"Samples of {plain(task)}", anchor=False, help="Most drifted first. Select a row to read its story."
    )
    rows = sample_rows(run, task, options)
    if rows.empty:
        note("The run has no rows of single samples.")
        return
    if selected:
        rows = rows[rows["sample_id"].isin(selected)]
        st.caption(f"{len(rows)} selected in the chart; a double click there shows all again.")
        st.button(
            "Follow them through all panels",
            icon=":material/timeline:",
            key="follow",
            on_click=lambda: st.session_state.update(highlight=selected[:_MOST_FOLLOWED]),
        )
    columns = {name: NumberColumn(format="%.4g") for name in rows.columns if name.startswith("drift, ")}
    show_samples(
        run,
        task,
        rows,
        columns,
        options,
        key="samples",
        alt="Samples, the most drifted first",
        only=selected[0] if len(selected) == 1 else None,
    )


def sample_rows(run: DriftRun, task: str, options: ChartOptions) -> pd.DataFrame:
    """A row per sample with its class and its drift by variant, the most drifted first."""
    rows = run.samples(task, layer=options.layer)
    names = [name for name in chosen_variants(run, options) if (rows["variant"] == name).any()]
    if not names:
        return pd.DataFrame()
    wide = rows.pivot(index="sample_id", columns="variant", values="drift_l2")[names]
    labels = rows.drop_duplicates("sample_id").set_index("sample_id")["label"].rename("class")
    wide.columns = pd.Index([f"drift, {title(name)}" for name in names])
    found = wide.sort_values(wide.columns[0], ascending=False, kind="stable").join(labels).reset_index()
    found = found[["sample_id", "class", *wide.columns]]
    return found if options.classes is None else found[found["class"].isin(list(options.classes))]


if __name__ == "__main__":
    show()
