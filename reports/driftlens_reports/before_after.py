"""A calibration's table in plain text: merged, anchor alone, calibrated and expert, task by task."""

from __future__ import annotations

import math

import pandas as pd

from driftlens.records.before_after import Outcome, credit_sentences, outcomes
from driftlens.records.run import DriftRun
from driftlens.records.selection import selection_sentences
from driftlens.records.variants import title
from driftlens_reports.columns import aligned, printable
from driftlens_reports.wording import number, percent

_HEADER = ("task", "model", "L2 drift", "relative", "cosine", "accuracy", "95 % interval")


def before_after(run: DriftRun, name: str) -> pd.DataFrame:
    """The numbers of a calibration's table, one row per task and model, for showing and downloading.

    Columns: task, variant, model (what a reader calls the variant), drift (mean norm of the final drift), relative,
    cosine, accuracy, low, high, n. The expert has an accuracy only; what was not measured is NaN.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    rows = pd.DataFrame(outcomes(run, name), columns=[*Outcome.__dataclass_fields__])
    rows.insert(2, "model", rows["variant"].map(title))
    return rows


def before_after_text(run: DriftRun, name: str) -> str:
    """The table; below it how much of the gain is calibration and how much rescaling, and how settings were chosen.

    Raises:
        DataError: the run has no finished calibration of that name.
        RunError: a table can't be read.
    """
    found = outcomes(run, name)
    rows = [list(_HEADER)]
    for at, entry in enumerate(found):
        is_first = at == 0 or found[at - 1].task != entry.task
        rows.append([entry.task if is_first else "", title(entry.variant), *_cells(entry)])
    said = [*credit_sentences(run, name), *selection_sentences(run, name)]
    lines = [*aligned(rows, num_names=2), "", *map(printable, said)]
    return "\n".join(lines)


def _cells(entry: Outcome) -> list[str]:
    if entry.variant == "expert":  # its drift is zero by definition
        features = ["", "", ""]
    else:
        features = [number(entry.drift), number(entry.relative), number(entry.cosine)]
    known = not math.isnan(entry.accuracy) and not math.isnan(entry.low)
    interval = f"{100 * entry.low:.1f} to {100 * entry.high:.1f} %" if known else ""
    return [*features, percent(entry.accuracy), interval]
