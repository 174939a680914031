"""A run told in sentences: who suffers, which layer is to blame, what it does to decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens_reports.wording import number, percent


def story(run: DriftRun) -> list[str]:
    """Sentences made from the tables by fixed templates; what was not measured is left out.

    Raises:
        RunError: a table can't be read.
    """
    variants = [variant for variant in run.variants if variant != "base"]
    return [sentence for variant in variants for sentence in _of_variant(run, variant)]


def _of_variant(run: DriftRun, variant: str) -> Iterator[str]:
    rows = run.layers(variant=variant)
    if rows.empty:
        return
    final = rows[rows["role"] == "head"].set_index("task")
    if final["drift_rel"].notna().any():
        yield _who_suffers(final, variant)
    for task in run.tasks:
        yield from _who_is_to_blame(rows[rows["task"] == task], task, variant)
    yield from decisions(run.outputs(variant=variant), variant)


def _who_suffers(final: pd.DataFrame, variant: str) -> str:
    relative = final["drift_rel"].astype(float)
    worst = str(relative.idxmax())
    row = final.loc[worst]
    text = (
        f"{variant}: {worst} suffers most; its final feature is {number(relative[worst])} of the expert's norm away "
        f"(cosine {number(float(row['cos_mean']))}"
    )
    if not math.isnan(float(row["drift_vs_base"])):
        text += f"; {percent(float(row['drift_vs_base']))} of the base's distance"
    return f"{text}). Mean over {len(final)} tasks: {number(float(relative.mean()))}."


def _who_is_to_blame(rows: pd.DataFrame, task: str, variant: str) -> Iterator[str]:
    if not rows["final_share"].notna().any():
        return
    by_layer = rows.set_index("layer")
    worst = int(by_layer["final_share"].astype(float).idxmax())
    row = by_layer.loc[worst]
    text = (
        f"{variant}, {task}: layer {worst} ({row['path']}) accounts for {percent(float(row['final_share']))} of the "
        f"final drift. It adds {number(float(row['mismatch_l2_mean']))} itself"
    )
    if worst - 1 in by_layer.index:
        inherited = float(by_layer.loc[worst - 1, "drift_l2_mean"])
        text += f", and of the {number(inherited)} it inherits it makes {number(float(row['propagation_l2_mean']))}"
    yield f"{text}.{_second_opinion(row, float(by_layer['remainder_share'].astype(float).iloc[-1]))}"


def _second_opinion(row: pd.Series[Any], remainder: float) -> str:
    """What the derivative-free split says of the same layer, and why it differs."""
    carried, swapped = float(row["final_share"]), float(row["prefix_share"])
    if math.isnan(swapped):
        return ""
    reason = (
        "the gap is nonlinearity of the layers behind"
        if abs(remainder) < abs(carried - swapped)
        else "the gap is within the quadrature's remainder"
    )
    return f" Prefix swaps say {percent(swapped)}; {reason} (remainder {percent(remainder)})."


def decisions(outputs: pd.DataFrame, variant: str) -> Iterator[str]:
    """How many decisions flip, and how many the margins protect; nothing without scores."""
    if outputs.empty or not outputs["flipped"].notna().any():
        return
    flipped, certified = (
        float(outputs[name].astype("Float64").astype(float).mean()) for name in ("flipped", "certified")
    )
    text = f"{variant}: {percent(flipped)} of {len(outputs)} decisions differ from the expert's"
    if not math.isnan(certified):
        kept = percent(1 - flipped - certified)
        text += f"; {percent(certified)} are certified by their margin, {kept} are kept without a certificate"
    used = (outputs["score_drift_l2"] / outputs["score_bound"]).median()
    if not math.isnan(used):
        text += f". The score drift is {percent(float(used))} of its bound (median)"
    yield f"{text}."
