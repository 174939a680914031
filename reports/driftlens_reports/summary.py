"""Saved runs in plain text, for the terminal: one run and its story, its accuracy, a folder of runs, a verification."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from driftlens.records.listing import RunSummary
from driftlens.records.run import DriftRun
from driftlens.records.verify import VerifyResult
from driftlens_reports import facts
from driftlens_reports.columns import aligned, printable
from driftlens_reports.wording import check_sentence, number, origin_sentence, percent, size


def summary(run: DriftRun) -> str:
    """What a run found: final drift, accuracy, where the drift comes from, self-checks.

    Nothing is said that the tables do not hold; a number that is null reads "not measured".

    Raises:
        RunError: a table can't be read.
    """
    parts = [
        [f"{run.name} ({run.id})", *facts.stamps(run)],
        _section("Final feature against each task's expert (mean over samples)", _drift_lines(run)),
        _section("Accuracy on test samples", _accuracy_lines(run)),
        _section("What happened", story(run)),
        _section("Where the final drift comes from", [origin_sentence(task) for task in facts.origins(run)]),
        _section("Self-checks", [check_sentence(check) for check in facts.self_checks(run)]),
    ]
    if run.manifest.notices:
        parts.append(_section("Notices", run.manifest.notices))
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts)


def accuracy_text(run: DriftRun) -> str:
    """Accuracy of every variant on every task, one line per task.

    Raises:
        RunError: the table can't be read.
    """
    return "\n".join(_accuracy_lines(run) or [facts.NOT_MEASURED])


def listing_text(runs: Sequence[RunSummary]) -> str:
    """One line per run; below it, why a run can't be read, and what later work left undone."""
    header = ["folder", "name", "state", "tasks", "variants", "size", "largest final drift"]
    rows = []
    for run in runs:
        counts = [str(len(run.tasks)), str(len(run.variants)), size(run.bytes)]
        rows.append([run.path.name, run.name, run.state, *counts, _largest_drift(run)])
    problems = [printable(f"{run.path.name}: {run.problem}") for run in runs if run.problem]
    left = [printable(f"{run.path.name}: {text}") for run in runs for text in run.left]
    return "\n".join([*aligned([header, *rows], num_names=3), *problems, *left])


def verification_text(result: VerifyResult) -> str:
    """What `verify` found: the verdict first, then the files that differ."""
    verdict = "unchanged" if result.ok else "not as they were written"
    found = (("missing", result.missing), ("changed", result.changed), ("not listed", result.unlisted))
    files = [printable(f"{how}: {name}") for how, names in found for name in names]
    return "\n".join([f"{result.checked} files checked: {verdict}", *files])


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines or [facts.NOT_MEASURED])]


def _drift_lines(run: DriftRun) -> list[str]:
    rows = [
        [row.task, row.variant, number(row.drift), number(row.relative), number(row.cosine), str(row.n)]
        for row in facts.final_drift(run)
    ]
    header = ["task", "variant", "L2 drift", "relative", "cosine", "samples"]
    return aligned([header, *rows], num_names=2) if rows else []


def _accuracy_lines(run: DriftRun) -> list[str]:
    found = facts.accuracies(run)
    variants = facts.accuracy_variants(found)
    rows = [
        [task, *(percent(values.get(variant, math.nan)) for variant in variants)]
        for task, values in found.items()
    ]
    return aligned([["task", *variants], *rows], num_names=1) if rows else []


def _largest_drift(run: RunSummary) -> str:
    if not run.final_drift:
        return facts.NOT_MEASURED
    worst = max(run.final_drift, key=lambda task: run.final_drift[task])
    return f"{number(run.final_drift[worst])} ({worst})"


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
