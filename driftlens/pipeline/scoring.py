"""Every expert scored on its own task, so that a broken one is found before it is blamed on merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import cast

from driftlens.errors import DataError
from driftlens.pipeline.evaluation import accuracy_rows
from driftlens.pipeline.findings import Collector, Finding, problem
from driftlens.pipeline.study import Study, TaskSamples
from driftlens.progress import Reporter

Row = Mapping[str, object]


def score_experts(study: Study, collect: Collector) -> None:
    """File the accuracy of every expert, and of the base beside it, on the task's diagnosis samples.

    Args:
        study: opened; the merged model need not be there yet.
        collect: where findings go.
    """
    scored = {task: _on_diagnosis(samples) for task, samples in study.tasks.items()}
    study = dataclasses.replace(study, tasks=scored)
    variants = ["expert", *(["base"] if study.has_base else [])]
    for task in study.tasks:
        subject = f"expert of {task}"
        rows = collect.attempt(subject, partial(accuracy_rows, study, task, variants, Reporter()))
        if rows is None:
            continue
        if not rows:
            collect.notice(subject, f"the {subject} is not scored: {task} has no head, or no labels")
            continue
        head = study.tasks[task].head
        assert head is not None  # there are no rows without
        collect.findings.append(
            _judged(subject, {str(row["variant"]): row for row in rows}, len(head.classes))
        )


def _on_diagnosis(samples: TaskSamples) -> TaskSamples:
    """The same with the diagnosis samples in place of the test set, which may be large."""
    labelled = samples.diagnosis if samples.diagnosis.labels is not None else None
    return dataclasses.replace(samples, test=labelled)


def _judged(subject: str, rows: Mapping[str, Row], num_classes: int) -> Finding:
    expert, chance = rows["expert"], 1 / num_classes
    text = f"the {subject} scores {_score(expert)} on {expert['n']} samples of its own task"
    if num_classes > 1 and cast(float, expert["ci_low"]) <= chance:
        error = DataError(
            f"{text}, which can't be told from guessing among {num_classes} classes ({chance:.1%})",
            hint="Check its file, the order of the head's rows, and the activation; or raise n_diagnosis.",
        )
        return problem(subject, error)
    if "base" not in rows:
        return Finding("ok", subject, text)
    text += f", the base {_score(rows['base'])}"
    if cast(float, expert["value"]) > cast(float, rows["base"]["value"]):
        return Finding("ok", subject, text)
    return Finding("notice", subject, f"{text}: no better", "Was it fine-tuned on this task?")


def _score(row: Row) -> str:
    value, low, high = (cast(float, row[key]) for key in ("value", "ci_low", "ci_high"))
    return f"{value:.1%} ({low:.1%} to {high:.1%})"
