"""What became of every sample: whether expert, merged and repaired model answer it rightly, in one word.

Answers are those that the run stored: decisions on labelled diagnosis samples, or single results of test samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from driftlens.base.metrics import ACCURACY
from driftlens.findings.measures import main_metrics, right_answers
from driftlens.runs.run import DriftRun, remembered

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "still wrong": "The merge broke it, and the repair left it so.",
        "wrong": "The merge broke it: the expert is right, the merged model wrong.",
        "broken": "The repair broke it: expert and merged model are right, the repaired one is wrong.",
        "repaired": "The merge broke it, the repair mended it.",
        "right": "All models are right.",
        "expert wrong": "The expert itself is wrong, so that nearness to it is no gain.",
    }
)
"""Every outcome with what it says, those to look at first; "wrong" only without a repair."""
BROKEN_BY_MERGE = ("still wrong", "wrong", "repaired")
"""Outcomes of samples that the expert answers rightly and the merged model doesn't."""


@remembered
def outcomes(run: DriftRun, task: str, merged: str = "merged", repaired: str = "") -> pd.DataFrame:
    """A row per sample of a task that was answered by expert, `merged` and, where one is named, the variant `repaired`.

    Indexed by sample_id; columns: expert, merged, repaired (whether the answer is right; `repaired` only where one is
    named) and outcome, one of `OUTCOMES`. Empty where right answers aren't known.
    """
    models = {"expert": "expert", "merged": merged} | ({"repaired": repaired} if repaired else {})
    metric = main_metrics(run).get(task, ACCURACY)
    for split in ("diagnosis", "test") if metric.kind == "share" else ("diagnosis",):
        columns = {name: right_answers(run, task, variant, metric, split) for name, variant in models.items()}
        rows = pd.DataFrame(columns, dtype=object).dropna().astype(bool).rename_axis("sample_id")
        if len(rows):
            break
    is_right = rows["repaired"] if repaired else rows["merged"]
    broken, mended = ("broken", "repaired") if repaired else ("wrong", "right")
    lost = "still wrong" if repaired else "wrong"
    after = np.where(rows["merged"], np.where(is_right, "right", broken), np.where(is_right, mended, lost))
    return rows.assign(outcome=np.where(rows["expert"], after, "expert wrong"))
