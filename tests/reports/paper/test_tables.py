"""Tables say what the runs' rows say."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pandas as pd
import pytest

from driftlens.results.checks import run_self_checks
from driftlens.results.measures import main_metrics, variant_score
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.intervals import mean_over_tasks
from driftlens_reports.paper.exhibit import ExhibitOptions, ExhibitResult, draw_exhibit, exhibits
from driftlens_reports.paper.latex_tables import AVERAGE, GAIN
from tests.reports.paper.drawn import rows_of
from tests.reports.paper.saved_runs import SMALL, scores_run, table_run
from tests.runs.full_run import VARIANTS, write_full_run

TABLES = [name for name, entry in exhibits.items() if entry.kind == "table"]
ALL_MODELS = ("expert", *VARIANTS)

# Tasks by the names that tables show.
NAMES = {"Cars": "cars", "MNIST": "mnist", "DTD": "dtd"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table-runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> DriftRun:
    return table_run(folder / "toy")


def drawn(name: str, *runs: DriftRun, **options: object) -> ExhibitResult:
    return draw_exhibit(name, runs, ExhibitOptions(**options))  # type: ignore[arg-type]


def score(run: DriftRun, task: str, variant: str) -> float:
    return 100 * float(run.accuracy(task, variant)["value"].item())


def test_the_tables_of_the_paper_are_there() -> None:
    assert set(TABLES) == {"accuracy", "runtime", "self-checks"}


def test_accuracies_are_the_runs_rows(run: DriftRun) -> None:
    rows = drawn("accuracy", run).data
    tasks = rows[~rows["column"].isin([AVERAGE, GAIN])]
    assert len(tasks) == len(run.accuracy())
    for row in tasks.to_dict("records"):
        own = run.accuracy(NAMES[row["column"]], row["variant"]).iloc[0]
        shown = (row["value"], row["n"], row["ci_low"], row["ci_high"])
        assert shown == (100 * own["value"], own["n"], 100 * own["ci_low"], 100 * own["ci_high"])


def test_averages_and_gains_are_taken_from_unrounded_rows(run: DriftRun) -> None:
    rows = drawn("accuracy", run).data.set_index(["variant", "column"])
    for variant in ALL_MODELS:
        mean = statistics.fmean(score(run, task, variant) for task in run.tasks)
        assert rows.loc[(variant, AVERAGE), "value"] == pytest.approx(mean, rel=1e-12)
        metrics = main_metrics(run)
        found = mean_over_tasks([variant_score(run, task, variant, metrics[task]) for task in run.tasks])
        assert rows.loc[(variant, AVERAGE), "ci_low"] == 100 * found.low
    for variant in ("baseline:featcal-anchor", "calibrated:featcal"):
        gains = [score(run, task, variant) - score(run, task, "merged") for task in run.tasks]
        row = rows.loc[(variant, GAIN)]
        assert row["value"] == pytest.approx(statistics.fmean(gains))
        assert row["ci_low"] < row["value"] < row["ci_high"]
    assert not {(variant, GAIN) for variant in ("base", "expert", "merged")} & set(rows.index)


def test_the_latex_shows_the_numbers_of_the_data_with_their_intervals(run: DriftRun) -> None:
    shown = drawn("accuracy", run)
    rows = {row[0]: row[1:] for row in rows_of(shown.latex or "")}
    for label, line in shown.data.groupby("row", sort=False):
        cells = rows[str(label)]
        for cell, (_, number) in zip(cells, line.iterrows(), strict=False):
            half = max(number["value"] - number["ci_low"], number["ci_high"] - number["value"])
            assert cell == f"{'+' if number['column'] == GAIN else ''}{number['value']:.1f} ± {half:.1f}"


def test_an_average_is_over_the_tasks_shown(run: DriftRun) -> None:
    shown = drawn("accuracy", run, tasks=("dtd", "cars")).data
    assert list(dict.fromkeys(shown["column"])) == ["Cars", "DTD", AVERAGE, GAIN]
    average = shown[(shown["variant"] == "merged") & (shown["column"] == AVERAGE)]["value"].item()
    assert average == pytest.approx(statistics.fmean(score(run, at, "merged") for at in ("cars", "dtd")))


def test_runs_are_told_apart(folder: Path) -> None:
    first, second = (
        scores_run(folder / method, name=method, method=method) for method in ("average", "task_arithmetic")
    )
    rows = drawn("accuracy", first, second).data
    assert set(rows["run"]) == {first.id, second.id} and set(rows["part"]) == {1}
    merged = rows[rows["variant"] == "merged"]
    assert set(merged["row"]) == {"merged (task arithmetic)", "merged (average)"}
    assert set(merged["block"]) == {"average", "task_arithmetic"}


def test_runs_of_other_tasks_have_a_table_of_their_own(folder: Path, run: DriftRun) -> None:
    single = scores_run(folder / "single", tasks=("cars",))
    shown = drawn("accuracy", run, single)
    assert set(shown.data["part"]) == {1, 2}
    assert r"\label{tab:drift-accuracy-2}" in (shown.latex or "")
    rows = shown.data[shown.data["run"] == single.id].pivot(index="variant", columns="column", values="value")
    assert (rows["Cars"] == rows[AVERAGE]).all()


def test_without_a_calibration_there_is_no_calibrated_row(folder: Path) -> None:
    plain = scores_run(folder / "plain", variants=("base", "merged"))
    assert set(drawn("accuracy", plain).data["variant"]) == {"base", "expert", "merged"}
    shown = drawn("runtime", plain)
    assert shown.missing and shown.data.empty and "tabular" not in (shown.latex or "")


def test_without_labels_nothing_is_measured_and_the_command_is_named(folder: Path) -> None:
    blind = open_run(write_full_run(folder / "blind", size=SMALL, has_labels=False))
    shown = drawn("accuracy", blind)
    assert shown.data.empty and "driftlens analyze" in shown.missing[0].missing
    assert r"\texttt{driftlens analyze RUN}" in (shown.latex or "")


def test_runtime_is_the_calibrations_own(run: DriftRun) -> None:
    rows = drawn("runtime", run).data.set_index("column")["value"]
    assert rows.to_dict() == {"Speed-up": 1.0, "Time (s)": 12.5, "Energy (Wh)": 1.25, "Memory (GiB)": 3.0}


def test_self_checks_are_told_as_they_are(run: DriftRun) -> None:
    shown = drawn("self-checks", run)
    rows, absent = shown.data.set_index(["row", "column"]), []
    for check in run_self_checks(run).results:
        assert rows.loc[(check.metric, "Limit"), "value"] == check.threshold
        if check.where:
            assert rows.loc[(check.metric, "Largest error"), "value"] == check.value
            assert rows.loc[(check.metric, "Holds"), "text"] == ("yes" if check.status == "pass" else "NO")
        else:
            absent.append(check.metric)
            assert math.isnan(rows.loc[(check.metric, "Largest error"), "value"])
            assert rows.loc[(check.metric, "Holds"), "text"] == "not measured"
    assert all(name in gap.name for gap in shown.missing for name in absent)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_runs_or_says_what_fills_it(name: str, run: DriftRun) -> None:
    shown = drawn(name, run)
    assert (run.id in shown.text) == (not shown.data.empty)
    assert not shown.data.empty or shown.missing
    for part in shown.missing:
        assert part.missing in shown.text
    assert f"\\label{{tab:drift-{name}}}" in (shown.latex or "")
    pd.testing.assert_frame_equal(shown.data, drawn(name, run).data)
