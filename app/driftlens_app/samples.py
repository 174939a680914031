"""Samples on a page: their pictures, a wall of cards, and the story of the one that is chosen."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import CheckboxColumn, NumberColumn, TextColumn

from driftlens.base.variants import part_of, title
from driftlens.findings.reading import printable
from driftlens.runs.layout import texts_file, thumbs_file
from driftlens.runs.run import DriftRun
from driftlens_app.runs import key_of
from driftlens_app.settings import require_inside
from driftlens_app.show import component, note, plain, show_drawn, show_table, shown_errors
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.page_curves import sample_curves
from driftlens_reports.charts.picking import chosen_variants

MOST_PICTURES = 512
"""Samples with a picture; each goes to the browser, a few kilobytes."""

_STYLE = """
img { position: fixed; z-index: 1000; pointer-events: none; width: 80px; height: 80px; object-fit: contain;
      border: 1px solid var(--st-border-color); background: var(--st-background-color); image-rendering: pixelated; }
img[hidden] { display: none; }
"""

MOST_CARDS = 60
"""Cards of a wall; a selection brings others to its front."""

_WALL = """
.wall { display: grid; grid-template-columns: repeat(auto-fill, minmax(168px, 1fr)); gap: 12px; font-size: 13px; }
.wall.texts { grid-template-columns: repeat(auto-fill, minmax(min(280px, 100%), 1fr)); }
.card { display: flex; flex-direction: column; gap: 6px; padding: 10px; text-align: left; cursor: pointer; min-width: 0;
        font: inherit; color: inherit; background: var(--st-secondary-background-color);
        border: 1px solid var(--st-border-color); border-radius: 8px; }
.card:hover, .card:focus-visible { border-color: var(--st-primary-color); outline: none; }
.card img { width: 72px; height: 72px; object-fit: contain; image-rendering: pixelated; border-radius: 4px; }
.text { display: -webkit-box; -webkit-line-clamp: 5; -webkit-box-orient: vertical; overflow: hidden;
        white-space: pre-line; overflow-wrap: anywhere; }
.says { display: grid; grid-template-columns: auto 1fr; gap: 2px 8px; overflow-wrap: anywhere; }
.who, .id { opacity: 0.75; }
.other { font-weight: 700; }
.id { font-size: 12px; margin-top: auto; overflow-wrap: anywhere; }
"""

_DECISION = {
    "pred": TextColumn("predicts"),
    "margin": NumberColumn(
        format="%.3g", help="The expert's best score minus its second best, in score units."
    ),
    "score_drift_inf": NumberColumn(
        "largest score change", format="%.3g", help="Below half of the margin, the decision can't flip."
    ),
    "score_bound": NumberColumn(
        "bound", format="%.3g", help="Certified bound on the norm of the score drift."
    ),
    "certified": CheckboxColumn(help="Whether the drift is too small to flip the decision."),
    "confidence": NumberColumn(format="%.3f", help="Largest class probability."),
    "ce": NumberColumn("loss", format="%.3g", help="Cross-entropy, in nats."),
}


def pictures(run: DriftRun, task: str, sample_ids: Sequence[str]) -> list[str | None]:
    """A picture of each sample as a `data:` address; None where the run has none."""
    require_inside(run.path / thumbs_file(task))
    return _pictures(run, task, tuple(sample_ids))


@st.cache_data(max_entries=64, show_spinner=False, hash_funcs={DriftRun: key_of})
def _pictures(run: DriftRun, task: str, sample_ids: tuple[str, ...]) -> list[str | None]:
    stored = run.thumbs(task)
    places = {} if stored is None else dict(zip(run.sample_ids(task), stored, strict=False))
    return [_address(places[sample]) if sample in places else None for sample in sample_ids]


def _address(pixels: object) -> str:
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels).save(target, format="PNG")  # type: ignore[arg-type]
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"


def texts_of(run: DriftRun, task: str) -> dict[str, str]:
    """What the samples of a task ask, by id; empty where the run has no texts."""
    require_inside(run.path / texts_file(task))
    return run.texts(task)


def show_points(run: DriftRun, task: str, chart: str, marked: Sequence[str]) -> None:
    """Let the chart with the key `chart` show pictures and mark samples, which its points have as `customdata`."""
    ids = run.sample_ids(task)[:MOST_PICTURES]
    there = {name: image for name, image in zip(ids, pictures(run, task, ids), strict=True) if image}
    points = component("sample_points", "<img hidden alt='' />", _STYLE)
    points(data={"chart": chart, "pictures": there, "marked": [*marked]}, key=f"points-{chart}", height=1)


def show_wall(run: DriftRun, task: str, ids: Sequence[str], options: ChartOptions, *, key: str) -> None:
    """Cards of samples of one task, the most telling first, and the story of the only or the clicked one."""
    cards, story = wall_cards(run, task, ids[:MOST_CARDS], options), st.container()
    wall = component("wall", "<div class='wall'></div>", _WALL)
    chosen = wall(data={"cards": cards}, key=key, default={"sample": None}, on_sample_change=lambda: None)
    if len(ids) > len(cards):
        st.caption(f"The first {len(cards)} of {len(ids):,} samples.")
    sample = ids[0] if len(ids) == 1 else chosen.sample
    with story:
        if sample in ids:
            _story(run, task, sample, options)
        else:
            st.caption("Click a sample to see how it drifts, layer by layer.")


def wall_cards(run: DriftRun, task: str, ids: Sequence[str], options: ChartOptions) -> list[dict[str, Any]]:
    """Of each sample what a card shows: `id`, `picture`, `text` and `says`: who says what, unlike the expert."""
    texts, rows = texts_of(run, task), run.outputs(task)
    names = [name for name in chosen_variants(run, options) if part_of(name) != "baseline"]
    lone = [part_of(name) for name in names]
    who = {name: part_of(name) if lone.count(part_of(name)) == 1 else title(name) for name in names}
    rows = rows[rows["variant"].isin(names)]
    by_sample = {sample: part.set_index("variant") for sample, part in rows.groupby("sample_id")}
    cards = []
    for sample, picture in zip(ids, pictures(run, task, ids), strict=True):
        says: list[tuple[str, str, bool]] = []
        if (said := by_sample.get(sample)) is not None:
            label, expected = said.iloc[0][["label", "expert_pred"]]
            says = [("label", _said(label), False), ("expert said", _said(expected), False)]
            for name in (name for name in names if name in said.index):
                answer = said.at[name, "pred"]
                says.append((f"{who[name]} says", _said(answer), bool(answer != expected)))
        cards.append({"id": sample, "picture": picture, "text": texts.get(sample, ""), "says": says})
    return cards


def _said(name: object) -> str:
    return "–" if pd.isna(name) else printable(str(name))


def _story(run: DriftRun, task: str, sample: str, options: ChartOptions) -> None:
    st.subheader(f"Sample {plain(sample)}", anchor=False)
    with shown_errors():
        (picture,) = pictures(run, task, [sample])
        said, texts = decisions(run, task, sample), texts_of(run, task)
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
    of_expert = {"label": "label", "expert_pred": "pred", "margin": "margin"}
    of_expert |= {"ce_expert": "ce", "confidence_expert": "confidence"}
    expert = rows.head(1)[[*of_expert]].rename(columns=of_expert).assign(model="expert")
    others = rows.assign(model=rows["variant"].map(title), margin=None)
    columns = ["model", "label", *_DECISION]
    return pd.concat([expert.astype(object), others[columns].astype(object)], ignore_index=True)[columns]
