"""The change of accuracy by a calibration: which samples it and its interval rest on, in every text."""

from __future__ import annotations

import pathlib
import re

import pandas as pd
import pytest
from scipy import stats

from driftlens.base.intervals import Interval, mcnemar, mean_over_tasks, p_of, unpaired_difference
from driftlens.findings import features, measures
from driftlens.findings.before_after import final_drift_changes, score_change_note, score_changes
from driftlens.findings.compare import compare, mean_score_change
from driftlens.findings.measures import SCORE, change
from driftlens.findings.reading import p_value, points, points_interval
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.build import Report
from driftlens_reports.terminal import before_after_text, comparison_text
from tests.records.full_run import Size, write_full_run

NAME, VARIANT = "featcal", "calibrated:featcal"


def run_of(folder: pathlib.Path, *, tests: int = 400, has_labels: bool = True) -> DriftRun:
    size = Size(blocks=1, samples=24, tests=tests)
    return open_run(write_full_run(folder, tasks=("cars", "dtd"), size=size, has_labels=has_labels))


def test_without_answers_of_all_test_samples_the_interval_is_of_the_counts(tmp_path: pathlib.Path) -> None:
    run = run_of(tmp_path / "run")
    for entry in score_changes(run, NAME):
        before, after = (
            run.accuracy(entry.task, variant)["value"].iloc[0] for variant in ("merged", VARIANT)
        )
        assert entry.value == after - before and entry.n == 400 and not entry.paired
        counts = (round(before * 400), 400, round(after * 400), 400)
        assert (entry.low, entry.high) == unpaired_difference(*counts)
        assert entry.answered == "diagnosis" and entry.answers is not None and entry.answers.n == 24
    text = before_after_text(run, NAME, verbose=True)
    assert (
        re.search(r" diagnosis +24 ", text)
        and "wider than they need be" in text
        and "on the diagnosis samples" in text
    )


def test_answers_of_the_test_samples_themselves_pair_the_interval(tmp_path: pathlib.Path) -> None:
    run = run_of(tmp_path / "run", tests=24)  # the diagnosis samples are then the test samples
    for entry in score_changes(run, NAME):
        right = [
            rows["pred"] == rows["label"]
            for rows in (run.outputs(entry.task, v) for v in ("merged", VARIANT))
        ]
        found = mcnemar(*(answers.to_numpy(dtype=bool) for answers in right))
        assert entry.paired and entry.answered == "test" and entry.answers == found
        assert (entry.value, entry.low, entry.high) == (found.difference, found.ci_low, found.ci_high)
    text = before_after_text(run, NAME, verbose=True)
    assert re.search(r" test +24 ", text) and "wider than" not in text and "paired by sample" in text


def test_stored_predictions_of_the_test_samples_pair_the_interval(tmp_path: pathlib.Path) -> None:
    run_of(tmp_path / "run")
    right = {"merged": [1.0] * 200 + [0.0] * 200, VARIANT: [1.0] * 230 + [0.0] * 170, "expert": [1.0] * 400}
    with RunWriter.resume(tmp_path / "run") as writer:
        for variant, values in right.items():
            key = {"task": "cars", "variant": variant, "metric": "accuracy"}
            rows = [{**key, "sample_id": f"test/{at}", "value": value} for at, value in enumerate(values)]
            writer.append("scores", pd.DataFrame(rows))
            writer.append(
                "accuracy", pd.DataFrame([{**key, "value": sum(values) / 400, "n": 400}]), replace=True
            )
    run = open_run(tmp_path / "run")
    paired, unpaired = score_changes(run, NAME)
    assert paired.paired and paired.answered == "test" and paired.value == 30 / 400 and paired.n == 400
    assert paired.answers is not None and (paired.answers.gained, paired.answers.lost) == (30, 0)
    low, high = unpaired_difference(200, 400, 230, 400)
    assert low < paired.low < paired.high < high and not unpaired.paired
    against_expert = change(run, SCORE, "cars", (VARIANT, "expert"))
    assert against_expert.paired and against_expert.value == 170 / 400
    assert "--again" in score_change_note([paired, unpaired]) and "--again" not in score_change_note([paired])
    text = before_after_text(run, NAME, verbose=True)
    assert re.search(r"cars +test +400 .* < \.001", text) and "0.0000" not in text
    rows = {row["task"]: row for row in compare(run).tasks.to_dict("records")}
    assert (rows["cars"]["score_ci_low"], rows["cars"]["score_ci_high"]) == (paired.low, paired.high)
    assert rows["cars"]["score_paired"] and not rows["dtd"]["score_paired"]
    said = comparison_text(compare(run))
    assert "McNemar p < .001" in said and "of dtd are not paired" in said
    mean = mean_score_change(compare(run).tasks)
    assert mean == mean_over_tasks([Interval(e.value, e.low, e.high) for e in (paired, unpaired)])
    told = f"{points(mean.value)} ({points_interval(mean.low, mean.high)}), p {p_value(p_of(mean))}"
    assert f"mean change over 2 tasks: {told}" in said


def test_the_report_tells_the_same_numbers(tmp_path: pathlib.Path) -> None:
    run = run_of(tmp_path / "run")
    tables = {table.name: table for table in Report(run, "calibration").content.tables}
    found = tables[f"accuracy-change-{NAME}"]
    entries = score_changes(run, NAME)
    assert list(found.rows) == [(e.task, e.value, e.low, e.high, e.n) for e in entries]
    assert score_change_note(entries) in found.note
    answers = [entry.answers for entry in entries if entry.answers is not None]
    *rows, last = tables[f"answers-changed-{NAME}"].rows
    assert [row[1:] for row in rows] == [
        ("diagnosis", 24, at.gained, at.lost, at.difference, at.ci_low, at.ci_high, at.p_value)
        for at in answers
    ]
    mean = mean_over_tasks([Interval(at.difference, at.ci_low, at.ci_high, at.n) for at in answers])
    sums = sum(at.gained for at in answers), sum(at.lost for at in answers)
    assert last == (
        f"mean of {len(answers)}",
        "diagnosis",
        24 * len(answers),
        *sums,
        mean.value,
        mean.low,
        mean.high,
        p_of(mean),
    )
    drifts = tables[f"before-after-{NAME}"]
    at = [column.name for column in drifts.columns].index("L2 drift +-")
    final = run.layers("cars", "merged", "final").iloc[0]
    freedom = int(final["n"]) - 1
    assert drifts.rows[0][at] == pytest.approx(
        stats.t.ppf(0.975, freedom) * final["drift_l2_std"] / freedom**0.5
    )
    changes = final_drift_changes(run, NAME)
    assert list(tables[f"drift-change-{NAME}"].rows) == [
        (
            *(drift.task, drift.value, drift.low, drift.high),
            *(relative.value, relative.low, relative.high, drift.n),
        )
        for drift, relative in changes
    ]
    assert all(drift.paired for drift, _ in changes) and [row.task for row, _ in changes] == list(run.tasks)
    for _, relative in changes:
        assert f"{100 * relative.value:+.1f} %" in before_after_text(run, NAME, verbose=True)


def test_a_report_works_every_change_out_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for module, name in ((features, "drift_changes"), (measures, "changed_score")):

        def counted(*given: object, work: object = getattr(module, name), **more: object) -> object:
            asked.append((work, *given[2:], *more.items()))
            return work(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    run = run_of(tmp_path / "run")
    Report(run).content  # noqa: B018 -- asks for everything
    # Drift, cosine, and answers of every pair of base, expert, merged and calibrated, and of the anchor alone.
    assert len(asked) == len(set(asked)) == (2 + 7) * len(run.tasks)


def test_without_labels_nothing_is_said_about_accuracy(tmp_path: pathlib.Path) -> None:
    run = run_of(tmp_path / "run", has_labels=False)
    assert score_changes(run, NAME) == [] and "ccuracy" not in before_after_text(run, NAME, verbose=True)
    names = [table.name for table in Report(run, "calibration").content.tables]
    assert f"before-after-{NAME}" in names and f"accuracy-change-{NAME}" not in names
    assert f"answers-changed-{NAME}" not in names


def test_a_change_too_small_to_show_has_no_minus() -> None:
    assert (points(-0.0001), points(-0.012), points(float("nan"))) == ("+0.0", "-1.2", "")
