"""The paper's printed numbers: transcribed right, and exactly the known errata stand out."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from driftlens_reports.paper import published
from driftlens_reports.paper.grid import AVERAGE
from driftlens_reports.paper.published import (
    PublishedRow,
    PublishedTable,
    errata,
    notes_on,
    published_tables,
    settings,
)

PAPER = Path(__file__).resolve().parents[4] / "shared" / "paper" / "featcal.tex"
ROWS = [(table, row) for table in published_tables().values() for row in table.rows]
AVERAGED = [(t, r) for t, r in ROWS if AVERAGE in t.columns and not math.isnan(r.values[AVERAGE])]
STATED = json.loads(Path(published.__file__).with_suffix(".json").read_text(encoding="utf-8"))["stated"]
"""Numbers that the paper states about figures whose data it does not print."""
HALF_A_DIGIT = 0.05 + 1e-9


def cell_errata(table: PublishedTable, row: PublishedRow, column: str, kind: str) -> list[float]:
    return [entry.should_be for entry in notes_on(table, row, column) if entry.kind == kind]


def cells(row: PublishedRow) -> list[float]:
    return [value for column, value in row.values.items() if column != AVERAGE]


def ident(pair: tuple[PublishedTable, PublishedRow]) -> str:
    table, row = pair
    return " ".join(part for part in (table.number, row.model, row.merger, row.name) if part)


@pytest.fixture(scope="module")
def tex() -> list[str]:
    if not PAPER.is_file():
        pytest.skip("the paper's source is not on this machine")
    return PAPER.read_text(encoding="utf-8").splitlines()


def test_every_row_stands_in_the_papers_source(tex: list[str]) -> None:
    # In order and complete: gains, bold and padding are dropped from the source, then a line must hold just this row.
    lines = [re.sub(r"\\(?:up|down|pos)gain\{[\d.]*\}|\\zerogain|\\phantom\{0\}", "", line) for line in tex]
    found = [[float(number) for number in re.findall(r"(?<![\w@-])\d+\.\d(?!\d)", line)] for line in lines]
    for table, row in ROWS:
        if "Speedup" in table.columns:
            continue  # one cell holds two numbers; tested below
        numbers = []
        for column, value in row.values.items():
            numbers += [] if math.isnan(value) else [value]
            numbers += [row.spread[column]] if row.spread else []
        assert numbers in found, ident((table, row))


def test_the_two_numbers_in_one_cell_are_both_there() -> None:
    table = published_tables()["tab:ta8-runtime-efficiency-n256"]
    assert [(row.values["Speedup"], row.values["Time (s)"]) for row in table.rows] == [
        (1.0, 217),
        (1.0, 224),
        (4.1, 53),
    ]


def test_a_printed_average_is_that_of_the_printed_cells_unless_an_erratum_says_so() -> None:
    """A wrong cell explains the average that it spoils."""
    assert len(AVERAGED) > 100
    for table, row in AVERAGED:
        place, printed = ident((table, row)), row.values[AVERAGE]
        differs = abs(statistics.fmean(cells(row)) - printed) > HALF_A_DIGIT
        assert differs == bool(cell_errata(table, row, AVERAGE, "rounding")), place
        right = {c: cell_errata(table, row, c, "value") for c in row.values}
        repaired = [right[c][0] if right[c] else v for c, v in row.values.items() if c != AVERAGE]
        corrected = cell_errata(table, row, AVERAGE, "average")
        assert bool(corrected) == any(right.values()), place
        if corrected:
            assert abs(statistics.fmean(repaired) - corrected[0]) <= HALF_A_DIGIT, place


def test_averages_over_suites_are_those_of_the_full_tables() -> None:
    summary = published_tables()["tab:clip-extended-avg"]
    for column in summary.columns:
        suite, backbone = column.split(", ")
        (full,) = (
            t
            for t in published_tables().values()
            if t.suite == suite and t.model.endswith(backbone) and t.title.startswith("Accuracy, ")
        )
        averages = {(row.merger, row.name): row.values[AVERAGE] for row in full.rows}
        for row in summary.rows:
            assert row.values[column] == averages[row.merger, row.name], (column, row.name)
            wrong = cell_errata(full, _like(full, row), AVERAGE, "average")
            assert cell_errata(summary, row, column, "average") == wrong


def _like(table: PublishedTable, wanted: PublishedRow) -> PublishedRow:
    return next(row for row in table.rows if (row.merger, row.name) == (wanted.merger, wanted.name))


def test_a_printed_gain_is_the_difference_of_the_printed_values() -> None:
    odd = set()
    for table, row in ROWS:
        plain = next((r for r in table.rows if r.name == row.merger and r.model == row.model), None)
        for column, printed in row.gains.items():
            assert plain is not None
            difference = row.values[column] - plain.values[column]
            if printed.endswith("."):  # two-digit gains are cut short
                assert math.trunc(difference + math.copysign(1e-9, difference)) == int(printed[:-1])
            elif abs(difference - float(printed)) > HALF_A_DIGIT:
                odd.add((table.label, row.merger, row.name, column))
    flagged = {(e.table, e.merger, e.row, c) for e in errata() if e.kind == "gain" for c in e.columns}
    assert odd == flagged


def test_every_erratum_is_about_a_cell_that_exists() -> None:
    for entry in errata():
        about = [c for t, r in ROWS for c in r.values if entry.concerns(t, r, c)]
        assert about == list(entry.columns) if entry.columns else len(about) > 5, entry


def test_permuted_rows_have_the_merged_models_best_task_under_another_name() -> None:
    # MNIST is where a Task Arithmetic model is best of SVHN, GTSRB and MNIST, unless its columns are permuted.
    for label in ("tab:clip-14task-b32-full", "tab:clip-14task-l14-full", "tab:clip-20task-b32-full"):
        table = published_tables()[label]
        for row in table.rows:
            is_permuted = bool(cell_errata(table, row, "MNIST", "columns"))
            assert is_permuted == (row.values["MNIST"] < row.values["GTSRB"] - 20), row


def test_cells_known_to_be_wrong_keep_what_was_printed() -> None:
    wrong = [
        (column, row.values[column], entry.should_be)
        for table, row in ROWS
        for column in row.values
        for entry in notes_on(table, row, column)
        if entry.kind == "value"
    ]
    assert sorted(wrong) == [
        ("C100", 89.8, 63.7),
        ("EuroSAT", 91.1, 99.1),
        ("EuroSAT", 91.1, 99.1),
        ("PCAM", 98.0, 87.96),
        ("PCAM", 98.0, 87.96),
    ]


def test_roles_follow_from_names() -> None:
    roles = {(row.name, row.role) for _, row in ROWS}
    assert {role for _, role in roles} == {"reference", "plain", "other", "own"}
    assert [role for name, role in roles if name == "w/ FeatCal"] == ["own"]
    assert {name for name, role in roles if role == "reference"} == {
        *("Pre-trained", "Base", "Fine-tuned (STL)", "Traditional MTL"),
        *("Coding Expert", "Instruction Expert", "Math Expert"),
    }


def test_what_the_text_states_about_figures_is_in_the_papers_source(tex: list[str]) -> None:
    text = " ".join(tex)
    figures = {"fig:intro-triptych": 3, "fig:ta8-data-efficiency": 2}
    figures |= {
        "fig:feature-calibration-diagnostics": 4,
        "fig:probsurgery-feature-calibration-diagnostics": 7,
    }
    for figure, count in figures.items():
        found = [entry for entry in STATED if entry["figure"] == figure]
        assert len(found) == count
        for entry in found:
            digits = (
                3 if entry["quantity"].startswith(("mean cosine", "cosine")) and "intro" not in figure else 2
            )
            short = {f"{abs(entry['value']):.{d}f}" for d in (0, 1, digits)}
            assert any(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", text) for number in short), (
                entry
            )


def test_settings_are_those_of_the_papers_setup() -> None:
    chosen = {entry["preset"]: (entry["lam"], entry["rho"], entry["alpha"]) for entry in settings()}
    assert chosen == {
        "paper-clip": (0.05, 2.0, 0.3),
        "flan-t5": (1e-5, 2.0, 0.6),
        "llama-3b": (1e-5, 0.5, 0.15),
        "llama-8b": (3.0, 0.5, 0.15),
    }
