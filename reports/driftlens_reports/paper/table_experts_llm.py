"""Every domain expert of a merged language model by itself."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, exhibit
from driftlens_reports.paper.models import model_table


@exhibit("experts-llm", kind="table", title="Single experts of merged language models", paper="Table 14")
def experts_llm(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """MergeBench scores of base and single experts; the last line of a model is the best of each column."""
    # Runs score an expert on its own task alone, so none can fill the columns of other domains.
    return model_table(
        "experts-llm",
        (),
        options,
        label="tab:mergebench-expert-results",
        kind="language",
        caption=(
            "Single experts on MergeBench (%): HumanEval+ and MBPP+ report pass@1. Fine-tuned (STL) is the best of "
            "base and single experts, column by column."
        ),
        needed=(
            "a run scores each expert on its own task; scores of each expert on every domain come with "
            "evaluations of language models."
        ),
    )
