"""Samples: the same samples seen by the expert and by each variant, side by side, and every sample's story."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from driftlens.base.variants import part_of, title
from driftlens.base.words import counted
from driftlens.findings.outcomes import OUTCOMES
from driftlens.findings.projection import METHODS
from driftlens.findings.projection.layouts import FEWEST_POINTS
from driftlens.runs.run import DriftRun
from driftlens_app.jobs.requests import project_request
from driftlens_app.live import offer
from driftlens_app.pages import Page
from driftlens_app.samples import outcomes_of, show_explorer, show_points, show_wall
from driftlens_app.selection import FLIPPED, LAYER, OUTCOME, TASK, VARIANTS, Selection, selection
from driftlens_app.show import note, open_part, page_title, plain, show_chart, show_part, show_table
from driftlens_reports.charts.chart import SECTIONS, ChartOptions, charts, parts_of
from driftlens_reports.charts.picking import chosen_variants, scored_samples
from driftlens_reports.charts.scatter import shown_task

PAGE = Page(
    "Samples",
    icon=":material/scatter_plot:",
    order=40,
)

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}
_SAYS = "The same samples through the expert and through each variant, in one layout with shared axes."
_COLOURS = {"flip": "flip or not", "class": "class", "drift": "drift", "role": "model"}
_POINTS = (250, 500, 1000, 2000)
_ARROWS = 10
"""Samples with arrows; more would hide one another."""
_CHART = "chart-scatter"
_EXPLORE = "Explore"
MARKED = "selected"
"""Name in the URL of the places of the samples that are selected."""
_KEPT = "_selected"
_MOST_ROWS = 200


def show() -> None:
    """Draw the page."""
    run, chosen = selection().run, selection()
    part = st.session_state.get("part") or st.query_params.get("part") or SECTIONS["plane"].part
    is_plane, has_features = part == SECTIONS["plane"].part, bool(run.tasks and run.manifest.layers)
    task = shown_task(run, chosen.options()) if is_plane and has_features else chosen.task
    page_title(f"Samples of {plain(task) if task else 'all tasks'}", _SAYS)
    part = open_part([*parts_of("samples"), _EXPLORE], key="part")
    if part == _EXPLORE:
        show_explorer(run)
        return
    if part != SECTIONS["plane"].part:
        _show_output(part)
        return
    chosen = selection(TASK, VARIANTS, LAYER)
    if chosen.task is None and len(run.tasks) > 1 and task:
        st.caption(f"Of all tasks, {plain(task)} is drawn: merged drifts most there.")
    if not has_features or task is None:
        note("The run has no features yet.")
        return
    options = _options(chosen, task)
    # One layout serves every choice of variants.
    if options.method != "pca" and charts["scatter"].missing(run, replace(options, variants=None)):
        offer(project_request(run, task, options.layer, options.method, options.seed), "Compute this layout")
    marked = _marked(run, task)
    event = show_chart(
        "scatter",
        run,
        options,
        on_select=lambda: _mark(run, task, _selected(st.session_state[_CHART])),
        selection_mode=("points", "box", "lasso"),
    )
    if event is not None:
        show_points(run, task, _CHART, marked)
    _samples(run, task, options, marked)
    for name in parts_of("samples")[SECTIONS["plane"].part]:
        if name != "scatter":
            show_chart(name, run, options)


def _options(chosen: Selection, task: str) -> ChartOptions:
    """Draw the controls and return what the reader chose, for one task."""
    run, seed = chosen.run, 0
    few = len(run.sample_ids(task)) < FEWEST_POINTS
    labels = run.samples(task)["label"].dropna().unique()
    one = functools.partial(st.selectbox, bind="query-params")
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
    if few:
        st.caption(f"Only PCA: UMAP and t-SNE need {FEWEST_POINTS} samples or more, and there are fewer.")
    return chosen.options(
        tasks=(task,),
        method=method,
        seed=int(seed),
        colour=colour,
        max_points=points,
        classes=tuple(classes) or None,
        arrows=_ARROWS,
    )


def _selected(event: Any) -> list[str]:
    """Ids of the samples selected in the chart, each once."""
    points = event["selection"]["points"] if isinstance(event, Mapping) else []
    customdata = [point.get("customdata") for point in points]
    ids = [name[0] if isinstance(name, list | tuple) else name for name in customdata if name]
    return list(dict.fromkeys(str(name) for name in ids))


def _marked(run: DriftRun, task: str) -> list[str]:
    """Ids of the samples that are selected, by the URL or from before the page was left; none of another task's."""
    of, kept = st.session_state.get(_KEPT, ((run.id, task), ""))
    asked = (st.query_params.get(MARKED) or kept) if of == (run.id, task) else ""
    _keep(run, task, asked)
    ids = run.sample_ids(task)
    return [ids[int(at)] for at in asked.split("-") if at.isascii() and at.isdecimal() and int(at) < len(ids)]


def _mark(run: DriftRun, task: str, selected: Sequence[str]) -> None:
    """Select these samples, told by their places: ids may be long."""
    places = {name: str(at) for at, name in enumerate(run.sample_ids(task))}
    _keep(run, task, "-".join(places[name] for name in selected if name in places))


def _keep(run: DriftRun, task: str, marked: str) -> None:
    """Write into the URL, and remember for when the reader comes back, which samples are selected."""
    st.session_state[_KEPT] = ((run.id, task), marked)
    st.query_params.pop(MARKED, None)
    if marked:
        st.query_params[MARKED] = marked


def _samples(run: DriftRun, task: str, options: ChartOptions, marked: Sequence[str]) -> None:
    """The wall of samples, those selected in the chart or all of them, and the story of one."""
    st.subheader(f"What the models say of {plain(task)}", anchor=False, help="Most drifted first.")
    rows = sample_rows(run, task, options)
    if rows.empty:
        note("The run has no rows of single samples.")
        return
    ids = rows["sample_id"].tolist()
    with st.container(horizontal=True, vertical_alignment="center"):
        ids = _chosen_outcomes(run, task, ids, options)
        if marked:
            st.markdown(f"{len(marked)} selected in the chart")
            st.button("Show all samples", icon=":material/close:", on_click=_mark, args=(run, task, ()))
            ids = [name for name in ids if name in set(marked)]
    if not ids:
        note("No such sample here.", "check")
        return
    show_wall(run, task, {"": ids}, options, key="samples-wall")


def _chosen_outcomes(run: DriftRun, task: str, ids: list[str], options: ChartOptions) -> list[str]:
    """Those of the samples that the reader's chips are of; of flipped ones the expert's most certain ones first."""
    flips = [name for name in flipped_ids(run, task, options) if name in {*ids}]
    became = outcomes_of(run, task, options).reindex(ids)
    there = {FLIPPED: len(flips)} | {name: int((became == name).sum()) for name in OUTCOMES}
    # Streamlit's own binding would put what a chip says, its count too, into the URL.
    if OUTCOME not in st.session_state:
        st.session_state[OUTCOME] = [name for name in st.query_params.get_all(OUTCOME) if name in there]
    names = [name for name, count in there.items() if count or name in st.session_state[OUTCOME]]
    if not names:
        return ids
    wanted = st.pills(
        "Only",
        names,
        selection_mode="multi",
        wrap=True,
        format_func=lambda name: f"{name} ({there[name]})",
        key=OUTCOME,
        help="; ".join(
            [f"{FLIPPED}: decided unlike the expert", *(f"{name}: {OUTCOMES[name]}" for name in OUTCOMES)]
        ),
    )
    if not wanted:
        st.query_params.pop(OUTCOME, None)
        return ids
    st.query_params[OUTCOME] = wanted
    return (
        flips
        if wanted == [FLIPPED]
        else [name for name in ids if became[name] in wanted or (FLIPPED in wanted and name in {*flips})]
    )


def flipped_ids(run: DriftRun, task: str, options: ChartOptions) -> list[str]:
    """Samples on which the first variant shown decides unlike the expert, by falling margin."""
    rows = run.outputs(task)
    shown = [name for name in chosen_variants(run, options) if (rows["variant"] == name).any()]
    rows = rows[(rows["variant"] == next(iter(shown), "")) & rows["flipped"].fillna(False).astype(bool)]
    return rows.sort_values("margin", ascending=False, kind="stable")["sample_id"].tolist()


def sample_rows(run: DriftRun, task: str, options: ChartOptions) -> pd.DataFrame:
    """A row per sample with its class and its drift by variant, the most drifted first."""
    rows = run.samples(task, layer=options.layer)
    names = [name for name in chosen_variants(run, options) if (rows["variant"] == name).any()]
    if not names:
        return pd.DataFrame()
    wide = rows.pivot(index="sample_id", columns="variant", values="drift_l2")[names]
    labels = rows.drop_duplicates("sample_id").set_index("sample_id")["label"].rename("class")
    wide.columns = pd.Index([f"drift, {title(name)}" for name in names])
    drifts = wide.sort_values(wide.columns[0], ascending=False, kind="stable").join(labels).reset_index()
    drifts = drifts[["sample_id", "class", *wide.columns]]
    return drifts if options.classes is None else drifts[drifts["class"].isin(list(options.classes))]


def _show_output(part: str) -> None:
    """Draw a part about scores, decisions and probabilities."""
    chosen = selection(TASK, VARIANTS, with_base=part == SECTIONS["accuracy"].part)
    if chosen.run.outputs().empty:
        note(
            "The run has no class scores. A task has them when its spec names a head: `heads` with `classes` and "
            "`templates`, or a file with the rows of a classifier."
        )
    show_part("samples", part, chosen.run, chosen.options())
    if part == SECTIONS["decisions"].part:
        _flips(chosen)
    if part == SECTIONS["accuracy"].part:
        _answers(chosen)


def _flips(chosen: Selection) -> None:
    st.subheader(
        "Flipped decisions", anchor=False, help="The most certain decisions of the expert come first."
    )
    options = chosen.options()
    decided = scored_samples(chosen.run, options, "flipped")
    rows = flipped(decided)
    if rows.empty:
        if decided.empty:
            note("Decisions were not measured for these tasks and variants.")
        else:
            note("No decision flips.", "check")
        return
    rows = rows.drop_duplicates(["task", "sample_id"])
    counts = rows["task"].value_counts()
    task = _one_of(chosen, rows, "flips-of", lambda name: f"{name} ({counted(counts[name], 'sample')})")
    ids = rows.loc[rows["task"] == task, "sample_id"].tolist()
    show_wall(chosen.run, task, {"": ids}, options, key="flips-wall")


def _one_of(chosen: Selection, rows: pd.DataFrame, key: str, name: Callable[[str], str] = str) -> str:
    """The task of a table, of those that the rows are of."""
    tasks = [task for task in chosen.tasks if (rows["task"] == task).any()]
    if len(tasks) == 1:
        return tasks[0]
    return st.selectbox("Task of the table", tasks, format_func=name, key=key, bind="query-params")


def _answers(chosen: Selection) -> None:
    """What models said on test samples, where answers were generated or chosen."""
    rows = chosen.run.scores()
    rows = rows[rows["task"].isin(chosen.tasks) & rows["answer"].notna()]
    if rows.empty:
        return
    st.subheader("Answers", anchor=False, help="Test samples on which the models differ come first.")
    task = _one_of(chosen, rows, "answers-of")
    shown = answers(rows[rows["task"] == task], [*chosen.run.variants, "expert"])
    became = outcomes_of(chosen.run, task, chosen.options())
    if shown["sample"].isin(became.index).any():
        shown.insert(1, "outcome", shown["sample"].map(became))
    show_table(shown.head(_MOST_ROWS), {}, key="answers-table", alt=f"Answers on the test samples of {task}")


def answers(rows: pd.DataFrame, variants: Sequence[str]) -> pd.DataFrame:
    """A row per test sample of one task: what was wanted, and what each model said; first those where they differ."""
    wide = rows.pivot_table(
        index=["sample_id", "target"], columns="variant", values="answer", aggfunc="first", sort=False
    )
    wide = wide[[name for name in variants if name in wide]]
    wide = wide.loc[wide.nunique(axis=1).sort_values(ascending=False, kind="stable").index]
    return wide.rename(columns=title).reset_index(names=["sample", "target"])


def flipped(decided: pd.DataFrame) -> pd.DataFrame:
    """Of measured decisions, those unlike the expert's by models that cards show: a row each, by falling margin."""
    rows = decided[decided["flipped"].astype(bool) & (decided["variant"].map(part_of) != "baseline")]
    rows = rows.assign(model=rows["variant"].map(title)).sort_values("margin", ascending=False, kind="stable")
    return rows[["task", "sample_id", "model", "margin"]].reset_index(drop=True)


if __name__ == "__main__":
    show()
