r"""LaTeX fragments: a document that loads what they ask for compiles them, on pages that hold them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import subprocess

import pytest

from driftlens.findings.table import Column, Table
from driftlens.runs.run import open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.build import Report
from driftlens_reports.content import ReportContent
from driftlens_reports.formats.texts import fragments
from tests.records.full_run import Size, write_full_run

HOSTILE = [r"$\input{/etc/passwd}$", "a_b & 50 % #1", "~^|<b> {open", "[0] * `q`"]
_PACKAGES = r"\\usepackage(?:\[\w+\])?\{[\w,]+\}"
SOURCE = "/data/models_of_everyone/" + "a-folder/" * 8 + "weights.safetensors"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> ReportContent:
    """A report on names that LaTeX could take for commands, with paths wider than a page."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    write_full_run(folder, name=HOSTILE[0], tasks=HOSTILE, size=Size(2, 8, 4, 3, 50))
    models = open_run(folder).manifest.models
    with RunWriter.resume(folder) as writer:
        writer.describe(
            models={name: dataclasses.replace(info, source=SOURCE) for name, info in models.items()}
        )
    return Report(folder).content


def with_table(content: ReportContent, table: Table) -> ReportContent:
    """The report with this table and no other."""
    section = content.sections[0].model_copy(update={"tables": (table,)})
    return content.model_copy(update={"sections": (section,)})


def numbers(rows: int) -> Table:
    """A table of so many rows."""
    columns = (Column(name="task", kind="text"), Column(name="drift", kind="number"))
    return Table(
        name="many", title="Many", columns=columns, rows=tuple((f"t{at}", at / 7) for at in range(rows))
    )


def compiled(texts: dict[str, bytes], folder: pathlib.Path) -> str:
    """The log of a document that loads what the fragments' own heads ask for, and nothing else."""
    packages = {line for text in texts.values() for line in re.findall(_PACKAGES, text.decode())}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    body = "".join(rf"\input{{{name.removesuffix('.tex')}}}\clearpage" for name in texts)
    document = (
        rf"\documentclass{{article}}{''.join(sorted(packages))}\begin{{document}}{body}\end{{document}}"
    )
    (folder / "all-of-them.tex").write_text(document, encoding="utf-8")
    command = [
        "pdflatex",
        "-no-shell-escape",
        "-interaction=nonstopmode",
        "-halt-on-error",
        "all-of-them.tex",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_fragments_compile_with_what_they_ask_for(content: ReportContent, tmp_path: pathlib.Path) -> None:
    texts = {f"{at}.tex": text for at, text in enumerate(fragments(content).values())}
    texts["many.tex"] = fragments(with_table(content, numbers(200)))["many.tex"]
    log = compiled(texts, tmp_path)
    assert not re.findall(r"Overfull|Missing character|too large|multiply defined", log)


def test_a_long_table_goes_on_without_losing_a_row(content: ReportContent) -> None:
    table = numbers(100)
    text = fragments(with_table(content, table))["many.tex"].decode()
    assert re.findall(r"^(t\d+) &", text, re.MULTILINE) == [row[0] for row in table.rows]
    parts = text.split(r"\begin{table}")[1:]
    assert len(parts) == 3
    assert [r"(continued)}" in part for part in parts] == [False, True, True]
    assert [r"\driftfoot{" in part for part in parts] == [False, False, True]
    assert len(set(re.findall(r"\\label\{(.*)\}", text))) == 3


def test_long_words_go_on_in_the_next_line(content: ReportContent) -> None:
    text = fragments(content)["models.tex"].decode()
    alignment = next(line for line in text.splitlines() if line.startswith(r"\begin{tabular}"))
    assert alignment.endswith(r"p{16em}}")
    assert SOURCE in text.replace(r"\allowbreak{}", "").replace(r"\_", "_")


def test_columns_of_one_unit_have_the_same_digits(content: ReportContent) -> None:
    columns = (Column(name="measure", kind="text"), *(Column(name=name, kind="number") for name in "ab"))
    table = Table(
        name="x", title="X", columns=columns, rows=(("drift", 12.3456, 0.5), ("cosine", 0.25, 0.125))
    )
    text = fragments(with_table(content, table))["x.tex"].decode()
    assert r"drift & 12.3456 & 0.5000 \\" in text


def test_a_column_of_words_that_says_nothing_is_left_out(content: ReportContent) -> None:
    columns = (
        Column(name="check", kind="text"),
        Column(name="reason", kind="text"),
        Column(name="n", kind="count"),
    )
    table = Table(name="x", title="X", columns=columns, rows=(("a", "", 1), ("b", None, None)))
    text = fragments(with_table(content, table))["x.tex"].decode()
    assert "reason" not in text and r"b & -- \\" in text
