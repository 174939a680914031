"""LaTeX that says what the grid says, takes no orders from names, and compiles."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from driftlens.runs.run import DriftRun
from driftlens_reports.paper.exhibit import ExhibitOptions, Gap, exhibits
from driftlens_reports.paper.grid import (
    AVERAGE,
    Block,
    Cell,
    Column,
    Grid,
    Line,
    escape,
    gain,
    prose,
    shows_gains,
    to_latex,
    with_average,
)
from tests.reports.paper.drawn import rows_of, typeset
from tests.reports.paper.saved_runs import EIGHT, scores_run, table_run

HOSTILE = (
    r"\input{/etc/passwd}",
    "$x$",
    "a_b&c",
    "100% #1",
    "{open",
    "~^|<b>",
    "[0] * `q`",
    "=cmd()",
    "line\nbreak",
)
TABLES = [name for name, entry in exhibits.items() if entry.kind == "table"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    folder = tmp_path_factory.mktemp("hostile")
    return table_run(folder / "run", name=r"\input{x} & _#%$", tasks=HOSTILE[:5])


def one_cell(label: str, value: float | str, column: Column | None = None) -> str:
    chosen = column or Column("score")
    grid = Grid((chosen,), (Block((Line(label, {chosen.title: Cell(value)}),)),))
    return to_latex([grid], "test", "A caption.")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_letter_of_a_name_is_read_as_a_command(name: str) -> None:
    known = r"\\textbackslash\{\}|\\textascii(?:tilde|circum)\{\}|\\text(?:less|greater|bar|asciigrave)\{\}"
    left = re.sub(rf"{known}|\\[{{}}$&#_%]|\{{[\[\]*]\}}", "", escape(name))
    assert not set(left) & set("\\{}$&#_%~^<>|`[]*\n")


def test_ordinary_letters_stay_as_they_are() -> None:
    assert escape("CLIP-ViT-B/32, Säge (n = 8)") == "CLIP-ViT-B/32, Säge (n = 8)"


def test_code_in_a_sentence_is_set_as_code_and_still_escaped() -> None:
    assert prose("run `a_b --x` now") == r"run \texttt{a{\char95}b {-}{-}x} now"
    assert prose("one ` alone") == r"one \textasciigrave{} alone"


def test_numbers_are_rounded_only_when_set() -> None:
    assert ["a", "12.3"] in rows_of(one_cell("a", 12.345))
    assert ["a", "-0.50"] in rows_of(one_cell("a", -0.5, Column("score", 2)))


def test_powers_of_ten_are_set_as_such() -> None:
    any_size = Column("score", None)
    assert r"$10^{-5}$ \\" in one_cell("a", 1e-5, any_size)
    assert r"9.74 $\times$ $10^{-6}$ \\" in one_cell("a", 9.74e-6, any_size)
    assert r" 0.05 \\" in one_cell("a", 0.05, any_size)


def test_what_was_not_measured_is_a_dash() -> None:
    assert ["a", "--"] in rows_of(one_cell("a", float("nan")))


def test_a_missing_part_is_a_framed_note_with_its_command() -> None:
    grid = Grid((Column("score"),), (Block((Line("a", {"score": Cell(1.0)}),)),))
    text = to_latex([grid], "t", "C", missing=[Gap("Part_1", "`driftlens analyze RUN` adds it.")])
    assert r"\driftnote{Part\_1: \texttt{driftlens analyze RUN} adds it.}" in text


@pytest.mark.slow
def test_every_line_of_a_tabular_has_as_many_cells_as_it_declares(hostile: DriftRun) -> None:
    for name in TABLES:
        latex = exhibits[name].draw([hostile], ExhibitOptions(paper=True)).latex or ""
        for alignment, body in re.findall(
            r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", latex, re.DOTALL
        ):
            for cells in rows_of(body):
                assert len(cells) in (1, len(alignment)), (name, cells)  # one: a title across all columns


@pytest.mark.slow
def test_all_tables_compile(hostile: DriftRun, tmp_path: Path) -> None:
    eight = scores_run(tmp_path / "eight", name="eight", tasks=EIGHT, source="openai/clip-vit-base-patch32")
    shown = [exhibits[name].draw([hostile, eight], ExhibitOptions(paper=True)).latex or "" for name in TABLES]
    packages = r"\usepackage{graphicx}\usepackage[margin=2cm]{geometry}"
    said = typeset(tmp_path, packages, r"\clearpage ".join(shown))
    assert "Overfull" not in said and "Missing character" not in said
    assert f"({len(TABLES)} pages" in said.replace("\n", " ")


def line(label: str, score: float, role: str, source: str = "measured", run: str = "r1") -> Line:
    return Line(label, {"score": Cell(score)}, role, source, run)  # type: ignore[arg-type]


PLAIN, OWN = line("merged", 70.04, "plain"), line("w/ featcal", 85.46, "own")


def test_gains_never_cross_runs_or_sources() -> None:
    assert gain(Block((PLAIN, OWN)), OWN, "score") == 85.46 - 70.04
    for other in (line("w/ x", 80.0, "own", run="r2"), line("w/ FeatCal", 90.0, "own", "paper", "")):
        assert math.isnan(gain(Block((PLAIN, other)), other, "score"))


def test_a_line_has_an_average_only_over_everything_shown() -> None:
    full = Line("a", {"x": Cell(1.0), "y": Cell(2.0), "z": Cell(9.0)})
    assert with_average(full, ["x", "y"]).number(AVERAGE) == 1.5
    assert AVERAGE not in with_average(full, ["x", "missing"]).cells
    assert AVERAGE not in with_average(Line("b", {"x": Cell(math.nan)}), ["x"]).cells
    assert AVERAGE not in with_average(full, []).cells


def test_a_column_shows_gains_only_where_a_line_has_one() -> None:
    score = Column("score", 1, has_gain=True)
    assert shows_gains(Grid((score,), (Block((PLAIN, OWN)),)), score)
    assert not shows_gains(Grid((score,), (Block((PLAIN, OWN)),)), Column("score"))
    assert not shows_gains(Grid((score,), (Block((PLAIN,)),)), score)
