"""Sentences against the tables they are made from."""

from __future__ import annotations

import pandas as pd

from driftlens.base.intervals import wilson
from driftlens.runs.run import DriftRun
from driftlens_reports.facts import decisions


def test_decisions_add_up() -> None:
    frame = pd.DataFrame(
        {
            "flipped": [True, False, False, False],
            "certified": [False, True, False, False],
            "score_drift_l2": [1.0, 1.0, 1.0, 1.0],
            "score_bound": [2.0, 4.0, 4.0, 8.0],
        }
    )
    (text,) = decisions(frame, "merged")
    low, high = (100 * end for end in wilson(1, 4))
    assert f"25.0 % ({low:.1f} to {high:.1f} %) of 4 decisions differ" in text
    assert (
        f"25.0 % ({low:.1f} to {high:.1f} %) are certified by their margin, 50.0 % are kept without" in text
    )
    assert "25.0 % of its bound (median)" in text


def test_certificates_that_were_not_computed_are_left_out(run: DriftRun) -> None:
    (text,) = decisions(run.outputs(variant="merged"), "merged")
    assert "certified" not in text and "not measured" not in text
