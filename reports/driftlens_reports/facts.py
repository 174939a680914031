"""Sentences about a run: sources of the drift, decisions, self-checks, and layers to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from driftlens.results.checks import CheckResult
from driftlens.results.formatting import (
    NOT_MEASURED,
    Kind,
    Table,
    format_error,
    format_estimate,
    format_number,
    format_percent,
    is_measured,
    strip_control_chars,
)
from driftlens.results.measures import share_of_true
from driftlens.results.verdict import layer_drift_shares as shares_of, row_drift_share
from driftlens.runs.run import DriftRun, cache_on_run
from driftlens.utils.errors import pluralize
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import ACCURACY, describe_metrics, display_name, metric_by_name

# Columns that explain the final drift, the better one first, with their meaning.
_ORIGINS: tuple[tuple[str, str, Kind], ...] = (
    ("final_share", "largest shares of the final drift", "share"),
    ("mismatch_l2_mean", "largest local mismatch (mean L2)", "number"),
)


def explained_variant(run: DriftRun) -> str:
    """Return the model whose drift is attributed to layers: merged, else the last variant; empty without any."""
    variants = [variant for variant in run.variants if variant not in ("base", "expert")]
    return "merged" if "merged" in variants else "".join(variants[-1:])


@cache_on_run
def drift_sources(run: DriftRun) -> dict[str, str]:
    """Describe the layers with the largest shares of the final drift, one sentence per task."""
    variant = explained_variant(run)
    return {task: _drift_source_sentence(run, task, variant) for task in run.tasks if variant and run.manifest.layers}


def _drift_source_sentence(run: DriftRun, task: str, variant: str) -> str:
    rows = run.layers(task, variant)
    for column, meaning, kind in _ORIGINS:
        largest = rows[rows[column].notna()].sort_values(column, ascending=False, kind="stable").head(3)
        layers = []
        for row in largest.to_dict("records"):
            is_share = column == "final_share"
            amount = row_drift_share(row) if is_share else Interval(float(row[column]), n=int(row["n"]))
            layers.append(f"{run.layer_name(int(row['layer']))} {format_estimate(amount, kind)}")
        if layers:
            return f"{task}: {meaning}: {', '.join(layers)}{f'; n = {amount.n}' if amount.n else ''}"
    return f"{task}: {NOT_MEASURED}"


def self_check_sentence(check: CheckResult) -> str:
    """Describe the largest error of a self-check, its limit and where it occurs."""
    if not is_measured(check.value):
        return f"{check.metric} ({check.claim}): {NOT_MEASURED}"
    verdict = "holds" if check.status == "pass" else f"DOES NOT HOLD (limit {format_error(check.threshold)})"
    return f"{check.metric} ({check.claim}): {verdict}, error at most {format_error(check.value)} ({check.where})"


def decision_sentences(run: DriftRun) -> Iterator[str]:
    """Yield a sentence per variant on the share of flipped and of certified decisions."""
    for variant in run.variants:
        outputs = run.outputs(variant=variant)
        if variant != "base" and outputs["flipped"].notna().any():
            yield decision_sentence(outputs, display_name(variant))


def decision_sentence(outputs: pd.DataFrame, variant: str) -> str:
    """Return the sentence on flipped and certified decisions of one variant."""
    flipped, certified = (share_of_true(outputs[name]) for name in ("flipped", "certified"))
    decisions = pluralize(flipped.n, "decision")
    text = f"{variant}: {format_estimate(flipped, 'share')} of {decisions} differ from the expert's"
    if is_measured(certified.value):
        kept = format_percent(1 - flipped.value - certified.value)
        certified_text = format_estimate(certified, "share")
        text += f"; {certified_text} are certified by their margin, {kept} kept without a certificate"
    # The median, since a few bounds near 0 would dominate a mean.
    used = (outputs["score_drift_l2"] / outputs["score_bound"]).median()
    if not math.isnan(used):
        text += f". The score drift is {format_percent(float(used))} of its bound (median)"
    return f"{text}."


def accuracy_table(run: DriftRun) -> Table:
    """Return the scores of every variant on every task with intervals, then scores imported from other tools."""
    names = ("task", "variant", "metric", "value", "ci_low", "ci_high", "n")
    columns = run.accuracy()[[*names]]
    metrics = {name: metric_by_name(name) for name in columns["metric"].unique()}
    is_attached = [metrics[name].is_external for name in columns["metric"]]
    # Stable, so that both groups keep their order.
    columns = columns.iloc[np.argsort(is_attached, kind="stable")]
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics.values()) else "number"
    kinds: dict[str, Kind] = {
        **dict.fromkeys(("task", "model", "metric"), "text"),
        **dict.fromkeys(("value", "95 % low", "95 % high"), kind),
        "samples": "count",
    }
    rows = [columns[name] if name != "variant" else columns[name].map(display_name) for name in names]
    others = [metric for metric in metrics.values() if metric != ACCURACY]
    intervals = "95 % intervals" if others else "Wilson intervals"
    notes = [f"{intervals}. Each expert is scored on its own task.", *describe_metrics(others)]
    heading = f"{'Scores' if others else 'Accuracy'} on test samples"
    return Table.of("accuracy", heading, kinds, [*zip(*rows, strict=True)], " ".join(notes))


def layer_advice(run: DriftRun) -> dict[str, Any]:
    """Return the share of the final drift and the cosine between task vectors, by layer."""
    rows, params = run.layers(variant="merged"), run.params(variant="merged")
    layers = dict(zip(rows["path"], map(int, rows["layer"]), strict=True))
    paths = {layer: path for path, layer in layers.items()}
    shares = [
        {
            **{"layer": layer, "path": paths[layer], "name": run.layer_name(layer)},
            **{"share": mean.value, "share_low": mean.low, "share_high": mean.high, "n": mean.n},
        }
        for layer, mean in shares_of(run, "merged").items()
    ]
    conflicts = []
    params = params[(params["scope"] == "layer") & params["cos"].notna()]
    # Unsorted: the table has forward order.
    for path, by_task in params.groupby("path", sort=False):
        cos, layer = by_task["cos"].astype(float), layers.get(path)
        # Of the experts' task vectors, in that of the merged one.
        lengths = 1 / by_task["norm_ratio"].astype(float)
        row = {
            **{"layer": layer, "path": path, "name": path if layer is None else run.layer_name(layer)},
            **{"cos": cos.mean(), "orthogonal": lengths.mean() / math.sqrt(lengths.pow(2).sum())},
            "sign_agreement": by_task["sign_agreement"].astype(float).mean(),
            **{"worst_task": str(by_task.loc[cos.idxmin(), "task"]), "worst_cos": cos.min()},
        }
        conflicts.append(row)
    return {
        "run": run.name,
        "tasks": list(run.tasks),
        "shares": shares,
        "conflicts": sorted(conflicts, key=lambda row: row["cos"] - row["orthogonal"]),
    }


def layer_advice_text(numbers: Mapping[str, Any], run: str = "RUN") -> str:
    """Describe the layers with the largest drift shares and task-vector conflicts in sentences."""
    sentences = [*_drift_share_sentences(numbers), *_weight_conflict_sentences(numbers)]
    return "\n".join(strip_control_chars(text.replace(" RUN", f" {run}")) for text in sentences)


def _drift_share_sentences(numbers: Mapping[str, Any]) -> list[str]:
    if not numbers["shares"]:
        return ["The source of the final drift was not measured; `driftlens analyze RUN` adds it."]
    top, *others = numbers["shares"]
    share = format_estimate(_share_interval(top), "share", counted=True)
    tasks = pluralize(len(numbers["tasks"]), "task")
    text = f"{top['name']} has the largest share of the final drift, {share}, mean over {tasks}."
    if not is_measured(top["share_low"]):
        return [f"{text} Without intervals, another layer may contribute as much."]
    # `not <` keeps layers without an interval, whose ends are NaN.
    near = [row for row in others if not row["share_high"] < top["share_low"]]
    if not near:
        return [f"{text} All other intervals are lower."]
    listed = "; ".join(f"{row['name']} {format_estimate(_share_interval(row), 'share')}" for row in near[:3])
    more = f" and {len(near) - 3} more" if len(near) > 3 else ""
    return [f"{text} Intervals overlap, so these may contribute as much: {listed}{more}."]


def _weight_conflict_sentences(numbers: Mapping[str, Any]) -> list[str]:
    if not numbers["conflicts"]:
        return ["Task vectors were not compared; that needs a run with a base."]
    if len(numbers["tasks"]) == 1:
        return ["With one expert no task vectors conflict."]
    sentences = [
        f"{row['name']}: task vectors {'conflict' if row['cos'] < row['orthogonal'] else 'do not conflict'} (mean "
        f"cosine {format_number(row['cos'])}; {format_number(row['orthogonal'])} expected for unrelated task vectors); "
        f"lowest for {row['worst_task']} ({format_number(row['worst_cos'])}); "
        f"{format_percent(row['sign_agreement'])} of the signs agree."
        for row in numbers["conflicts"][:3]
    ]
    count = sum(row["cos"] < row["orthogonal"] for row in numbers["conflicts"])
    layers = f"{count or 'none'} of {pluralize(len(numbers['conflicts']), 'layer')}; they agree least in these"
    return [
        f"Task vectors conflict in {layers} (mean over experts; of weights, so without intervals):",
        *sentences,
    ]


def _share_interval(row: Mapping[str, Any]) -> Interval:
    return Interval(row["share"], row["share_low"], row["share_high"], row["n"])
