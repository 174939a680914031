"""The few numbers that every report of a run begins with, taken from its tables and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from driftlens.records.listing import current_state
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


@dataclass(frozen=True)
class SelfCheck:
    """The largest error of one exact claim over all rows; NaN when it was not measured.

    Attributes:
        name: short name.
        claim: what is exact in theory.
        largest: the largest error found.
        limit: up to which the claim counts as holding; beyond what rounding and quadrature explain, it does not.
        where: the row with the largest error.
    """

    name: str
    claim: str
    largest: float
    limit: float
    where: str

    @property
    def holds(self) -> bool:
        """Whether the claim was checked and holds."""
        return self.largest <= self.limit  # false for NaN


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


def self_checks(run: DriftRun) -> list[SelfCheck]:
    """The largest error of each claim that a run checks about itself."""
    layers, outputs = run.layers(), run.outputs()
    sums = _share_sums(layers)
    return [
        _largest(layers, "closure_error", 1e-4, "closure", "drift equals that of ordinary forward passes"),
        _largest(
            layers, "jacobian_error", 1e-2, "Jacobian", "propagation equals Jacobian times incoming drift"
        ),
        _largest(sums, "remainder", 1e-2, "contributions", "shares of the final drift sum to 1"),
        _largest(sums, "prefix", 1e-4, "prefix swaps", "their shares sum to 1"),
        _largest(
            outputs, "softmax_integral_error", 1e-9, "softmax", "its change is the integral of its Jacobian"
        ),
        _largest(
            outputs, "ce_integral_error", 1e-6, "cross-entropy", "its change is the integral of its gradient"
        ),
    ]


def _share_sums(layers: pd.DataFrame) -> pd.DataFrame:
    """How far the shares of each task and variant are from their exact sum, at the head's row."""
    groups = layers.groupby(["task", "variant"], sort=False)
    last = groups.tail(1)[["task", "variant", "layer", "remainder_share"]].reset_index(drop=True)
    prefix = groups["prefix_share"].sum(min_count=1).to_numpy(dtype=float)
    return last.assign(remainder=last["remainder_share"].astype(float).abs(), prefix=abs(prefix - 1))


def stamps(run: DriftRun) -> list[str]:
    """What a reader must know before any number, in sentences."""
    said = [_SYNTHETIC] if run.manifest.synthetic else []
    state = current_state(run)
    if state != "done":
        said.append(f"This run is {state}; what is missing may still come.")
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


def _largest(rows: pd.DataFrame, column: str, limit: float, name: str, claim: str) -> SelfCheck:
    measured = rows[rows[column].notna()].to_dict("records")
    if not measured:
        return SelfCheck(name, claim, math.nan, limit, "")
    worst = max(measured, key=lambda row: float(row[column]))
    place = f"layer {worst['layer']}" if "layer" in worst else f"sample {worst['sample_id']}"
    where = f"task {worst['task']}, {worst['variant']}, {place}"
    return SelfCheck(name, claim, float(worst[column]), limit, where)
