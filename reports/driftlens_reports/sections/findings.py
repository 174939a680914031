"""The sections between setup and calibration: sentences from the tables; their charts come from the registry."""

from __future__ import annotations

from collections.abc import Iterator

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports import facts
from driftlens_reports.content import Table
from driftlens_reports.sections.tabulate import table
from driftlens_reports.story import decisions
from driftlens_reports.wording import number, origin_sentence


def origin_sentences(run: DriftRun) -> list[str]:
    """Which layers each task's final drift comes from."""
    return [f"{origin_sentence(entry)}." for entry in facts.origins(run)]


def decision_sentences(run: DriftRun) -> list[str]:
    """How many decisions of each variant flip, and how many its margins protect."""
    return [
        sentence
        for variant in run.variants
        if variant != "base"
        for sentence in decisions(run.outputs(variant=variant), title(variant))
    ]


def cosine_sentences(run: DriftRun) -> Iterator[str]:
    """The mean cosine of each variant and the task where it is lowest."""
    final = [entry for entry in facts.final_drift(run) if facts.is_measured(entry.cosine)]
    for variant in run.variants:
        own = [entry for entry in final if entry.variant == variant]
        if own:
            mean, lowest = (
                sum(entry.cosine for entry in own) / len(own),
                min(own, key=lambda entry: entry.cosine),
            )
            yield (
                f"{title(variant)}: mean cosine {number(mean)} over {len(own)} "
                f"task{'s' if len(own) > 1 else ''}, lowest on {lowest.task} ({number(lowest.cosine)})."
            )


def accuracy_table(run: DriftRun) -> Table:
    """Accuracy of every variant on every task, with its interval."""
    rows = run.accuracy()
    return table(
        "accuracy",
        "Accuracy on test samples",
        {
            "task": "text",
            "model": "text",
            "metric": "text",
            "value": "share",
            "95 % low": "share",
            "95 % high": "share",
            "samples": "count",
        },
        [
            (task, title(variant), *values)
            for task, variant, *values in zip(
                *(rows[name] for name in ("task", "variant", "metric", "value", "ci_low", "ci_high", "n")),
                strict=True,
            )
        ],
        note="Wilson intervals. Each expert is scored on its own task.",
    )
