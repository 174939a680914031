"""Scores of language models merged from domain experts."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, exhibit
from driftlens_reports.paper.models import model_table


@exhibit("accuracy-llm", kind="table", title="Scores of language models by domain", paper="Table 4")
def accuracy_llm(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """MergeBench scores: base, the best single expert of each column, merged, calibrated; a block per model."""
    return model_table(
        "accuracy-llm",
        runs,
        options,
        label="tab:mergebench-llama-results",
        kind="language",
        caption=(
            "MergeBench (%): HumanEval+ and MBPP+ report pass@1, the others accuracy. Fine-tuned (STL) is the best "
            "of base and single experts, column by column."
        ),
        needed="runs of Llama models fill them, which DriftLens can't load yet.",
    )
