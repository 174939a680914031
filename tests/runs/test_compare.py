"""Two runs, or two variants of one: changes against the tables, refusals, the control's part."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scipy import stats

from driftlens.results.compare import compare
from driftlens.results.measures import paired_correctness
from driftlens.runs.manifest import ModelInfo, read_manifest, write_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from driftlens.runs.verify import compare_tables
from driftlens.utils.errors import DataError
from driftlens.utils.intervals import unpaired_difference
from driftlens_reports.terminal import run_equality_text
from tests.quick import few
from tests.runs.full_run import write_full_run
from tests.runs.judged import SIZE
from tests.runs.spoiling import spoil


def test_a_change_is_after_minus_before_in_every_layer(full: DriftRun) -> None:
    found = compare(full)
    assert found.pairs == (("merged", "calibrated:featcal"),)
    assert len(found.layers) == len(full.tasks) * len(full.manifest.layers)
    for row in found.layers.to_dict("records"):
        before, after = (
            full.value("drift_l2_mean", task=row["task"], variant=variant, layer=row["layer"])
            for variant in ("merged", "calibrated:featcal")
        )
        assert (row["drift_before"], row["drift_after"]) == (before, after)
        assert row["drift_change"] == after - before
        assert row["drift_relative"] == pytest.approx(after / before - 1)
        assert row["cos_change"] == pytest.approx(row["cos_after"] - row["cos_before"])


def test_the_row_of_a_task_says_what_its_tables_say(full: DriftRun) -> None:
    rows = compare(full).tasks.set_index("task")
    for task in full.tasks:
        row, outputs = rows.loc[task], full.outputs(task)
        for side, variant in (("before", "merged"), ("after", "calibrated:featcal")):
            own = outputs[outputs["variant"] == variant]
            assert row[f"flips_{side}"] == own["flipped"].astype(float).mean()
            assert row[f"score_{side}"] == full.accuracy(task, variant)["value"].iloc[0]
            assert row[f"cos_{side}"] == full.value("cos_mean", task=task, variant=variant)
        hits = [round(200 * row[f"score_{side}"]) for side in ("before", "after")]
        interval = unpaired_difference(hits[0], 200, hits[1], 200)
        assert (row["score_ci_low"], row["score_ci_high"]) == interval


def test_pairs_are_counted_sample_by_sample(copied: Path) -> None:
    variants = ("merged", "calibrated:featcal")
    rows = open_run(copied).outputs()
    wrong = {"merged": ["test/0", "test/1", "test/2"], "calibrated:featcal": ["test/2", "test/5"]}
    for at, (variant, sample, label) in enumerate(zip(rows["variant"], rows["sample_id"], rows["label"], strict=True)):
        spoil(copied, "outputs", at, "pred", "wrong" if sample in wrong.get(variant, ()) else label)
    run = open_run(copied)
    for task in run.tasks:
        found, split = paired_correctness(run, run, task, variants) or pytest.fail("no pairs")
        assert (found.gained, found.lost, found.n, split) == (2, 1, 9, "diagnosis")


def test_pairs_meet_by_sample_not_by_place(full: DriftRun, copied: Path) -> None:
    """A run whose rows stand in another order gives the same pairs."""
    path = copied / "tables" / "outputs.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.take(list(range(rows.num_rows))[::-1]), path)
    for task in full.tasks:
        pair = ("merged", "calibrated:featcal")
        assert paired_correctness(full, open_run(copied), task, pair) == paired_correctness(full, full, task, pair)


def test_without_labels_changes_of_accuracy_are_missing_not_zero(tmp_path: Path) -> None:
    path = write_full_run(tmp_path / "run", tasks=("a",), size=SIZE, has_labels=False)
    row = compare(path).tasks.iloc[0]
    assert math.isnan(row["score_change"]) and math.isnan(row["score_ci_low"])
    assert row["paired_n"] == 0 and math.isnan(row["p_value"]) and row["flips_before"] >= 0


def test_two_runs_are_compared_in_every_variant_they_share(full: DriftRun, tmp_path: Path) -> None:
    other = write_full_run(tmp_path / "b", size=SIZE, variants=("merged", "calibrated:other"), seed=0)
    found = compare(full, other)
    assert found.pairs == (("merged", "merged"),)
    pair = compare(full, other, before="calibrated:featcal", after="calibrated:other")
    assert pair.tasks["drift_after"].to_list() == [
        open_run(other).value("drift_l2_mean", task=task, variant="calibrated:other") for task in full.tasks
    ]


@pytest.mark.slow
def test_runs_of_other_samples_are_refused_by_name(full: DriftRun, tmp_path: Path) -> None:
    other = write_full_run(tmp_path / "b", size=dataclasses.replace(SIZE, samples=7))
    with pytest.raises(DataError, match="diagnosis samples of cars, mnist, dtd") as refused:
        compare(full, other)
    assert "test samples" not in refused.value.message and "allow_mismatch=True" in refused.value.hint
    found = compare(full, other, allow_mismatch=True)
    assert found.mismatches == ("diagnosis samples of cars, mnist, dtd",)
    assert set(found.tasks["paired_n"]) == {7}  # those that both have


@pytest.mark.parametrize(
    ("spoilt", "field"),
    [
        ({"tasks": ("cars", "new")}, r"tasks \(cars, mnist, dtd against cars, new\)"),
        pytest.param(
            {"size": dataclasses.replace(SIZE, blocks=3)},
            r"layers \(4 layers.* against 5 layers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"size": dataclasses.replace(SIZE, tests=99)},
            "test samples of cars, mnist, dtd",
            marks=pytest.mark.slow,
        ),
        ({"class_names": ("x", "y", "z")}, "class names of cars, mnist, dtd"),
    ],
    ids=["tasks", "layers", "test samples", "class names"],
)
def test_each_field_that_differs_is_named(
    full: DriftRun, tmp_path: Path, spoilt: dict[str, object], field: str
) -> None:
    other = write_full_run(tmp_path / "b", **{"size": SIZE, **spoilt})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=field):
        compare(full, other)


def test_another_expert_is_another_yardstick(copied: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(copied, tmp_path / "twin"))
    for path, digest in ((copied, "a"), (twin, "b")):
        models = {"expert:cars": ModelInfo(digest * 64, 5)}
        write_manifest(path, dataclasses.replace(read_manifest(path), models=models))
    with pytest.raises(DataError, match=r"the runs differ in experts of cars\n"):
        compare(copied, twin)


PAIR = {"before": "merged", "after": "calibrated:featcal"}


def test_equal_ids_of_other_data_are_no_pairs(full: DriftRun, tmp_path: Path) -> None:
    """Both data sets count from 0; only what they are ids of tells them apart."""
    other = write_full_run(tmp_path / "b", size=SIZE, origin="of others")
    with pytest.raises(DataError, match="diagnosis samples of cars, mnist, dtd; test samples of cars"):
        compare(full, other)
    found = compare(full, other, **PAIR, allow_mismatch=True)  # type: ignore[arg-type]
    assert set(found.tasks["paired_n"]) == {0} and found.tasks["p_value"].isna().all()
    assert not found.tasks["drift_paired"].any() and not found.layers["drift_paired"].any()
    assert paired_correctness(full, open_run(other), "cars", ("merged", "merged")) is None


@pytest.mark.slow
def test_pairs_of_runs_that_do_not_say_what_their_ids_are_of_are_not_verified(full: DriftRun, tmp_path: Path) -> None:
    older = write_full_run(tmp_path / "b", size=SIZE, origin="")
    found = compare(full, older, **PAIR)  # type: ignore[arg-type]
    assert found.mismatches == () and set(found.tasks["paired_n"]) == {0}
    assert not found.tasks["drift_paired"].any() and found.tasks["drift_ci_low"].notna().all()
    (note,) = found.notes
    assert "does not identify its samples of cars, mnist, dtd" in note
    within = compare(older)  # one run's variants have the same samples whatever it says of them
    assert set(within.tasks["paired_n"]) == {SIZE.samples} and within.tasks["drift_paired"].all()
    assert within.notes == () and compare(full, write_full_run(tmp_path / "c", size=SIZE)).notes == ()


def test_the_change_of_drift_has_students_interval_paired_by_sample(full: DriftRun) -> None:
    found = compare(full)
    for row in [*found.tasks.assign(layer="final").to_dict("records"), *found.layers.to_dict("records")]:
        sides = [
            full.samples(row["task"], variant, row["layer"]).set_index("sample_id")["drift_l2"]
            for variant in PAIR.values()
        ]
        gaps = (sides[1] - sides[0]).to_numpy(dtype=float)
        half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
        ends = (row["drift_ci_low"], row["drift_ci_high"])
        assert ends == pytest.approx((gaps.mean() - half, gaps.mean() + half)) and row["drift_paired"]
        assert row["drift_relative_ci_low"] < row["drift_relative"] < row["drift_relative_ci_high"]


def test_a_repetition_is_equal_to_the_last_bit(full: DriftRun, tmp_path: Path) -> None:
    twin = open_run(write_full_run(tmp_path / "twin", size=SIZE))
    found = compare_tables(full, twin)
    assert found.bit_equal and found.is_within(0.0) and found.largest == 0
    assert set(found.tables) == set(TABLES) - {"resources", "sweeps", "scores", "routing"}
    assert found.num_values > 1000


@pytest.mark.parametrize(
    "table",
    few(["layers", "samples", "outputs", "params", "adjoint"], ["layers", "outputs"]),
)
def test_one_changed_number_anywhere_is_found(full: DriftRun, copied: Path, table: str) -> None:
    column = {
        "layers": "drift_l2_mean",
        "samples": "cos",
        "outputs": "kl",
        "params": "cos",
        "adjoint": "part",
    }[table]
    value = pq.read_table(copied / "tables" / f"{table}.parquet")[column][3].as_py()
    spoil(copied, table, 3, column, value + 1e-3)
    found = compare_tables(full, open_run(copied))
    assert not found.bit_equal and not found.is_within(1e-6) and found.is_within(1e-2)
    assert found.where.startswith(f"{table}.{column}, ") and not found.unequal


def test_the_last_bit_counts_for_bits_and_not_for_a_tolerance(full: DriftRun, copied: Path) -> None:
    value = full.layers()["drift_l2_mean"].iloc[0]
    spoil(copied, "layers", 0, "drift_l2_mean", math.nextafter(value, math.inf))
    found = compare_tables(full, open_run(copied))
    assert not found.bit_equal and 0 < found.largest < 1e-15 and found.is_within(1e-12)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("outputs", "pred", "other"),
        pytest.param("outputs", "flipped", None, marks=pytest.mark.slow),
        pytest.param("layers", "nodes", 5, marks=pytest.mark.slow),
        ("layers", "cka", None),
    ],
    ids=["text", "missing truth", "count", "missing number"],
)
def test_no_tolerance_covers_text_counts_and_gaps(
    full: DriftRun, copied: Path, table: str, column: str, value: object
) -> None:
    spoil(copied, table, 5, column, value)
    found = compare_tables(full, open_run(copied))
    assert not found.is_within(math.inf) and not found.bit_equal
    (only,) = found.unequal
    assert only.startswith(f"{table}.{column}: 1 row differs (")


@pytest.mark.slow
def test_columns_that_an_older_schema_lacks_are_told_from_values_that_differ(full: DriftRun, copied: Path) -> None:
    file = copied / "tables" / "layers.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["cka", "random_gain_mean"]), file)
    for pair in ((full, open_run(copied)), (open_run(copied), full)):
        found = compare_tables(*pair)
        assert found.bit_equal and {*found.lacking} == {"layers.cka", "layers.random_gain_mean"}
        assert "Not compared, missing in an older run: " in run_equality_text(found, 0.0)
    spoil(copied, "layers", 0, "drift_l2_mean", 1e9)
    found = compare_tables(full, open_run(copied))
    assert not found.is_within(1e-3) and found.where.startswith("layers.drift_l2_mean")


@pytest.mark.slow
def test_rows_of_one_run_alone_are_counted(full: DriftRun, tmp_path: Path) -> None:
    other = open_run(write_full_run(tmp_path / "b", size=SIZE, tasks=("cars",)))
    found = compare_tables(full, other)
    num_rows = 2 * len(full.variants) * len(full.manifest.layers)
    assert any(text.startswith(f"layers: {num_rows} rows only in the first run") for text in found.unequal)
    assert not found.is_within(math.inf)


def test_order_of_rows_does_not_matter(full: DriftRun, copied: Path) -> None:
    path = copied / "tables" / "samples.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.take(list(range(rows.num_rows))[::-1]), path)
    assert compare_tables(full, open_run(copied)).bit_equal
