"""Samples on a page: their pictures, a wall of cards, and the story of the one that is chosen."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.column_config import CheckboxColumn, NumberColumn, TextColumn

from driftlens.base.variants import part_of, title
from driftlens.base.words import counted
from driftlens.findings.outcomes import BROKEN_BY_MERGE, OUTCOMES, outcomes
from driftlens.findings.reading import printable
from driftlens.findings.verdict import verdict
from driftlens.runs.layout import texts_file, thumbs_file
from driftlens.runs.run import DriftRun
from driftlens_app.runs import key_of
from driftlens_app.settings import require_inside
from driftlens_app.show import component, note, plain, show_drawn, show_table, shown_errors
from driftlens_reports.charts.chart import ChartOptions
from driftlens_reports.charts.page_curves import sample_curves
from driftlens_reports.charts.picking import chosen_variants
from driftlens_reports.explorer.page import Explorer

MOST_PICTURES = 512
"""Samples with a picture; each goes to the browser, a few kilobytes."""

_STYLE = """
img { position: fixed; z-index: 1000; pointer-events: none; width: 80px; height: 80px; object-fit: contain;
      border: 1px solid var(--st-border-color); background: var(--st-background-color); image-rendering: pixelated; }
img[hidden] { display: none; }
"""

_EXPLORER_HEIGHT = 1000
"""Pixels: controls and points on one screen; what is below scrolls inside."""

MOST_CARDS = 60
"""Cards of a wall; a selection brings others to its front."""
MOST_OF_A_GROUP = 12
"""The same of walls that stand beside one another."""

_WALL = """
.walls { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 20px; }
.wall { display: grid; grid-template-columns: repeat(auto-fill, minmax(168px, 1fr)); gap: 12px; font-size: 13px;
        align-content: start; }
.wall.texts { grid-template-columns: repeat(auto-fill, minmax(min(280px, 100%), 1fr)); }
.walls:has(.wall + .wall) .wall:not(.texts) { grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); }
.wall h4 { grid-column: 1 / -1; margin: 0; font-size: 15px; font-weight: 600; }
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
.outcome { align-self: start; padding: 1px 8px; border-radius: 999px; font-size: 12px; font-weight: 600;
           border: 1px solid currentColor; }
.good { color: var(--st-green-text-color); }
.bad { color: var(--st-red-text-color); }
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


def show_explorer(run: DriftRun) -> None:
    """The page of `driftlens view`, which needs no server for what is done in it, and a button that hands it out."""
    for task in run.tasks:
        for file in (thumbs_file(task), texts_file(task)):
            require_inside(run.path / file)
    with shown_errors():
        page, inside = _explorer(run)
        st.download_button(
            "Download this page", page, f"{run.id}.html", "text/html", icon=":material/download:"
        )
        st.iframe(inside, height=_EXPLORER_HEIGHT, alt="Samples that move from model to model")


@st.cache_data(max_entries=4, show_spinner="Laying out all layers", hash_funcs={DriftRun: key_of})
def _explorer(run: DriftRun) -> tuple[str, str]:
    made = Explorer(run)
    return made.page.decode(), made.inside.decode()


def show_points(run: DriftRun, task: str, chart: str, marked: Sequence[str]) -> None:
    """Let the chart with the key `chart` show pictures and mark samples, which its points have as `customdata`."""
    ids = run.sample_ids(task)[:MOST_PICTURES]
    there = {name: image for name, image in zip(ids, pictures(run, task, ids), strict=True) if image}
    points = component("sample_points", "<img hidden alt='' />", _STYLE)
    points(data={"chart": chart, "pictures": there, "marked": [*marked]}, key=f"points-{chart}", height=1)


def outcomes_of(run: DriftRun, task: str, options: ChartOptions) -> pd.Series[str]:
    """What became of every sample by what is shown: the merged and the newest repaired model; empty where unknown."""
    repaired = [name for name in chosen_variants(run, options) if part_of(name) == "calibrated"]
    if not (merged := verdict(run).merged):
        return pd.Series(dtype=str)
    return outcomes(run, task, merged, repaired[-1] if repaired else "")["outcome"]


def show_wall(
    run: DriftRun, task: str, groups: Mapping[str, Sequence[str]], options: ChartOptions, *, key: str
) -> None:
    """Cards of samples of one task, by the heading of their group, and the story of the only or the clicked one."""
    ids = [sample for group in groups.values() for sample in group]
    most, story = MOST_CARDS if len(groups) == 1 else MOST_OF_A_GROUP, st.container()
    walls = [
        {"title": head, "cards": wall_cards(run, task, group[:most], options)}
        for head, group in groups.items()
    ]
    wall = component("wall", "<div class='walls'></div>", _WALL)
    chosen = wall(data={"walls": walls}, key=key, default={"sample": None}, on_sample_change=lambda: None)
    if len(ids) > (num := sum(len(each["cards"]) for each in walls)):
        st.caption(f"The first {num} of {len(ids):,} samples.")
    sample = ids[0] if len(ids) == 1 else chosen.sample
    with story:
        if sample in ids:
            _story(run, task, sample, options)
        else:
            st.caption("Click a sample to see how it drifts, layer by layer.")


def show_before_after(run: DriftRun, name: str, options: ChartOptions) -> None:
    """What the merge broke and the repair `name` left or mended, and what it broke itself, side by side."""
    judged = verdict(run, name)
    by_task = {
        task: outcomes(run, task, judged.merged, judged.after)["outcome"]
        for task in run.tasks
        if judged.merged
    }
    changed = {
        task: int(found.isin([*BROKEN_BY_MERGE, "broken"]).sum())
        for task, found in by_task.items()
        if len(found)
    }
    if not changed:
        return
    st.subheader("What the merge broke, and what the repair did", anchor=False)
    most = max(changed, key=lambda task: changed[task])
    task = st.selectbox(
        "Task of the wall", [*changed], index=[*changed].index(most), key="wall-of", bind="query-params"
    )
    found = by_task[task]
    groups = {
        f"{at.capitalize()} ({len(ids)}): {OUTCOMES[at]}": ids
        for at in ("repaired", "still wrong", "broken")
        if (ids := found.index[found == at].tolist())
    }
    if not groups:
        note(f"The merge broke no sample of {plain(task)}, nor did the repair.", "check")
        return
    show_wall(run, task, groups, options, key="before-after-wall")
    st.caption(f"{counted(len(found), 'sample')} with known answers.")


def wall_cards(run: DriftRun, task: str, ids: Sequence[str], options: ChartOptions) -> list[dict[str, Any]]:
    """Of each sample what a card shows: `id`, `picture`, `text`, `outcome` and `says`: who says what, and its mark.

    Marks: ✓ and ✗ tell right from wrong; where that isn't known, ≠ what is unlike the expert.
    """
    texts, rows, became = texts_of(run, task), run.outputs(task), outcomes_of(run, task, options)
    names = [name for name in chosen_variants(run, options) if part_of(name) != "baseline"]
    lone = [part_of(name) for name in names]
    who = {name: part_of(name) if lone.count(part_of(name)) == 1 else title(name) for name in names}
    rows = rows[rows["variant"].isin(names)]
    by_sample = {sample: part.set_index("variant") for sample, part in rows.groupby("sample_id")}
    cards = []
    for sample, picture in zip(ids, pictures(run, task, ids), strict=True):
        says: list[tuple[str, str, str]] = []
        if (said := by_sample.get(sample)) is not None:
            label, expected = said.iloc[0][["label", "expert_pred"]]
            says = [("label", _said(label), ""), ("expert said", _said(expected), _mark(expected, label))]
            for name in (name for name in names if name in said.index):
                answer = said.at[name, "pred"]
                unlike = "≠" if answer != expected else ""
                says.append((f"{who[name]} says", _said(answer), _mark(answer, label) or unlike))
        card = {"id": sample, "picture": picture, "text": texts.get(sample, ""), "says": says}
        cards.append(card | {"outcome": became.get(sample, "")})
    return cards


def _mark(answer: object, label: object) -> str:
    return "" if pd.isna(label) or pd.isna(answer) else "✓" if answer == label else "✗"


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
