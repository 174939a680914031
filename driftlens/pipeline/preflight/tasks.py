"""Preflight of the tasks: samples drawn and counted, one read, heads resolved without running the text tower."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from driftlens.access import Access
from driftlens.data.task_data import TaskData
from driftlens.errors import DataError
from driftlens.models.architecture import Architecture
from driftlens.models.chain import LayerChain
from driftlens.pipeline.analyze.evaluation import accuracy_rows
from driftlens.pipeline.preflight.outcome import Preflight
from driftlens.pipeline.study.opening import OpenModels, classes_of, open_data, open_heads
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter
from driftlens.spec import RunSpec, TextHead


def check_data(
    spec: RunSpec, architecture: Architecture | None, checks: Preflight, access: Access
) -> dict[str, TaskData]:
    """The data of every task that can be opened; without an architecture no sample is read."""
    opened = {}
    for task in spec.tasks:

        def open_one(task: str = task) -> TaskData:
            data = open_data(spec, task, architecture, access=access)
            if architecture is not None:
                data.diagnosis().load([0])
            return data

        data = checks.attempt(f"data of {task}", open_one)
        if data is not None:
            opened[task] = data
            _describe(data, checks)
    splits = {  # test sets differ in size by nature
        "calibration": {task: len(data.calibration()) for task, data in opened.items()},
        "diagnosis": {task: len(data.diagnosis()) for task, data in opened.items()},
    }
    for split, counts in splits.items():
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{task} {count}" for task, count in counts.items())
            checks.notice("data", f"tasks have different numbers of {split} samples: {listed}")
    return opened


def _describe(data: TaskData, checks: Preflight) -> None:
    subject = f"data of {data.task}"
    counts = (
        f"{len(data.calibration())} calibration, {len(data.diagnosis())} diagnosis, {len(data.test())} test"
    )
    classes = f", {len(data.class_names)} classes" if data.class_names is not None else ", no labels"
    checks.ok(subject, f"{counts} samples{classes}")
    for text in data.notices:
        checks.notice(subject, text)


def check_heads(
    spec: RunSpec, models: OpenModels, data: Mapping[str, TaskData], width: int | None, checks: Preflight
) -> None:
    """File what is wrong with the heads; `width` is that of the final features, if known."""
    named = {task: opened.class_names for task, opened in data.items()}
    base = models.base
    if base is not None and any(isinstance(entry, TextHead) for entry in spec.heads.values()):
        checks.attempt("text tower", lambda: models.architecture.text_tower(base))
    for task in spec.tasks:
        entry, subject = spec.heads.get(task), f"head of {task}"
        if entry is None:
            checks.ok(subject, "none, so there will be no scores and no accuracy")
        elif entry.classes is None and task not in data:
            continue  # what the data would have named is unknown, and its own problem is filed
        elif isinstance(entry, TextHead) and spec.base is not None:  # to read the prompts would take long
            names = checks.attempt(subject, partial(classes_of, task, entry, named.get(task)))
            if names is not None:
                checks.ok(subject, f"{len(names)} class names in {len(entry.templates)} templates")
        else:
            alone = spec.model_copy(update={"heads": {task: entry}})
            heads = checks.attempt(subject, partial(open_heads, alone, models, named))
            if heads is not None:
                _check_width(task, heads[task], width, checks)


def _check_width(task: str, head: Any, width: int | None, checks: Preflight) -> None:
    rows, columns = head.embeddings.shape
    if width is None or columns == width:
        checks.ok(f"head of {task}", f"{rows} class embeddings of {columns} entries")
        return
    error = DataError(
        f"the class embeddings of {task} have {columns} entries, the models' features have {width}",
        hint=f"heads.{task}.file was made with another CLIP; make it with this base's text tower.",
    )
    checks.problem(f"head of {task}", error)


Row = Mapping[str, object]


def score_experts(study: Study, checks: Preflight) -> None:
    """File the accuracy of every expert, and of the base beside it, on the task's diagnosis samples."""
    # In place of the test set, which may be large.
    scored = {
        task: dataclasses.replace(at, test=at.diagnosis if at.diagnosis.labels is not None else None)
        for task, at in study.tasks.items()
    }
    study = dataclasses.replace(study, tasks=scored)
    variants = ["expert", *(["base"] if study.has_base else [])]
    for task in study.tasks:
        subject = f"expert of {task}"
        rows = checks.attempt(subject, partial(accuracy_rows, study, task, variants, Reporter()))
        if rows is None:
            continue
        if not rows:
            checks.notice(subject, f"the {subject} is not scored: {task} has no head, or no labels")
            continue
        head = study.tasks[task].head
        assert head is not None  # there are no rows without
        _judge(checks, subject, {str(row["variant"]): row for row in rows}, len(head.classes))


def _judge(checks: Preflight, subject: str, rows: Mapping[str, Row], num_classes: int) -> None:
    expert, chance = rows["expert"], 1 / num_classes
    text = f"the {subject} scores {_score(expert)} on {expert['n']} samples of its own task"
    if num_classes > 1 and cast(float, expert["ci_low"]) <= chance:
        error = DataError(
            f"{text}, which can't be told from guessing among {num_classes} classes ({chance:.1%})",
            hint="Check its file, the order of the head's rows, and the activation; or raise n_diagnosis.",
        )
        checks.problem(subject, error)
    elif "base" not in rows:
        checks.ok(subject, text)
    elif cast(float, expert["value"]) > cast(float, rows["base"]["value"]):
        checks.ok(subject, f"{text}, the base {_score(rows['base'])}")
    else:
        text += f", the base {_score(rows['base'])}: no better"
        checks.notice(subject, text, "Was it fine-tuned on this task?")


def _score(row: Row) -> str:
    value, low, high = (cast(float, row[key]) for key in ("value", "ci_low", "ci_high"))
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def check_ties(chain: LayerChain, checks: Preflight) -> None:
    """Say which weights stand in two places: whoever calibrates or swaps one of them changes the other."""
    places: defaultdict[tuple[str, tuple[int, int] | None], list[str]] = defaultdict(list)
    for layer in chain.layers:
        for name, slot in layer.parameters.items():
            places[slot.key, slot.rows].append(f"{name} of layer {layer.index}")
    tied = {key: found for (key, _), found in places.items() if len(found) > 1}
    for key, found in tied.items():
        checks.notice(
            "ties", f"{key} is {' and '.join(found)}", "To calibrate one of them changes the others too."
        )
    if not tied:
        checks.ok("ties", "none: every weight stands in one place")
