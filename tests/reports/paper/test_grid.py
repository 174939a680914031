"""Averages, gains and best cells of a table, before anything is rounded."""

from __future__ import annotations

import math

import pytest

from driftlens_reports.paper.grid import (
    AVERAGE,
    Block,
    Cell,
    Column,
    Grid,
    Line,
    gain,
    shows_gains,
    tidy,
    with_average,
)

SCORE = Column("score", 1, has_gain=True)


def line(label: str, score: float, role: str, source: str = "measured", run: str = "r1") -> Line:
    return Line(label, {"score": Cell(score)}, role, source, run)  # type: ignore[arg-type]


PLAIN = line("merged", 70.04, "plain")
OWN = line("w/ featcal", 85.46, "own")
BASE = line("Base", 99.0, "reference")
PRINTED = (line("merged", 60.0, "plain", "paper", ""), line("w/ FeatCal", 90.0, "own", "paper", ""))
GRID = Grid((SCORE,), (Block((BASE,)), Block((PLAIN, OWN)), Block(PRINTED)))


def test_a_gain_is_taken_before_rounding() -> None:
    found = gain(GRID.blocks[1], OWN, "score")
    assert found == 85.46 - 70.04
    assert f"{found:.1f}" == "15.4"  # the rounded values differ by 15.5


def test_gains_never_cross_runs_or_sources() -> None:
    other = line("w/ other", 80.0, "own", run="r2")
    assert math.isnan(gain(Block((PLAIN, other)), other, "score"))
    assert math.isnan(gain(Block((PLAIN, *PRINTED[1:])), PRINTED[1], "score"))


def test_the_plain_line_and_references_gain_nothing() -> None:
    block = Block((BASE, PLAIN, OWN))
    assert math.isnan(gain(block, PLAIN, "score")) and math.isnan(gain(block, BASE, "score"))


def test_a_line_has_an_average_only_over_everything_shown() -> None:
    full = Line("a", {"x": Cell(1.0), "y": Cell(2.0), "z": Cell(9.0)})
    assert with_average(full, ["x", "y"]).number(AVERAGE) == 1.5
    assert AVERAGE not in with_average(full, ["x", "missing"]).cells
    assert AVERAGE not in with_average(Line("b", {"x": Cell(math.nan)}), ["x"]).cells
    assert AVERAGE not in with_average(full, []).cells


def test_a_column_shows_gains_only_where_a_line_has_one() -> None:
    assert shows_gains(GRID, SCORE)
    assert not shows_gains(GRID, Column("score"))
    assert not shows_gains(Grid((SCORE,), (Block((BASE, PLAIN)),)), SCORE)


def test_tidy_rows_hold_every_cell_unrounded() -> None:
    frame = tidy([GRID])
    assert frame[["row", "source", "value"]].to_numpy().tolist() == [
        ["Base", "measured", 99.0],
        ["merged", "measured", 70.04],
        ["w/ featcal", "measured", 85.46],
        ["merged", "paper", 60.0],
        ["w/ FeatCal", "paper", 90.0],
    ]
    assert frame["gain"].dropna().tolist() == [pytest.approx(15.42), 30.0]


def test_words_are_kept_apart_from_numbers() -> None:
    frame = tidy([Grid((Column("verdict", None),), (Block((Line("check", {"verdict": Cell("yes")}),)),))])
    assert frame["text"].tolist() == ["yes"] and frame["value"].isna().all()
