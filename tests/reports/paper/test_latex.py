"""LaTeX that says what the cells say, takes no orders from names, and compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from driftlens.runs.run import DriftRun
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit, exhibits
from driftlens_reports.paper.latex_tables import escape_latex, format_number, latex_table, sentence_latex
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


@pytest.mark.parametrize("name", HOSTILE)
def test_no_letter_of_a_name_is_read_as_a_command(name: str) -> None:
    known = r"\\textbackslash\{\}|\\textascii(?:tilde|circum)\{\}|\\text(?:less|greater|bar|asciigrave)\{\}"
    left = re.sub(rf"{known}|\\[{{}}$&#_%]|\{{[\[\]*]\}}", "", escape_latex(name))
    assert not set(left) & set("\\{}$&#_%~^<>|`[]*\n")


def test_ordinary_letters_stay_as_they_are() -> None:
    assert escape_latex("CLIP-ViT-B/32, Säge (n = 8)") == "CLIP-ViT-B/32, Säge (n = 8)"


def test_code_in_a_sentence_is_set_as_code_and_still_escaped() -> None:
    assert sentence_latex("run `a_b --x` now") == r"run \texttt{a{\char95}b {-}{-}x} now"
    assert sentence_latex("one ` alone") == r"one \textasciigrave{} alone"


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (12.345, 1, "12.3"),
        (-0.5, 2, "$-$0.50"),
        (float("nan"), 1, "--"),
        (1e-5, None, "$10^{-5}$"),
        (9.74e-6, None, r"9.74 $\times$ $10^{-6}$"),
        (0.05, None, "0.05"),
    ],
)
def test_numbers_are_rounded_only_when_set(value: float, digits: int | None, shown: str) -> None:
    assert format_number(value, digits) == shown


def of_width(columns: int) -> str:
    frame = pd.DataFrame([["12.3"] * columns], columns=[f"column {at}" for at in range(columns)])
    return latex_table(frame, "t_1", "C", notes=["A note."])


def test_environments_follow_the_size() -> None:
    assert r"\begin{table}" in of_width(2) and r"\end{table}" in of_width(2)
    assert r"\begin{table*}" in of_width(6) and "resizebox" not in of_width(6)
    assert r"\resizebox{\linewidth}" in of_width(14)
    for text in (of_width(2), of_width(14)):
        assert "A note." in text and r"\label{tab:drift-t-1}" in text


def test_numbers_go_to_the_right_and_words_to_the_left() -> None:
    frame = pd.DataFrame({"n": ["12.3", r"\textbf{4.0} $\pm$ 1.0", "--"], "said": ["yes", "no", "12"]})
    assert r"\begin{tabular}{rl}" in latex_table(frame, "t", "C")


def test_a_table_without_a_row_is_its_notes() -> None:
    text = latex_table(pd.DataFrame(), "t", "C", notes=["Not shown: rows (`driftlens analyze RUN` adds them)."])
    assert "tabular" not in text and r"\texttt{driftlens analyze RUN}" in text


def test_every_line_of_a_tabular_has_as_many_cells_as_it_declares(hostile: DriftRun) -> None:
    for name in TABLES:
        latex = draw_exhibit(name, [hostile], ExhibitOptions()).latex or ""
        (body,) = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", latex, re.DOTALL)
        assert len({len(cells) for cells in rows_of(body)}) == 1, name


@pytest.mark.slow
def test_all_tables_compile(hostile: DriftRun, tmp_path: Path) -> None:
    eight = scores_run(tmp_path / "eight", name="eight", tasks=EIGHT)
    shown = [draw_exhibit(name, [hostile, eight], ExhibitOptions()).latex or "" for name in TABLES]
    said = typeset(tmp_path, r"\usepackage[textwidth=5.5in]{geometry}", r"\clearpage ".join(shown))
    assert "Overfull" not in said and "Missing character" not in said
