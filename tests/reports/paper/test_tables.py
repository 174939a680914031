"""Tables say what the runs' rows say, beside what the paper prints, and never mix the two."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pandas as pd
import pytest

from driftlens.findings.checks import self_checks
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, exhibits
from driftlens_reports.paper.grid import AVERAGE
from driftlens_reports.paper.published import published_tables
from tests.quick import few
from tests.records.full_run import VARIANTS, write_full_run
from tests.reports.paper.drawn import rows_of
from tests.reports.paper.saved_runs import EIGHT, GIB, SMALL, scores_run, table_run

TABLES = [name for name, entry in exhibits.items() if entry.kind == "table"]
MAIN = published_tables()["tab:clip-vit-b32-results"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("table-runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> DriftRun:
    return table_run(folder / "toy")


@pytest.fixture(scope="module")
def eight(folder: Path) -> DriftRun:
    return scores_run(
        folder / "eight", name="eight", tasks=EIGHT, source="openai/clip-vit-base-patch32", seed=1
    )


def drawn(name: str, *runs: DriftRun, **options: object) -> Exhibited:
    """A table with the paper's rows beside the measured ones, unless `options` say otherwise."""
    return exhibits[name].draw(runs, ExhibitOptions(**{"paper": True, **options}))  # type: ignore[arg-type]


def measured(shown: Exhibited) -> pd.DataFrame:
    return shown.data[shown.data["source"] == "measured"]


def score(run: DriftRun, task: str, variant: str) -> float:
    return 100 * float(run.accuracy(task, variant)["value"].item())


def test_accuracies_are_the_runs_rows(run: DriftRun) -> None:
    rows = measured(drawn("accuracy", run))
    tasks = rows[rows["column"] != AVERAGE]
    assert len(tasks) == len(run.accuracy())
    for row in tasks.to_dict("records"):
        own = run.accuracy(row["column"], row["variant"]).iloc[0]
        shown = (row["value"], row["n"], row["ci_low"], row["ci_high"])
        assert shown == (100 * own["value"], own["n"], 100 * own["ci_low"], 100 * own["ci_high"])


def test_averages_and_gains_are_taken_from_unrounded_rows(run: DriftRun) -> None:
    rows = measured(drawn("accuracy", run)).set_index(["variant", "column"])
    for variant in ("expert", *VARIANTS):
        mean = statistics.fmean(score(run, task, variant) for task in run.tasks)
        assert rows.loc[(variant, AVERAGE), "value"] == mean
    for variant in ("baseline:featcal-anchor", "calibrated:featcal"):
        for task in run.tasks:
            gain = score(run, task, variant) - score(run, task, "merged")
            assert rows.loc[(variant, task), "gain"] == gain
    assert rows.loc[["base", "expert", "merged"], "gain"].isna().all()


def test_the_latex_shows_the_numbers_of_the_data(run: DriftRun) -> None:
    shown = drawn("accuracy", run, digits=2)
    rows = {tuple(row) for row in rows_of(shown.latex or "")}
    assert shown.data["value"].notna().all()
    for (_, label, source), line in shown.data.groupby(["part", "row", "source"], sort=False):
        if line["column"].duplicated().any():
            continue  # the paper's rows of the same name, one per merger
        values = [f"{value:.2f}" for value in line["value"]]
        half = -(-len(values) // 2)  # where a grid is too wide for the page, the others stand below
        parts = {(label, source, *values[:half]), (label, source, *values[half:])}
        assert (label, source, *values) in rows or parts <= rows


def test_only_the_calibrated_rows_are_shaded_and_the_best_is_bold(run: DriftRun) -> None:
    latex = drawn("accuracy", run).latex or ""
    shaded = [line for line in latex.splitlines() if line.startswith(r"\driftown")]
    assert len(shaded) == 1 + 2 * 4, "the paper's eight tasks take two parts"
    assert all("w/ featcal &" in line or "w/ FeatCal &" in line for line in shaded)
    bold = [line for line in latex.splitlines() if r"\textbf" in line and "measured" in line]
    assert bold == [line for line in shaded if "measured" in line]


def test_an_average_is_over_the_tasks_shown(run: DriftRun) -> None:
    shown = measured(drawn("accuracy", run, tasks=["dtd", "cars"]))
    assert list(dict.fromkeys(shown["column"])) == ["cars", "dtd", AVERAGE]
    average = shown[(shown["variant"] == "merged") & (shown["column"] == AVERAGE)]["value"].item()
    assert average == statistics.fmean([score(run, "cars", "merged"), score(run, "dtd", "merged")])


def test_a_suite_of_the_paper_shares_its_columns_and_keeps_its_source(eight: DriftRun) -> None:
    shown = drawn("accuracy", eight)
    assert shown.data["part"].unique().tolist() == [1]
    assert set(shown.data["column"]) == set(MAIN.columns)
    for row in measured(shown).to_dict("records"):
        if row["column"] != AVERAGE:
            task = next(task for task in EIGHT if task == row["column"].lower())
            assert row["value"] == score(eight, task, row["variant"])
    printed = shown.data[shown.data["source"] == "paper"]
    expected = [value for row in MAIN.rows for value in row.values.values()]
    assert sorted(printed["value"]) == sorted(expected)
    assert (printed["run"] == "").all() and (printed["variant"] == "").all()


def test_measured_rows_stand_above_the_papers_block_of_the_same_merger(eight: DriftRun) -> None:
    labels = [row[:2] for row in rows_of(drawn("accuracy", eight).latex or "")]
    at = labels.index(["Task Arithmetic", "measured"])
    assert labels[at : at + 4] == [
        ["Task Arithmetic", "measured"],
        ["w/ featcal, anchor only", "measured"],
        ["w/ featcal", "measured"],
        ["Task Arithmetic", "paper"],
    ]


def test_another_backbone_or_fewer_experts_do_not_stand_beside_the_papers(folder: Path) -> None:
    large = scores_run(folder / "large", tasks=EIGHT, source="ViT-L-14")
    fewer = scores_run(folder / "fewer", tasks=EIGHT[:7], source="ViT-B-32")
    for other in (large, fewer):
        assert drawn("accuracy", other).data["part"].max() == 2
        assert drawn("accuracy-full-b32-14", other).missing
    assert not drawn("accuracy-full-l14-8", large).missing
    assert len(measured(drawn("accuracy-full-l14-8", large))) == (1 + len(VARIANTS)) * 9


def test_runs_are_told_apart_and_references_shared(folder: Path) -> None:
    first, second = (
        scores_run(folder / method, name=method, method=method) for method in ("average", "task_arithmetic")
    )
    rows = measured(drawn("accuracy", first, second))
    assert set(rows["run"]) == {first.id, second.id}
    assert set(rows.loc[rows["variant"] == "merged", "row"]) == {"Task Arithmetic", "Simple Averaging"}
    assert (rows[rows["variant"] == "base"]["column"].value_counts() == 1).all()
    assert set(rows.loc[rows["variant"] == "calibrated:featcal", "block"]) == {"average", "task_arithmetic"}


def test_without_a_calibration_there_is_no_calibrated_row(folder: Path) -> None:
    plain = scores_run(folder / "plain", variants=("base", "merged"))
    assert set(measured(drawn("accuracy", plain))["variant"]) == {"base", "expert", "merged"}
    for name in ("runtime", "hyper", "efficiency"):
        shown = drawn(name, plain)
        assert shown.missing and not len(measured(shown))


def test_without_labels_nothing_is_measured_and_the_command_is_named(folder: Path) -> None:
    blind = open_run(write_full_run(folder / "blind", size=SMALL, has_labels=False))
    for name in ("accuracy", "accuracy-avg", "experts"):
        shown = drawn(name, blind)
        assert not len(measured(shown)) and len(shown.data)
        assert "driftlens analyze" in shown.missing[0].missing
        assert r"\driftnote{Measured rows" in (shown.latex or "")


def test_one_task_is_its_own_average(folder: Path) -> None:
    single = scores_run(folder / "single", tasks=("cars",))
    rows = measured(drawn("accuracy", single)).pivot(index="variant", columns="column", values="value")
    assert (rows["cars"] == rows[AVERAGE]).all()


def test_averages_over_suites_stand_in_the_column_of_suite_and_backbone(
    eight: DriftRun, run: DriftRun, folder: Path
) -> None:
    large = scores_run(folder / "large-avg", name="large", tasks=EIGHT, source="ViT-L-14", seed=3)
    rows = measured(drawn("accuracy-avg", eight, run, large)).set_index(["variant", "column"])
    for shown, column in ((eight, "8 tasks, B/32"), (run, "3 tasks, toy run"), (large, "8 tasks, L/14")):
        for variant in ("merged", "calibrated:featcal"):
            mean = statistics.fmean(score(shown, task, variant) for task in shown.tasks)
            assert rows.loc[(variant, column), "value"] == mean
        gained = rows.loc[("calibrated:featcal", column), "value"] - rows.loc[("merged", column), "value"]
        assert rows.loc[("calibrated:featcal", column), "gain"] == gained


def test_two_runs_of_one_merger_never_share_a_column(folder: Path, run: DriftRun) -> None:
    twin = scores_run(folder / "twin", seed=9)
    rows = measured(drawn("accuracy-avg", run, twin))
    merged = rows[rows["variant"] == "merged"]
    assert len(merged) == 2 and merged["column"].nunique() == 2


def test_experts_cost_what_the_merged_model_loses(run: DriftRun) -> None:
    rows = measured(drawn("experts", run)).pivot(index="row", columns="column", values="value")
    for task in run.tasks:
        assert rows.loc[task, "Cost"] == score(run, task, "expert") - score(run, task, "merged")
        assert rows.loc[task, "n"] == 400
    assert rows.loc[AVERAGE, "Expert"] == statistics.fmean(score(run, task, "expert") for task in run.tasks)


def test_runtime_is_the_calibrations_own(run: DriftRun) -> None:
    rows = measured(drawn("runtime", run)).set_index("column")["value"]
    assert rows.to_dict() == {
        "Speedup": 1.0,
        "Time (s)": 12.5,
        "GPU energy (Wh)": 1.25,
        "CPU RSS (GiB)": 3.0,
    }


def test_resources_average_over_points_and_sum_over_phases(run: DriftRun) -> None:
    shown = measured(drawn("resources", run))
    average = shown[(shown["part"] == 1) & (shown["column"] == "Time (s)")]["value"].item()
    assert average == pytest.approx(3.2)  # 2.0 + point + 0.1 seed, over points 0, 1, 2 and seeds 1, 2, 3
    phases = shown[shown["part"] == 2].set_index(["row", "column"])["value"]
    assert phases["calibrate:featcal", "Time (s)"] == 14.0
    assert phases["calibrate:featcal", "CPU RSS (GiB)"] == 3 * GIB / GIB
    assert math.isnan(phases["evaluate", "GPU energy (Wh)"])


def test_phases_of_the_tasks_are_summed(folder: Path) -> None:
    made = scores_run(folder / "phases")
    phases = [f"{start}analyze:{task}" for start in ("", "calibrate:featcal:") for task in made.tasks]
    with RunWriter.resume(made.path) as writer:
        rows = {"phase": phases, "seconds": [1.0, 2.0, 4.0, 10.0, 20.0, 40.0]}
        writer.append("resources", pd.DataFrame(rows))
    shown = measured(drawn("resources", open_run(made.path))).set_index(["row", "column"])["value"]
    assert shown["analyze (3 tasks)", "Time (s)"] == 7.0
    assert shown["calibrate:featcal:analyze (3 tasks)", "Time (s)"] == 70.0


def test_efficiency_is_mean_and_spread_over_seeds(run: DriftRun) -> None:
    rows = measured(drawn("efficiency", run)).set_index("column")
    sweep = run.sweeps()
    for n in (8, 16, 48):
        means = sweep[sweep["n"] == n].groupby("seed")["accuracy"].mean()
        assert rows.loc[f"n={n}", "value"] == pytest.approx(100 * statistics.fmean(means))
        assert rows.loc[f"n={n}", "spread"] == pytest.approx(100 * statistics.stdev(means))
    caption = drawn("efficiency", run).caption
    assert "seeds 1, 2, 3" in caption and "seeds 42, 43, 44" in caption


def test_drift_is_the_layer_tables(run: DriftRun) -> None:
    shown = drawn("drift", run).data
    assert (shown["source"] == "measured").all()
    layers = {layer.index: layer.role for layer in run.manifest.layers}
    heads = {"S": 1, "H": max(layers), **{str(at): at for at, role in layers.items() if role == "block"}}
    for row in shown.to_dict("records"):
        value = run.value("drift_rel", task=row["row"], variant=row["variant"], layer=heads[row["column"]])
        assert row["value"] == 100 * value
    assert len(shown) == len(run.tasks) * len(VARIANTS[1:]) * len(layers)


def test_self_checks_are_told_as_they_are(run: DriftRun) -> None:
    rows = drawn("closure", run).data.set_index(["row", "column"])
    for check in self_checks(run).results:
        assert rows.loc[(check.metric, "Limit"), "value"] == check.threshold
        if check.where:
            assert rows.loc[(check.metric, "Largest error"), "value"] == check.value
            assert rows.loc[(check.metric, "Holds"), "text"] == ("yes" if check.status == "pass" else "NO")


def test_settings_are_the_manifests_beside_the_papers(run: DriftRun) -> None:
    rows = measured(drawn("hyper", run)).set_index("column")
    assert rows.loc[["λ", "ρ", "α"], "value"].tolist() == [0.05, 2.0, 0.3]
    assert rows.loc[["Merger", "Updates", "n", "Layers"], "text"].tolist() == [
        "Task Arithmetic (scaling 0.3)",
        "linear, bias, norm",
        "256",
        "2 to 3",
    ]


def test_an_erratum_is_marked_and_told_and_the_print_kept(run: DriftRun) -> None:
    shown = drawn("accuracy-full-b32-14", run)
    cell = shown.data[(shown.data["row"] == "Pre-trained") & (shown.data["column"] == "C100")]
    assert cell["value"].item() == 89.8 and "63.7" in cell["note"].item()
    line = "".join(line for line in (shown.latex or "").splitlines() if line.startswith("Pre-trained"))
    assert r"89.8\textsuperscript{\dag}" in line and r"58.8\textsuperscript{\dag}" in line
    assert "It should be 63.7." in shown.caption


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_runs_or_says_what_fills_it(name: str, run: DriftRun) -> None:
    shown = drawn(name, run)
    has_measured = len(measured(shown)) > 0
    assert (run.id in shown.caption) == has_measured
    assert has_measured or shown.missing
    for panel in shown.missing:
        assert panel.missing in shown.caption
    assert f"\\label{{tab:drift-{name}}}" in (shown.latex or "")


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_numbers_are_there_without_any_run(name: str) -> None:
    shown = drawn(name)
    assert set(shown.data["source"]) <= {"paper"}
    assert shown.missing or name in ("drift", "closure")


@pytest.mark.parametrize("name", few(exhibits, ["accuracy-avg", "intro"]))
def test_an_exhibit_holds_measured_rows_only_unless_asked_for_the_papers(
    name: str, run: DriftRun, eight: DriftRun
) -> None:
    shown, both = (exhibits[name].draw([run, eight], ExhibitOptions(paper=paper)) for paper in (False, True))
    assert set(shown.data["source"]) <= {"measured"}
    said = shown.caption + (shown.latex or "")
    assert "Paper:" not in said and "paper's" not in said and "as printed in" not in said
    pd.testing.assert_frame_equal(_sorted(shown.data), _sorted(measured(both)), check_dtype=False)


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in an order of their own: the paper's stand between those of runs, and their parts count as well."""
    kept = rows.drop(columns="part", errors="ignore").dropna(axis="columns", how="all")
    return kept.sort_values(list(kept.columns), kind="stable").reset_index(drop=True)


@pytest.mark.parametrize("name", ["accuracy-llm", "corruption"])
def test_without_a_row_a_table_is_a_note_alone(name: str, run: DriftRun) -> None:
    shown = drawn(name, run, paper=False)
    assert shown.data.empty and shown.missing
    assert r"\driftnote{Measured rows" in (shown.latex or "") and r"\begin{tabular}" not in (
        shown.latex or ""
    )
