"""Metrics other than accuracy: values against scipy, intervals against plain loops, and what readers make of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import driftlens as dl
from driftlens.results.calibration_summary import (
    before_after_rows,
    calibration_effect_tables,
    score_changes,
)
from driftlens.results.compare import compare, comparison_table
from driftlens.results.measures import (
    bootstrap_change,
    common_measures,
    main_metrics,
    mean_change,
    mean_on_tasks,
    metric_interval,
    pairing_note,
)
from driftlens.runs.run import DriftRun
from driftlens.utils.intervals import RESAMPLES, Interval, mcnemar_test, mean_over_tasks
from driftlens.utils.variants import METRICS, metric_by_name
from driftlens_reports import facts
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit
from driftlens_reports.sections import report_verdict
from driftlens_reports.terminal import run_comparison_text, run_summary_text
from tests.runs.full_run import Size, write_full_run
from tests.runs.scored_run import NAME, TASKS, VARIANT, results_of, write_scored_run


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return write_scored_run(tmp_path_factory.mktemp("runs") / "run")


def test_correlations_are_scipys_ties_included_and_their_intervals_those_of_a_loop() -> None:
    drawn = np.random.default_rng(5)
    wanted = np.round(drawn.uniform(0, 5, 40) * 2) / 2
    found = np.round(wanted + drawn.normal(size=40))
    at = metric_interval(METRICS["spearman"], found, wanted)
    assert at.value == pytest.approx(stats.spearmanr(found, wanted).statistic, abs=1e-12) and at.n == 40
    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), size=RESAMPLES)
    again = [np.repeat(np.arange(40), row) for row in counts[:400]]
    loop = [stats.spearmanr(found[rows], wanted[rows]).statistic for rows in again]
    assert (at.low, at.high) == pytest.approx(np.quantile(loop, (0.025, 0.975)), abs=0.03)
    other = found[::-1].copy()
    change = bootstrap_change(METRICS["spearman"], other, found, wanted)
    assert change.value == pytest.approx(at.value - stats.spearmanr(other, wanted).statistic)
    assert change.low < change.value < change.high
    alike = metric_interval(METRICS["spearman"], np.zeros(40), wanted)
    assert alike.value == 0 and math.isnan(alike.low)


def test_perplexity_weighs_tokens_and_a_single_sample_has_no_interval() -> None:
    nats, tokens = np.array([2.0, 9.0, 1.0]), np.array([1.0, 4.0, 2.0])
    at = metric_interval(METRICS["perplexity"], nats, tokens)
    assert at.value == pytest.approx(math.exp(12 / 7)) and 1 < at.low < at.value < at.high
    assert math.isnan(metric_interval(METRICS["perplexity"], nats[:1], tokens[:1]).low)


def test_every_task_is_judged_by_its_own_metric(scored: DriftRun) -> None:
    assert {task: metric.name for task, metric in main_metrics(scored).items()} == dict(TASKS)
    rows = before_after_rows(scored, NAME).set_index(["task", "variant"])
    assert rows["accuracy"].isna().all()
    for task, metric in TASKS.items():
        row = scored.accuracy(task, "merged").iloc[0]
        assert rows.loc[(task, "merged"), ["metric", "score"]].tolist() == [metric, row["value"]]


def test_changes_are_paired_by_the_single_results(scored: DriftRun) -> None:
    changes = {entry.task: entry for entry in score_changes(scored, NAME)}
    for task, name in TASKS.items():
        (before, references), (after, _) = (results_of(name, variant, 60) for variant in ("merged", VARIANT))
        at = changes[task]
        assert at.paired and at.about.name == name and at.n == 60
        if metric_by_name(name).kind == "share":
            assert at.answers == mcnemar_test(before == 1, after == 1) and at.answered == "test"
        else:
            found = bootstrap_change(METRICS[name], before, after, references)
            assert (at.value, at.low, at.high) == (found.value, found.low, found.high) and at.answers is None
    rows = compare(scored).tasks.set_index("task")
    assert rows["metric"].to_dict() == dict(TASKS)
    assert rows.loc["similar", "score_ci_low"] == changes["similar"].low
    assert math.isnan(rows.loc["similar", "paired_change"]) and rows.loc["match", "paired_split"] == "test"


def test_only_like_metrics_are_averaged(scored: DriftRun) -> None:
    found = {about.name: (about, tasks) for about, tasks in common_measures(scored, ["merged", VARIANT])}
    (score, tasks), (perplexity, others) = found["score"], found["perplexity"]
    assert tasks == ("match", "pick", "similar") and others == ("words",)
    wanted = np.mean([scored.accuracy(task, "merged")["value"].iloc[0] for task in tasks])
    assert mean_on_tasks(scored, score, tasks, "merged").value == pytest.approx(wanted)
    assert perplexity.worse == "higher"
    assert mean_change(scored, perplexity, others, ("merged", VARIANT)).value < 0
    changes = {change.measure: change for change in report_verdict(scored).changes}
    assert changes["perplexity"].worse == "higher"
    assert changes["score (exact match, choice accuracy, Spearman correlation)"].num_tasks == 3


def test_readers_see_names_ranges_and_directions(scored: DriftRun) -> None:
    text = run_summary_text(scored, verbose=True)
    assert "Scores on test samples" in text and "Accuracy" not in text
    assert "Rank correlation" in text and "-1 to 1, higher is better." in text
    assert "at least 1, lower is better." in text.lower() and "words " in text
    assert "perplexity" in run_comparison_text(compare(scored))
    sheets = {sheet.name: sheet for sheet in calibration_effect_tables(scored, NAME)}
    assert sheets[f"scores-{NAME}"].column_formats["score"] == "number" and f"accuracies-{NAME}" not in sheets
    assert [row[1] for row in sheets[f"score-change-{NAME}"].rows] == list(TASKS.values())


@pytest.mark.slow
def test_charts_exhibits_and_reports_show_what_the_run_has(scored: DriftRun) -> None:
    bounded = charts["accuracy"].render(scored, ChartOptions())
    assert set(bounded.data["task"]) == {"match", "pick", "similar", "mean of tasks"} and "score" in bounded.data
    found = {table.name: table for table in Report(scored, "calibration").content.tables}
    assert {f"scores-{NAME}", f"score-change-{NAME}"} <= set(found)
    shown = facts.accuracy_table(scored)
    assert "lower is better" in shown.note and shown.title == "Scores on test samples"
    rows = draw_exhibit("accuracy", [scored], ExhibitOptions()).data
    columns = set(rows["column"])
    assert "Similar (Spearman correlation)" in columns and "words" not in " ".join(columns).lower()
    changes = compare(scored).tasks
    heads, *rows = comparison_table(changes).formatted_rows()
    (words,) = [row for row in rows if row[0] == "words"]
    assert words[1] == "perplexity" and heads[-2] == "change of score" and words[-2].startswith("-")


KEY = ["measure", "task", "variant", "against"]
AFTER = "calibrated:featcal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_run(tmp_path_factory.mktemp("findings") / "run", size=Size(blocks=1, samples=8))


@pytest.fixture(scope="module")
def frame(folder: Path) -> pd.DataFrame:
    return dl.open_run(folder).findings().set_index(KEY)


def test_rows_are_the_numbers_of_the_tables(folder: Path, frame: pd.DataFrame) -> None:
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


def test_changes_are_those_of_a_comparison_and_means_are_over_the_tasks(folder: Path, frame: pd.DataFrame) -> None:
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


@pytest.mark.slow
def test_only_like_scores_have_a_mean(tmp_path: Path) -> None:
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
    assert words in pairing_note(paired) and ("not paired" in words) == ("rerun the analysis" in pairing_note(paired))
