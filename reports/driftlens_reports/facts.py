"""The few numbers that every report of a run begins with, taken from its tables and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from driftlens.records.checks import SelfCheck as SelfCheck  # facts like the others
from driftlens.records.checks import self_checks as self_checks
from driftlens.records.listing import damage_of_status, last_work
from driftlens.records.run import DriftRun

NOT_MEASURED = "not measured"

_SYNTHETIC = (
    "Synthetic demo: images and models were made by DriftLens itself. "
    "The numbers show how the tool works; they are no benchmark."
)


@dataclass(frozen=True)
class FinalDrift:
    """How far one variant's final features are from the task's expert; NaN where not measured."""

    task: str
    variant: str
    drift: float
    relative: float
    cosine: float
    n: int


@dataclass(frozen=True)
class Origin:
    """One layer that much of a task's final drift comes from; `amount` is what `Origins.measure` says."""

    layer: int
    path: str
    amount: float


@dataclass(frozen=True)
class Origins:
    """The layers that weigh most in one variant's drift on one task.

    Attributes:
        task: the task.
        variant: the variant.
        measure: "share" of the final drift where shares were computed, else "mismatch"; empty without either.
        layers: at most three, the heaviest first.
    """

    task: str
    variant: str
    measure: str
    layers: tuple[Origin, ...]


def final_drift(run: DriftRun) -> list[FinalDrift]:
    """One entry per task and variant, in the order of the run."""
    if not run.manifest.layers:
        return []
    rows = {(row["task"], row["variant"]): row for row in run.layers(layer="final").to_dict("records")}
    return [
        FinalDrift(
            task,
            variant,
            drift=rows[task, variant]["drift_l2_mean"],
            relative=rows[task, variant]["drift_rel"],
            cosine=rows[task, variant]["cos_mean"],
            n=rows[task, variant]["n"],
        )
        for task in run.tasks
        for variant in run.variants
        if (task, variant) in rows
    ]


def accuracies(run: DriftRun) -> Mapping[str, Mapping[str, float]]:
    """Accuracy by task and variant, where it was measured; the expert's is its own task's."""
    rows = run.accuracy()
    rows = rows[rows["metric"] == "accuracy"]
    found: dict[str, dict[str, float]] = {}
    for task, variant, value in zip(rows["task"], rows["variant"], rows["value"], strict=True):
        found.setdefault(task, {})[variant] = float(value)
    return {task: found[task] for task in run.tasks if task in found}


def accuracy_variants(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The variants of `accuracies` in reading order: base, expert, merged, then the others as they come."""
    there = dict.fromkeys(variant for values in found.values() for variant in values)
    first = [variant for variant in ("base", "expert", "merged") if variant in there]
    return first + [variant for variant in there if variant not in first]


def origins(run: DriftRun) -> list[Origins]:
    """Where each task's final drift comes from, for the merged model, or the last variant without one."""
    variants = [variant for variant in run.variants if variant not in ("base", "expert")]
    if not variants or not run.manifest.layers:
        return []
    variant = "merged" if "merged" in variants else variants[-1]
    return [_origins(run.layers(task, variant), task, variant) for task in run.tasks]


def stamps(run: DriftRun) -> list[str]:
    """What a reader must know before any number, in sentences."""
    said = [_SYNTHETIC] if run.manifest.synthetic else []
    state = last_work(run)
    if damage := damage_of_status(run):
        said.append(damage)
    if not run.manifest.finished and state != "done":
        said.append(f"This run is {state.replace('unknown', 'unfinished')}; what is missing may still come.")
    elif state not in ("done", "unknown"):
        said.append(f"The last work on this run is {state}; everything below was finished before it began.")
    return said + [f"Warning: {text}" for text in run.manifest.warnings]


def is_measured(value: float) -> bool:
    """Whether there is a number; a null of a table is NaN here."""
    return not math.isnan(value)


def _origins(rows: pd.DataFrame, task: str, variant: str) -> Origins:
    for column, measure in (("final_share", "share"), ("mismatch_l2_mean", "mismatch")):
        measured = rows[rows[column].notna()].sort_values(column, ascending=False, kind="stable").head(3)
        if len(measured):
            values = zip(measured["layer"], measured["path"], measured[column], strict=True)
            layers = tuple(Origin(int(layer), str(path), float(amount)) for layer, path, amount in values)
            return Origins(task, variant, measure, layers)
    return Origins(task, variant, "", ())
