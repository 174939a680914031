"""Preflight of the tasks: samples drawn and counted, one read, heads resolved without running the text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from driftlens.data.task_data import TaskData
from driftlens.errors import DataError
from driftlens.pipeline.findings import Collector, problem
from driftlens.pipeline.opening import OpenModels, classes_of, open_data, open_heads
from driftlens.spec import FileHead, RunSpec, TextHead


def check_data(
    spec: RunSpec,
    preprocess: Callable[[list[Any]], Any] | None,
    collect: Collector,
    *,
    offline: bool,
    trust: bool,
) -> dict[str, TaskData]:
    """The data of every task that can be opened; the others become findings.

    Args:
        spec: names them.
        preprocess: the architecture's; without one no sample is read.
        collect: where findings go.
        offline: whether only files that were downloaded before may be used.
        trust: whether Python code named in the spec may run.
    """
    opened = {}
    for task in spec.tasks:

        def open_one(task: str = task) -> TaskData:
            data = open_data(spec, task, preprocess or list, offline=offline, trust=trust)
            if preprocess is not None:
                data.diagnosis().load([0])
            return data

        data = collect.attempt(f"data of {task}", open_one)
        if data is not None:
            opened[task] = data
            _describe(data, collect)
    for split, counts in _counts(opened).items():
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{task} {count}" for task, count in counts.items())
            collect.notice("data", f"tasks have different numbers of {split} samples: {listed}")
    return opened


def check_heads(
    spec: RunSpec, models: OpenModels, data: Mapping[str, TaskData], width: int | None, collect: Collector
) -> None:
    """File what is wrong with the heads.

    Args:
        spec: names them.
        models: of which the base may have to read prompts.
        data: which may name the classes.
        width: of the final features, if known.
        collect: where findings go.
    """
    prompted = [task for task, entry in spec.heads.items() if isinstance(entry, TextHead)]
    base = models.base
    if prompted and base is not None:
        collect.attempt("text tower", lambda: models.architecture.text_tower(base))
    for task in spec.tasks:
        entry, subject = spec.heads.get(task), f"head of {task}"
        if entry is None:
            collect.ok(subject, "none, so there will be no scores and no accuracy")
        elif entry.classes is None and task not in data:
            continue  # what the data would have named is unknown, and its own problem is filed
        elif isinstance(entry, FileHead):
            _check_file_head(spec, task, models, data, width, collect)
        else:
            _check_text_head(spec, task, entry, models, data, collect)


def _check_file_head(
    spec: RunSpec,
    task: str,
    models: OpenModels,
    data: Mapping[str, TaskData],
    width: int | None,
    collect: Collector,
) -> None:
    subject = f"head of {task}"
    head = collect.attempt(subject, lambda: _open_head(spec, task, models, data))
    if head is None:
        return
    rows, columns = head.embeddings.shape
    if width is not None and columns != width:
        error = DataError(
            f"the class embeddings of {task} have {columns} entries, the models' features have {width}",
            hint=f"heads.{task}.file was made with another CLIP; make it with this base's text tower.",
        )
        collect.findings.append(problem(subject, error))
    else:
        collect.ok(subject, f"{rows} class embeddings of {columns} entries")


def _check_text_head(
    spec: RunSpec,
    task: str,
    entry: TextHead,
    models: OpenModels,
    data: Mapping[str, TaskData],
    collect: Collector,
) -> None:
    subject = f"head of {task}"
    if spec.base is None:
        collect.attempt(
            subject, lambda: _open_head(spec, task, models, data)
        )  # says what to do without a base
        return
    named = data[task].class_names if task in data else None
    names = collect.attempt(subject, lambda: classes_of(task, entry, named))
    if names is not None:
        collect.ok(subject, f"{len(names)} class names in {len(entry.templates)} templates")


def _open_head(spec: RunSpec, task: str, models: OpenModels, data: Mapping[str, TaskData]) -> Any:
    alone = spec.model_copy(update={"heads": {task: spec.heads[task]}})
    return open_heads(alone, models, {name: opened.class_names for name, opened in data.items()})[task]


def _describe(data: TaskData, collect: Collector) -> None:
    subject = f"data of {data.task}"
    counts = (
        f"{len(data.calibration())} calibration, {len(data.diagnosis())} diagnosis, {len(data.test())} test"
    )
    classes = f", {len(data.class_names)} classes" if data.class_names is not None else ", no labels"
    collect.ok(subject, f"{counts} samples{classes}")
    for text in data.notices:
        collect.notice(subject, text)


def _counts(opened: Mapping[str, TaskData]) -> dict[str, dict[str, int]]:
    """Samples per split and task; test sets differ in size by nature."""
    return {
        "calibration": {task: len(data.calibration()) for task, data in opened.items()},
        "diagnosis": {task: len(data.diagnosis()) for task, data in opened.items()},
    }
