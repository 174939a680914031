"""What reports say of a run's layers, decisions and self-checks, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from driftlens.results.checks import CheckResult
from driftlens.results.formatting import (
    NOT_MEASURED,
    error,
    estimate,
    is_measured,
    number,
    percent,
    printable,
)
from driftlens.results.measures import share_true
from driftlens.results.verdict import share_of
from driftlens.results.verdict import shares as shares_of
from driftlens.runs.run import DriftRun, remembered
from driftlens.utils.errors import counted
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import title


def origin_variant(run: DriftRun) -> str:
    """The model whose drift is explained: the merged one, or the last variant without; empty where there is none."""
    variants = [variant for variant in run.variants if variant not in ("base", "expert")]
    return "merged" if "merged" in variants else "".join(variants[-1:])


@remembered
def origins(run: DriftRun) -> dict[str, str]:
    """Which layers each task's final drift comes from, at most three; "not measured" is said."""
    variant = origin_variant(run)
    return {task: _origin(run, task, variant) for task in run.tasks if variant and run.manifest.layers}


def _origin(run: DriftRun, task: str, variant: str) -> str:
    rows = run.layers(task, variant)
    shares, mismatches = (
        rows[rows[column].notna()]
        .sort_values(column, ascending=False, kind="stable")
        .head(3)
        .to_dict("records")
        for column in ("final_share", "mismatch_l2_mean")
    )
    if shares:
        what, kind = "largest shares of the final drift", "share"
        amounts = [share_of(row) for row in shares]
    else:
        what, kind = "largest local mismatch (mean L2)", "number"
        amounts = [Interval(float(row["mismatch_l2_mean"]), n=int(row["n"])) for row in mismatches]
    if not amounts:
        return f"{task}: {NOT_MEASURED}"
    names = [run.layer_name(int(row["layer"])) for row in shares or mismatches]
    layers = [f"{name} {estimate(amount, kind)}" for name, amount in zip(names, amounts, strict=True)]
    return f"{task}: {what}: {', '.join(layers)}{f'; n = {amounts[0].n}' if amounts[0].n else ''}"


def check_sentence(check: CheckResult) -> str:
    """How large one self-check's error gets, and where."""
    if not is_measured(check.value):
        return f"{check.metric} ({check.claim}): {NOT_MEASURED}"
    verdict = "holds" if check.status == "pass" else f"DOES NOT HOLD (limit {error(check.threshold)})"
    return f"{check.metric} ({check.claim}): {verdict}, error at most {error(check.value)} ({check.where})"


def decision_sentences(run: DriftRun) -> Iterator[str]:
    """How many decisions of each variant flip, and how many its margins protect."""
    for variant in (variant for variant in run.variants if variant != "base"):
        yield from decisions(run.outputs(variant=variant), title(variant))


def decisions(outputs: pd.DataFrame, variant: str) -> Iterator[str]:
    """How many decisions flip, and how many the margins protect; nothing without scores."""
    if not outputs["flipped"].notna().any():
        return
    flipped, certified = (share_true(outputs[name]) for name in ("flipped", "certified"))
    text = f"{variant}: {estimate(flipped, 'share')} of {counted(flipped.n, 'decision')} differ from the expert's"
    if is_measured(certified.value):
        kept = percent(1 - flipped.value - certified.value)
        text += f"; {estimate(certified, 'share')} are certified by their margin, {kept} are kept without a certificate"
    used = (outputs["score_drift_l2"] / outputs["score_bound"]).median()
    if not math.isnan(used):
        text += f". The score drift is {percent(float(used))} of its bound (median)"
    yield f"{text}."


def advice(run: DriftRun) -> dict[str, Any]:
    """Shares of the final drift by layer, and cosines of task vectors beside that of a sum at right angles."""
    rows, params = run.layers(variant="merged"), run.params(variant="merged")
    places, shares, conflicts = dict(zip(rows["path"], rows["layer"], strict=True)), [], []
    paths = {layer: path for path, layer in places.items()}
    names = {path: run.layer_name(layer) for path, layer in places.items()}
    for layer, (mean, _) in shares_of(run, "merged").items():
        ends = {"share": mean.value, "share_low": mean.low, "share_high": mean.high, "n": mean.n}
        shares.append({"layer": layer, "path": paths[layer], "name": names[paths[layer]], **ends})
    params = params[(params["scope"] == "layer") & params["cos"].notna()]
    for path, by_task in params.groupby("path", sort=False):
        cos, signs = by_task["cos"].astype(float), by_task["sign_agreement"].astype(float)
        # Of the experts' task vectors, in that of the merged one.
        lengths = 1 / by_task["norm_ratio"].astype(float)
        layer = int(places[path]) if path in places else None
        row = {"layer": layer, "path": path, "name": names.get(path, path), "cos": cos.mean()}
        row["orthogonal"] = lengths.mean() / math.sqrt(lengths.pow(2).sum())
        row["sign_agreement"] = signs.mean()
        conflicts.append(row | {"worst_task": str(by_task.loc[cos.idxmin(), "task"]), "worst_cos": cos.min()})
    return {
        "run": run.name,
        "tasks": list(run.tasks),
        "shares": shares,
        "conflicts": sorted(conflicts, key=lambda row: row["cos"] - row["orthogonal"]),
    }


def advice_text(found: Mapping[str, Any], run: str = "RUN") -> str:
    """The same in sentences, none surer than its intervals; `run` is what commands call it."""
    sentences = [*_of_shares(found), *_of_conflicts(found)]
    return "\n".join(printable(text.replace(" RUN", f" {run}")) for text in sentences)


def _of_shares(found: Mapping[str, Any]) -> list[str]:
    if not found["shares"]:
        return ["Which layers the final drift comes from was not measured; `driftlens analyze RUN` adds it."]
    first, *others = found["shares"]
    text = f"{first['name']} has the largest share of the final drift, "
    text += f"{estimate(_interval(first), 'share', counted=True)}, mean over {counted(len(found['tasks']), 'task')}."
    if not is_measured(first["share_low"]):
        return [f"{text} No interval is known, so whether another layer carries as much can't be told."]
    near = [row for row in others if not row["share_high"] < first["share_low"]]
    if not near:
        return [f"{text} The intervals of all other layers lie below."]
    listed = "; ".join(f"{row['name']} {estimate(_interval(row), 'share')}" for row in near[:3])
    more = f" and {len(near) - 3} more" if len(near) > 3 else ""
    return [f"{text} The intervals overlap, so these may carry as much: {listed}{more}."]


def _of_conflicts(found: Mapping[str, Any]) -> list[str]:
    if not found["conflicts"]:
        return ["Task vectors were not compared; of a run that has a base, its analysis does so."]
    if len(found["tasks"]) == 1:
        return ["There is one expert, so no task vectors conflict."]
    sentences = []
    for row in found["conflicts"][:3]:
        side = "less" if row["cos"] < row["orthogonal"] else "as well as or better"
        side += " than they would if experts changed unrelated things"
        sentences.append(
            f"{row['name']}: the merge's change of weights follows the experts' {side} (cosine {number(row['cos'])} on "
            f"average, unrelated changes give {number(row['orthogonal'])}); least that of {row['worst_task']} "
            f"({number(row['worst_cos'])}); {percent(row['sign_agreement'])} of the signs agree."
        )
    count = sum(row["cos"] < row["orthogonal"] for row in found["conflicts"])
    layers = f"{count or 'none'} of {counted(len(found['conflicts']), 'layer')}; they agree least in these"
    return [
        f"On average over experts, task vectors conflict in {layers} (of weights, so without intervals):",
        *sentences,
    ]


def _interval(row: Mapping[str, Any]) -> Interval:
    return Interval(row["share"], row["share_low"], row["share_high"], row["n"])
