"""The JSON format against its schema, and against what this major version promised."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import driftlens_reports
from driftlens.results.formatting import NO_VALUE, Column, Table
from driftlens.runs.run import DriftRun
from driftlens_reports.build import Report
from driftlens_reports.content import VERSION, ReportContent
from driftlens_reports.formats.text_formats import (
    escape_markdown,
    latex_tables_by_file,
    report_markdown,
    sentence_markdown,
)
from tests.runs.full_run import Size, write_full_run

GOLDEN = Path(__file__).with_name("report-3.0.json")
"""Fields of version 3.0: within a major version they only ever grow."""


def document(report: Report) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(report.files(["json"])["report.json"])
    return loaded


def shipped_schema() -> dict[str, Any]:
    """The schema as it is packaged."""
    path = Path(driftlens_reports.__file__).with_name("report.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def fields(schema: dict[str, Any]) -> dict[str, list[str]]:
    parts = {"ReportContent": schema, **schema["$defs"]}
    return {name: sorted(part["properties"]) for name, part in sorted(parts.items())}


def test_the_shipped_schema_is_that_of_the_model() -> None:
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DriftLens report {VERSION.partition('.')[0]}",
    }
    assert shipped_schema() == {**ReportContent.model_json_schema(mode="serialization"), **about}


def test_fields_are_only_ever_added() -> None:
    promised: dict[str, list[str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    there = fields(shipped_schema())
    assert {name: [field for field in kept if field in there[name]] for name, kept in promised.items()} == promised


@pytest.mark.slow
@pytest.mark.parametrize("which", ["full", "bare", "hostile"])
def test_documents_are_valid(which: str, request: pytest.FixtureRequest) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    run: DriftRun = request.getfixturevalue(which)
    validator = jsonschema.Draft202012Validator(shipped_schema())
    jsonschema.Draft202012Validator.check_schema(shipped_schema())
    assert [error.message for error in validator.iter_errors(document(Report(run, "summary")))] == []


@pytest.mark.slow
def test_the_schema_refuses_what_is_no_report(full: DriftRun) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(shipped_schema())
    spoilt = document(Report(full, sections=["glossary"]))
    spoilt["sections"][0]["tables"][0]["columns"][0]["kind"] = "colour"
    assert not validator.is_valid(spoilt)


def test_reading_a_document_gives_the_content_back(standard: Report) -> None:
    assert ReportContent.model_validate(document(standard)) == standard.content


@pytest.mark.slow
def test_rows_are_as_long_as_their_columns(everything: Report) -> None:
    def tables(content: ReportContent) -> Iterator[tuple[int, int]]:
        for table in (*content.tables, *(figure.data for figure in content.figures if figure.data)):
            yield from ((len(row), len(table.columns)) for row in table.rows)

    found = list(tables(everything.content))
    assert len(found) > 400 and all(cells == columns for cells, columns in found)


def test_what_was_not_measured_is_null(full: DriftRun, standard: Report) -> None:
    figures = {f["name"]: f for section in document(standard)["sections"] for f in section["figures"]}
    data = figures["amplification"]["data"]
    at = {column["name"]: place for place, column in enumerate(data["columns"])}
    stems = [row for row in data["rows"] if row[at["role"]] == "stem"]
    assert {row[at["variant"]] for row in stems} == {"merged", "calibrated:featcal"} and all(
        row[at["amplification"]] is None for row in stems
    )


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
    seen, kinds = rendered(escape_markdown(name))
    assert seen.replace("\u2060", "") == name
    assert kinds <= {"text_special"}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
def test_no_text_becomes_markup_in_markdown(text: str) -> None:
    seen, kinds = rendered(f"{escape_markdown(text)}")
    assert kinds <= {"text_special"}
    assert seen.replace("\u2060", "") == text.replace("\u2060", "")


def test_mentions_issues_and_addresses_are_broken_up() -> None:
    text = escape_markdown("@octocat #12 https://evil.test www.evil.test")
    assert not re.search(r"@\w|#\d|://|www\.\w", text)


def test_commands_in_sentences_stay_code() -> None:
    seen, kinds = rendered(sentence_markdown("needs a_b; `driftlens run <RUN> --x` adds it"))
    assert seen == "needs a_b; driftlens run <RUN> --x adds it"
    assert "code_inline" in kinds and "html_inline" not in kinds


@pytest.mark.parametrize("many", [2, 40])
def test_a_comment_has_30_lines_with_what_failed_first(standard: Report, many: int) -> None:
    content = standard.content
    (table,) = [table for part in content.sections for table in part.tables if table.name == "tasks"]
    *tasks, mean = table.rows
    rows = (*(tasks[0] for _ in range(many)), mean)
    (old,) = [table for part in content.sections for table in part.tables if table.name == "self-checks"]
    checks = old.model_copy(
        update={
            "name": "checks",
            "rows": tuple((f"check {at}", "fail", *old.rows[0][2:]) for at in range(many)),
        }
    )
    section = content.sections[0].model_copy(update={"tables": (table.model_copy(update={"rows": rows}), checks)})
    stamps = tuple(f"stamp {at}" for at in range(many))
    text = report_markdown(content.model_copy(update={"sections": (section,), "stamps": stamps})).decode()
    lines = text.splitlines()
    assert len(lines) <= 30 and (many < 40 or len(lines) == 30) and "![" not in text
    first = [text.index(part) for part in ("stamp 0", "check 0", content.verdict.sentences[0][:8], "| task |")]
    assert first == sorted(first) and "mean of" in lines[-3]
    assert ("more tasks in the other formats" in text) == (many == 40) == ("- 38 more" in text)


@pytest.mark.slow
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


def test_a_gap_reads_the_same_in_every_text(standard: Report) -> None:
    table = next(figure.data for figure in standard.content.figures if figure.name == "amplification")
    assert table is not None and any(None in row for row in table.rows)
    assert any(NO_VALUE in row for row in table.formatted_rows())


def numbers(names: list[str]) -> Table:
    """A table with a row per name, the last one without a number."""
    columns = (Column(name="task", kind="text"), Column(name="drift", kind="number"))
    rows = ((name, at / 7 if at < len(names) - 1 else None) for at, name in enumerate(names))
    return Table(name="x", title=names[0], columns=columns, rows=tuple(rows))


def in_latex(content: ReportContent, table: Table) -> str:
    """The fragment of a report that holds this table and no other."""
    section = content.sections[0].model_copy(update={"tables": (table,)})
    return latex_tables_by_file(content.model_copy(update={"sections": (section,)}))["latex/x.tex"].decode()


def test_latex_runs_no_command_of_a_name(standard: Report) -> None:
    text = in_latex(standard.content, numbers(["$\\input{/etc/passwd}$", "\\write18{rm}", "a_b & 50 % #"]))
    assert "\\input{" not in text and "\\write" not in text
    assert r"a\_b \& 50 \% \# & -- \\" in text


def test_a_long_latex_table_goes_on_without_losing_a_row(standard: Report) -> None:
    table = numbers([f"t{at}" for at in range(100)])
    text = in_latex(standard.content, table)
    assert re.findall(r"^(t\d+) &", text, re.MULTILINE) == [row[0] for row in table.rows]
    parts = text.split(r"\begin{table}")[1:]
    assert [" (continued)." in part for part in parts] == [False, True, True]
    assert len(set(re.findall(r"\\label\{(.*)\}", text))) == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles_with_the_packages_it_names(standard: Report, tmp_path: Path) -> None:
    names = [r"$\input{/etc/passwd}$", "a_b & 50 % #1", "~^|<b> {open", "[0] * `q`"]
    texts = [text.decode() for text in latex_tables_by_file(standard.content).values()]
    texts.append(in_latex(standard.content, numbers(names)))
    packages = sorted({line for text in texts for line in re.findall(r"\\usepackage\{[\w,]+\}", text)})
    body = "\\clearpage\n".join(texts)
    document = f"\\documentclass{{article}}\n{''.join(packages)}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    (tmp_path / "all.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
    assert not re.findall(r"Overfull|Missing character|too large|multiply defined", done.stdout)
