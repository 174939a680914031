"""Samples on a page: their pictures, a table to choose one from, and the story of the one that is chosen."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import CheckboxColumn, ImageColumn, NumberColumn, TextColumn

from driftlens.records.layout import texts_file, thumbs_file
from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_app.settings import require_inside
from driftlens_app.show import component, note, plain, show_drawn, show_table, shown_errors
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.page_curves import sample_curves

MOST_PICTURES = 512
"""Samples with a picture; each goes to the browser, a few kilobytes."""

_STYLE = """
img { position: fixed; z-index: 1000; pointer-events: none; width: 80px; height: 80px; object-fit: contain;
      border: 1px solid var(--st-border-color); background: var(--st-background-color); image-rendering: pixelated; }
img[hidden] { display: none; }
"""

MOST_ROWS = 200
"""Rows of the table; what comes after them is in the downloads."""

_DECISION = {
    "pred": TextColumn("predicts"),
    "margin": NumberColumn(
        format="%.4g", help="The expert's best score minus its second best, in score units."
    ),
    "score_drift_inf": NumberColumn(
        "largest score change", format="%.4g", help="Below half of the margin, the decision can't flip."
    ),
    "score_bound": NumberColumn(
        "bound", format="%.4g", help="Certified bound on the norm of the score drift."
    ),
    "certified": CheckboxColumn(help="Whether the drift is too small to flip the decision."),
    "confidence": NumberColumn(format="%.3f", help="Largest class probability."),
    "ce": NumberColumn("loss", format="%.4g", help="Cross-entropy, in nats."),
}


def pictures(run: DriftRun, task: str, sample_ids: Sequence[str]) -> list[str | None]:
    """A picture of each sample as a `data:` address; None where the run has none."""
    file = run.path / thumbs_file(task)
    require_inside(file)
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    return _pictures(str(run.path), task, changed, tuple(sample_ids), run)


@st.cache_data(max_entries=64, show_spinner=False)
def _pictures(
    folder: str, task: str, changed: int, sample_ids: tuple[str, ...], _run: DriftRun
) -> list[str | None]:
    stored = _run.thumbs(task)
    if stored is None:
        return [None] * len(sample_ids)
    places = {sample: at for at, sample in enumerate(_run.sample_ids(task)[: len(stored)])}
    return [_address(stored[places[sample]]) if sample in places else None for sample in sample_ids]


def _address(pixels: object) -> str:
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels).save(target, format="PNG")  # type: ignore[arg-type]
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"


def texts_of(run: DriftRun, task: str) -> dict[str, str]:
    """What the samples of a task ask, by id; empty where the run has no texts."""
    require_inside(run.path / texts_file(task))
    return run.texts(task)


def show_hover_pictures(run: DriftRun, task: str, chart: str, sample_ids: Sequence[str]) -> None:
    """Let the chart with the key `chart` show pictures; points say which sample they are in their `customdata`.

    Nothing happens where the run has no pictures of the task.
    """
    ids = list(sample_ids)[:MOST_PICTURES]
    there = {name: image for name, image in zip(ids, pictures(run, task, ids), strict=True) if image}
    if there:
        picture = component("hover_picture", "<img hidden alt='' />", _STYLE)
        picture(data={"chart": chart, "pictures": there}, key=f"pictures-{chart}", height=1)


def show_samples(
    run: DriftRun,
    task: str,
    rows: pd.DataFrame,
    columns: Mapping[str, Any],
    options: ChartOptions,
    *,
    key: str,
    alt: str,
    only: str | None = None,
) -> None:
    """Show samples of one task in a table, and the story of the one whose row is selected.

    Args:
        run: the run.
        task: the task.
        rows: a row per sample, the most telling first, with the column `sample_id`; the first ones are shown.
        columns: how columns look.
        options: of the story's chart.
        key: of the table; its rows are added, for Streamlit keeps the number of a selected row when the rows change.
        alt: what the table shows.
        only: the sample whose story is told while no row is selected.
    """
    unlabelled = [name for name in ("label", "class") if name in rows and rows[name].isna().all()]
    shown = rows.head(MOST_ROWS).drop(columns=unlabelled)
    ids = shown["sample_id"].tolist()
    images = pictures(run, task, ids)
    if any(image is not None for image in images):
        shown = shown.assign(picture=images)[["picture", *shown.columns]]
    texts = texts_of(run, task)
    if any(name in texts for name in ids):
        others = [name for name in shown.columns if name != "sample_id"]
        shown = shown.assign(text=[texts.get(name) for name in ids])[["sample_id", "text", *others]]
    always = {"picture": ImageColumn(width="small"), "sample_id": TextColumn("sample")}
    always |= {"text": TextColumn(width="large")}
    chosen = show_table(
        shown,
        {**always, **columns},
        key=f"{key}-{zlib.crc32(repr((run.id, task, ids)).encode())}",
        alt=alt,
        on_select="rerun",
        selection_mode="single-row",
    )
    if len(rows) > len(shown):
        st.caption(f"The first {len(shown)} of {len(rows):,} samples.")
    sample = next((ids[at] for at in chosen["selection"]["rows"] if at < len(ids)), only)
    if sample is None:
        st.caption(
            f"Select a row to see the sample of {plain(task)} and how it drifts; on the keyboard, with Shift+Space."
        )
        return
    st.subheader(f"Sample {plain(sample)}", anchor=False)
    with shown_errors():
        (picture,) = pictures(run, task, [sample])
        said = decisions(run, task, sample)
        left, right = st.columns([1, 5], gap="medium") if picture is not None else (None, st.container())
        if left is not None and picture is not None:
            left.image(picture, width=128, caption=plain(sample), alt=f"Sample {sample}")
        with right:
            if sample in texts:
                st.code(texts[sample], language=None, wrap_lines=True)
            if said.empty:
                note("The run has no class scores: its spec names no head for this task.")
            else:
                about = "What each model says the sample is"
                show_table(said.convert_dtypes(), _DECISION, key="sample-decisions", alt=about)
        show_drawn("sample", run.id, sample_curves(run, task, sample, options))


def decisions(run: DriftRun, task: str, sample_id: str) -> pd.DataFrame:
    """What each model says of a sample, the expert first: class, scores and margin; empty without class scores."""
    rows = run.outputs(task)
    rows = rows[rows["sample_id"] == sample_id]
    if rows.empty:
        return pd.DataFrame()
    own = {"label": "label", "expert_pred": "pred", "margin": "margin"}
    own |= {"ce_expert": "ce", "confidence_expert": "confidence"}
    expert = rows.head(1)[[*own]].rename(columns=own).assign(model="expert")
    others = rows.assign(model=rows["variant"].map(title), margin=None)
    columns = ["model", "label", *_DECISION]
    return pd.concat([expert.astype(object), others[columns].astype(object)], ignore_index=True)[columns]
