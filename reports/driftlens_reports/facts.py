"""The few numbers that every report of a run begins with, and their words, from its tables and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from driftlens.base.intervals import Interval, wilson
from driftlens.base.variants import title
from driftlens.base.words import counted
from driftlens.findings.checks import CheckResult
from driftlens.findings.reading import NOT_MEASURED, Kind, error, estimate, is_measured, percent
from driftlens.findings.verdict import share_of
from driftlens.runs.run import DriftRun
from driftlens.runs.standing import last_work

_SYNTHETIC = (
    "Synthetic demo: samples and models were made by DriftLens itself. "
    "The numbers show how the tool works; they are no benchmark."
)


@dataclass(frozen=True)
class Origins:
    """The layers, at most three, that weigh most in a variant's drift on a task: by "share", else "mismatch"."""

    task: str
    variant: str
    measure: str
    layers: tuple[tuple[str, Interval], ...]


def origins(run: DriftRun) -> list[Origins]:
    """Where each task's final drift comes from, for the merged model, or the last variant without one."""
    variants = [variant for variant in run.variants if variant not in ("base", "expert")]
    if not variants or not run.manifest.layers:
        return []
    variant = "merged" if "merged" in variants else variants[-1]
    return [_origins(run, task, variant) for task in run.tasks]


def stamps(run: DriftRun) -> list[str]:
    """What a reader must know before any number, in sentences."""
    said = [_SYNTHETIC] if run.manifest.synthetic else []
    state, damage = last_work(run)
    if damage:
        said.append(damage)
    if not run.manifest.finished and state != "done":
        said.append(f"This run is {state.replace('unknown', 'unfinished')}; what is missing may still come.")
    elif state not in ("done", "unknown"):
        said.append(f"The last work on this run is {state}; everything below was finished before it began.")
    return said + [f"Warning: {text}" for text in run.manifest.warnings]


def _origins(run: DriftRun, task: str, variant: str) -> Origins:
    rows = run.layers(task, variant)
    for column, measure in (("final_share", "share"), ("mismatch_l2_mean", "mismatch")):
        measured = rows[rows[column].notna()].sort_values(column, ascending=False, kind="stable").head(3)
        if len(measured):
            layers = tuple(
                (
                    run.layer_name(int(row["layer"])),
                    share_of(row) if measure == "share" else Interval(float(row[column]), n=int(row["n"])),
                )
                for row in measured.to_dict("records")
            )
            return Origins(task, variant, measure, layers)
    return Origins(task, variant, "", ())


def origin_sentence(origins: Origins) -> str:
    """Which layers the final drift comes from, or that this was not measured."""
    if not origins.layers:
        return f"{origins.task}: {NOT_MEASURED}"
    is_share = origins.measure == "share"
    what = "largest shares of the final drift" if is_share else "largest local mismatch (mean L2)"
    kind: Kind = "share" if is_share else "number"
    layers = [f"{name} {estimate(amount, kind)}" for name, amount in origins.layers]
    n = origins.layers[0][1].n
    return f"{origins.task}: {what}: {', '.join(layers)}{f'; n = {n}' if n else ''}"


def check_sentence(check: CheckResult) -> str:
    """How large one self-check's error gets, and where."""
    if not is_measured(check.value):
        return f"{check.metric} ({check.claim}): {NOT_MEASURED}"
    verdict = "holds" if check.status == "pass" else f"DOES NOT HOLD (limit {error(check.threshold)})"
    return f"{check.metric} ({check.claim}): {verdict}, error at most {error(check.value)} ({check.where})"


def decision_sentences(run: DriftRun) -> list[str]:
    """How many decisions of each variant flip, and how many its margins protect."""
    return [
        sentence
        for variant in run.variants
        if variant != "base"
        for sentence in decisions(run.outputs(variant=variant), title(variant))
    ]


def decisions(outputs: pd.DataFrame, variant: str) -> Iterator[str]:
    """How many decisions flip, and how many the margins protect; nothing without scores."""
    if outputs.empty or not outputs["flipped"].notna().any():
        return
    flipped, certified = (_share(outputs[name]) for name in ("flipped", "certified"))
    text = f"{variant}: {estimate(flipped, 'share')} of {counted(flipped.n, 'decision')} differ from the expert's"
    if is_measured(certified.value):
        kept = percent(1 - flipped.value - certified.value)
        text += f"; {estimate(certified, 'share')} are certified by their margin, {kept} are kept without a certificate"
    used = (outputs["score_drift_l2"] / outputs["score_bound"]).median()
    if not math.isnan(used):
        text += f". The score drift is {percent(float(used))} of its bound (median)"
    yield f"{text}."


def _share(column: pd.Series[Any]) -> Interval:
    """The share of samples of which it is true, with Wilson's interval."""
    known = column.dropna().astype(bool)
    if known.empty:
        return Interval(math.nan)
    hits = int(known.sum())
    return Interval(hits / len(known), *wilson(hits, len(known)), len(known))
