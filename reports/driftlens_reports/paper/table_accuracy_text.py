"""Scores of text-to-text models on GLUE tasks."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, exhibit
from driftlens_reports.paper.models import model_table


@exhibit("accuracy-text", kind="table", title="Scores of text-to-text models", paper="Table 3")
def accuracy_text(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Exact match by task, Spearman's rank correlation for STS-B; a block per model."""
    return model_table(
        "accuracy-text",
        runs,
        options,
        label="tab:flan-t5-results",
        kind="text",
        caption="FLAN-T5 on GLUE: exact match (%), for STS-B Spearman's rank correlation (times 100).",
        needed="runs of FLAN-T5 models fill them, which DriftLens can't load yet.",
        metrics=[("STS-B", "STS-B (Spearman)")],
    )
