"""The frame of findings against the tables it is made from, and the sentence on how its changes were taken."""

from __future__ import annotations

import pathlib

import pandas as pd
import pytest

import driftlens as dl
from driftlens.base.intervals import Interval, mean_over_tasks
from driftlens.findings.compare import compare
from driftlens.findings.frame import pairing
from tests.records.full_run import Size, write_full_run
from tests.records.scored_run import write_scored_run

KEY = ["measure", "task", "variant", "against"]
AFTER = "calibrated:featcal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_full_run(tmp_path_factory.mktemp("findings") / "run", size=Size(blocks=1, samples=8))


@pytest.fixture(scope="module")
def frame(folder: pathlib.Path) -> pd.DataFrame:
    return dl.open_run(folder).findings().set_index(KEY)


def test_rows_are_the_numbers_of_the_tables(folder: pathlib.Path, frame: pd.DataFrame) -> None:
    run = dl.open_run(folder)
    assert frame.index.is_unique and frame["value"].notna().all()
    columns = {"drift": "drift_l2_mean", "relative": "drift_rel", "cosine": "cos_mean"}
    for row in run.layers(layer="final").to_dict("records"):
        for measure, column in columns.items():
            found = frame.loc[(measure, row["task"], row["variant"], "")]
            assert found["value"] == row[column] and found["n"] == row["n"]
    for row in run.accuracy().to_dict("records"):
        found = frame.loc[("accuracy", row["task"], row["variant"], "")]
        assert found[["value", "low", "high", "n"]].tolist() == [
            *(row["value"], row["ci_low"], row["ci_high"], row["n"])
        ]
    flipped = run.outputs("cars", AFTER)["flipped"].astype(bool)
    assert frame.loc[("flips", "cars", AFTER, ""), "value"] == flipped.mean()


def test_changes_are_those_of_a_comparison_and_means_are_over_the_tasks(
    folder: pathlib.Path, frame: pd.DataFrame
) -> None:
    for row in compare(folder, before="merged", after=AFTER).tasks.to_dict("records"):
        at = (row["task"], AFTER, "merged")
        score, drift = frame.loc[("accuracy", *at)], frame.loc[("drift_change", *at)]
        assert score[["value", "low", "high"]].tolist() == [
            *(row["score_change"], row["score_ci_low"], row["score_ci_high"])
        ]
        assert score["paired"] == row["score_paired"] and drift["paired"] == row["drift_paired"]
        assert (drift["low"], drift["high"]) == (row["drift_relative_ci_low"], row["drift_relative_ci_high"])
    changes = frame.xs((AFTER, "merged"), level=("variant", "against")).loc["accuracy"]
    over, by_task = changes.loc[""], changes.drop("")
    expected = mean_over_tasks([Interval(*ends) for ends in by_task[["value", "low", "high"]].to_numpy()])
    assert (over["low"], over["high"]) == (expected.low, expected.high)
    assert over["value"] == pytest.approx(expected.value) and over["n"] == by_task["n"].sum()
    assert frame["paired"].isna().eq(frame.index.get_level_values("against") == "").all()


def test_only_like_scores_have_a_mean(tmp_path: pathlib.Path) -> None:
    write_scored_run(tmp_path / "run")
    rows = dl.open_run(tmp_path / "run").findings()
    means = rows[(rows["task"] == "") & (rows["against"] == "")].set_index(["measure", "variant"])
    assert {"score", "perplexity"} <= set(means.index.levels[0]) and "spearman" not in means.index.levels[0]
    assert means.loc[("perplexity", "merged"), "worse"] == "higher"


@pytest.mark.parametrize(
    ("paired", "words"),
    [
        ({}, ""),
        ({"a": True, "b": True}, "paired by sample."),
        ({"a": True, "b": False}, "of changes of b are not paired"),
        ({"a": False}, "of changes are not paired"),
    ],
)
def test_an_interval_is_called_paired_only_where_all_are(paired: dict[str, bool], words: str) -> None:
    assert words in pairing(paired) and ("not paired" in words) == ("--again" in pairing(paired))
