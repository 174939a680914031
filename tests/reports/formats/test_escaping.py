"""Names that would be markup, links, commands or formulas in Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftlens.records.reading import NO_VALUE
from driftlens_reports.build import Report
from driftlens_reports.content import Column, Table
from driftlens_reports.formats import pull_request
from driftlens_reports.formats.fragments import fragments
from driftlens_reports.formats.pull_request import MOST_CHARACTERS, escape, markdown, prose
from tests.records.full_run import Size, write_full_run

NAMES = (
    "<script>alert(1)</script>",
    "![x](http://evil.test/a.png)",
    "[click](javascript:alert(1))",
    "a|b",
    "**bold** _it_ ~~gone~~ `code`",
    "$x$ &lt; \\n",
    "# heading",
    "1. first",
    "- item",
    "+ item",
    "---",
    "===",
    "@octocat and #12 and https://evil.test and www.evil.test",
)


def rendered(text: str) -> tuple[str, set[str]]:
    """What Markdown makes of a text: what a reader sees, and the kinds of markup in it."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in tokens} | {child.type for child in inline}
    return "".join(child.content for child in inline), kinds - {
        "paragraph_open",
        "paragraph_close",
        "inline",
        "text",
    }


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_a_name_letter_by_letter(name: str) -> None:
    seen, kinds = rendered(escape(name))
    assert seen.replace("\u2060", "") == name
    assert kinds <= {"text_special"}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_no_text_becomes_markup_in_markdown(text: str) -> None:
    seen, kinds = rendered(f"{escape(text)}")
    assert kinds <= {"text_special"}
    assert seen.replace("\u2060", "") == text.replace("\u2060", "")


def test_mentions_issues_and_addresses_are_broken_up() -> None:
    text = escape("@octocat #12 https://evil.test www.evil.test")
    assert not re.search(r"@\w|#\d|://|www\.\w", text)


def test_commands_in_sentences_stay_code() -> None:
    seen, kinds = rendered(prose("needs a_b; `driftlens run <RUN> --x` adds it"))
    assert seen == "needs a_b; driftlens run <RUN> --x adds it"
    assert "code_inline" in kinds and "html_inline" not in kinds


def test_one_backtick_alone_is_a_letter() -> None:
    assert rendered(prose("it`s"))[0] == "it`s"


def test_a_comment_is_never_too_long(standard: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = markdown(standard.content, {}).decode()
    assert len(whole) < MOST_CHARACTERS and "Left out for length" not in whole
    monkeypatch.setattr(pull_request, "MOST_CHARACTERS", len(whole) // 2)
    short = markdown(standard.content, {}).decode()
    assert len(short) < len(whole) and "Left out for length: " in short


def test_pictures_are_linked_only_where_they_are_written(standard: Report) -> None:
    assert "![" not in markdown(standard.content, {}).decode()
    files = standard.files(["md"])
    (picture,) = [name for name in files if name.endswith(".png")]
    assert f"]({picture})" in files["report.md"].decode()
    assert files[picture].startswith(b"\x89PNG")


def test_spreadsheets_hold_no_formula(tmp_path_factory: pytest.TempPathFactory) -> None:
    tasks = ["=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "plain"]
    folder = write_full_run(
        tmp_path_factory.mktemp("formulas") / "run", name="=1+1", tasks=tasks, size=Size(1, 3, 3, 2, 10)
    )
    files = Report(folder, "summary").files(["csv"])
    for name, data in files.items():
        for row in csv.reader(io.StringIO(data.decode())):
            for cell in row:
                assert not cell.startswith(("=", "+", "@")), name
                if cell.startswith("-"):
                    float(cell)
    rows = csv.DictReader(io.StringIO(files["csv/layers.csv"].decode()))
    assert {row["task"].removeprefix("'") for row in rows} == set(tasks)


def test_latex_runs_no_command_of_a_name(standard: Report) -> None:
    table = Table(
        name="x",
        title="$\\input{/etc/passwd}$",
        columns=(Column(name="task", kind="text"), Column(name="drift", kind="number")),
        rows=(("\\write18{rm}", 1.5), ("a_b & 50 % #", None)),
    )
    section = standard.content.sections[0].model_copy(update={"tables": (table,)})
    text = fragments(standard.content.model_copy(update={"sections": (section,)}))["x.tex"].decode()
    assert "\\input{" not in text.replace("before \\input to", "") and "\\write" not in text
    assert r"a\_b \& 50 \% \# & -- \\" in text


def test_a_gap_reads_the_same_in_every_text(standard: Report) -> None:
    table = next(figure.data for figure in standard.content.figures if figure.name == "amplification")
    assert table is not None and table.has_gaps
    assert any(NO_VALUE in row for row in table.texts())
