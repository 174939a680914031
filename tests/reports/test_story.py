"""Sentences against the tables they are made from."""

from __future__ import annotations

import pandas as pd
import pytest

from driftlens.records.intervals import wilson
from driftlens.records.run import DriftRun
from driftlens_reports.facts import decisions
from driftlens_reports.terminal import story


def test_the_task_that_suffers_most_is_named_with_its_numbers(run: DriftRun) -> None:
    relative = {task: run.value("drift_rel", task=task) for task in run.tasks}
    worst = max(relative, key=lambda task: relative[task])
    first = next(text for text in story(run) if text.startswith("merged:"))
    assert f"{worst} suffers most" in first and f"{relative[worst]:#.4g}" in first
    mean = sum(relative.values()) / len(relative)
    assert f"Mean over {len(relative)} tasks: {mean:#.4g}" in first


def test_the_layer_to_blame_is_the_one_with_the_largest_share(run: DriftRun) -> None:
    rows = run.layers(task="cars", variant="merged").set_index("layer")
    worst = int(rows["final_share"].idxmax())
    text = next(text for text in story(run) if text.startswith("merged, cars:"))
    assert f"layer {worst} ({rows.loc[worst, 'path']})" in text
    assert f"accounts for {100 * rows.loc[worst, 'final_share']:.1f} %" in text
    assert f"adds {rows.loc[worst, 'mismatch_l2_mean']:#.4g} itself" in text
    assert f"of the {rows.loc[worst - 1, 'drift_l2_mean']:#.4g} it inherits" in text


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
    text = next(text for text in story(run) if "decisions" in text)
    assert "certified" not in text and "not measured" not in text


def test_without_shares_nobody_is_blamed(bare: DriftRun) -> None:
    assert not any("accounts for" in text for text in story(bare))
    assert pytest.approx(1) == sum("suffers most" in text for text in story(bare)) / max(
        1, len(bare.variants) - 1
    )
