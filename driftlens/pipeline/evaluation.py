"""Accuracy of every variant on the test split, with intervals."""

from __future__ import annotations

import torch

from driftlens.data.samples import SampleSet
from driftlens.diagnostics.output import class_rows
from driftlens.engine.pool import expert_of
from driftlens.engine.walk import forward, waiting_bytes
from driftlens.models.heads import Head
from driftlens.pipeline.study import Study
from driftlens.progress import Reporter
from driftlens.records.intervals import wilson

CHUNK_BYTES = 256 << 20
"""Features that wait at a boundary while accuracy is measured; small enough to stay out of everything's way."""


@torch.no_grad()
def accuracy_rows(
    study: Study, task: str, variants: list[str], reporter: Reporter
) -> list[dict[str, object]]:
    """One row of the accuracy table per variant; `expert` is the task's own.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        Cancelled: somebody asked to stop.
    """
    at_hand = study.tasks[task]
    if at_hand.test is None or at_hand.head is None or at_hand.test.labels is None:
        return []
    rows: list[dict[str, object]] = []
    tasks = list(study.tasks)
    for number, variant in enumerate(variants, start=tasks.index(task) * len(variants)):
        reporter.step("evaluate", number, len(tasks) * len(variants), f"task {task}: {variant}")
        model = expert_of(task) if variant == "expert" else variant
        hits = _hits(study, model, task, at_hand.test, at_hand.head)
        low, high = wilson(hits, len(at_hand.test))
        rows.append(
            {
                "task": task,
                "variant": variant,
                "metric": "accuracy",
                "value": hits / len(at_hand.test),
                "n": len(at_hand.test),
                "ci_low": low,
                "ci_high": high,
                "seed": study.seed,
            }
        )
    reporter.step(
        "evaluate", (tasks.index(task) + 1) * len(variants), len(tasks) * len(variants), f"task {task}"
    )
    return rows


def _hits(study: Study, model: str, task: str, samples: SampleSet, head: Head) -> int:
    assert samples.labels is not None
    wanted = class_rows(head, samples.labels)
    per_sample = waiting_bytes(study.pool, model, samples.load([0]))
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    hits = 0
    for first in range(0, len(samples), length):
        chunk = samples.batches(first, min(first + length, len(samples)))
        for start, features in forward(study.pool, model, chunk, task=task):
            predicted = head.scores(features).argmax(dim=1).cpu()
            hits += int((predicted == wanted[start : start + len(predicted)]).sum())
    return hits
