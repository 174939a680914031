"""What holds for all formats: the same numbers, the same bytes, no torch, and an answer to every kind of bad run."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from driftlens.base.errors import RunError, SpecError
from driftlens.base.variants import title
from driftlens.findings.reading import written
from driftlens.findings.table import INTERVAL
from driftlens.findings.verdict import task_sheet, verdict
from driftlens.runs import layout, schema, tables
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify
from driftlens_reports.build import Report, formats
from tests.records.full_run import Size, write_full_run
from tests.reports.conftest import HOSTILE, SMALL
from tests.reports.formats.reading import Page, markdown_tables

Key = tuple[str, str]
TITLE = "Final feature against each task's expert"


@pytest.fixture(scope="module")
def files(standard: Report) -> dict[str, bytes]:
    return standard.files(formats())


def expected(run: DriftRun) -> dict[Key, float]:
    return {
        (task, title(variant)): run.value("drift_l2_mean", task=task, variant=variant)
        for task in run.tasks
        for variant in run.variants
    }


def in_html(data: bytes) -> dict[Key, float]:
    page = Page(data.decode())
    rows = page.tables["final-drift"][1:]
    numbers = page.exact["final-drift"]
    return {(row[0], row[1]): numbers[at * (len(numbers) // len(rows))] for at, row in enumerate(rows)}


def in_json(data: bytes) -> dict[Key, float]:
    sections = json.loads(data)["sections"]
    table = next(
        table for section in sections for table in section["tables"] if table["name"] == "final-drift"
    )
    return {(row[0], row[1]): row[2] for row in table["rows"]}


def in_csv(data: bytes) -> dict[Key, float]:
    rows = csv.DictReader(io.StringIO(data.decode()))
    return {(row["task"], row["model"]): float(row["L2 drift"]) for row in rows}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("report.html", in_html),
        ("report-light.html", in_html),
        ("report.json", in_json),
        ("csv/report-final-drift.csv", in_csv),
    ],
)
def test_every_digit_of_the_final_drift_is_that_of_the_table(
    name: str, read: Callable[[bytes], dict[Key, float]], full: DriftRun, files: dict[str, bytes]
) -> None:
    assert read(files[name]) == expected(full)


def test_markdown_shows_the_same_numbers_rounded(full: DriftRun, files: dict[str, bytes]) -> None:
    (rows,) = markdown_tables(files["report.md"].decode()).values()
    sheet = task_sheet(full, verdict(full))
    assert rows == sheet.texts()
    ends = [f"{written(row[6], 'points')} to {written(row[7], 'points')}" for row in sheet.rows]
    assert [*sheet.kinds][6:8] == ["95 % low", "95 % high"] and [row[6] for row in rows] == [INTERVAL, *ends]


def test_latex_shows_the_same_numbers_rounded(full: DriftRun, files: dict[str, bytes]) -> None:
    lines = [line for line in files["latex/final-drift.tex"].decode().splitlines() if line.count("&") == 6]
    found = {
        (cells[0], cells[1]): cells[2].partition(r" $\pm$ ")[0]
        for cells in ([part.strip() for part in line.split("&")] for line in lines[1:])
    }
    assert all(line.count(r"$\pm$") == 3 for line in lines[1:])
    assert found == {key: f"{value:.3f}" for key, value in expected(full).items()}


def test_the_runs_own_tables_are_in_csv_with_every_digit(full: DriftRun, files: dict[str, bytes]) -> None:
    rows = list(csv.DictReader(io.StringIO(files["csv/layers.csv"].decode())))
    shown = [float(row["cos_mean"]) for row in rows]
    assert shown == full.layers()["cos_mean"].tolist()
    units = list(csv.DictReader(io.StringIO(files["csv/layers.units.csv"].decode())))
    assert [row["column"] for row in units] == list(schema.LAYERS.names) == list(rows[0])
    assert {row["column"]: row["unit"] for row in units}["drift_l2_mean"] == "feature"


def test_single_samples_are_in_csv_only_if_asked_for(full: DriftRun, files: dict[str, bytes]) -> None:
    assert "csv/samples.csv" not in files
    raw = Report(full, "summary", raw=True).files(["csv"])
    assert len(raw["csv/samples.csv"].splitlines()) == len(full.samples()) + 1


@pytest.mark.slow
def test_a_second_report_has_the_same_bytes(full: DriftRun, files: dict[str, bytes]) -> None:
    assert Report(open_run(full.path)).files(formats()) == files


def test_saving_leaves_the_files_and_nothing_else(
    standard: Report, files: dict[str, bytes], tmp_path: pathlib.Path
) -> None:
    light = ["json", "md", "csv", "latex"]  # the others are drawn, which takes long, and saved no other way
    paths = standard.save(tmp_path / "out", light)
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in paths}
    assert found == {name: data for name, data in files.items() if not name.endswith(".html")}
    assert sorted(paths) == sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_a_report_in_the_run_is_one_of_its_files(tmp_path: pathlib.Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", size=SMALL))
    paths = Report(run, "summary").attach(["json", "md"])
    listed = {run.path / name for name in open_run(run.path).manifest.files if name.startswith("reports/")}
    assert set(paths) == listed and len(paths) == 2
    assert verify(run.path).ok


def test_an_unknown_format_is_refused_with_the_nearest(standard: Report) -> None:
    with pytest.raises(SpecError, match="no format 'htlm'") as caught:
        standard.files(["htlm"])
    assert "'html'" in caught.value.hint


@pytest.mark.slow
def test_reports_need_neither_torch_nor_streamlit(full: DriftRun) -> None:
    script = """
        import sys
        sys.modules["torch"] = sys.modules["streamlit"] = None
        from driftlens_reports.build import Report, formats
        report = Report(sys.argv[1])
        assert report.files(["json", "html"]) and "matplotlib" not in sys.modules  # it takes as long to import
        print(len(report.files(formats())) > 50)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(full.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


TINY = Size(blocks=1, samples=3, width=3, classes=2, tests=10)
RUNS: dict[str, dict[str, object]] = {
    "one task": {"tasks": ["cars"]},
    "no blocks": {"tasks": ["cars"], "size": Size(0, 3, 3, 2, 10), "variants": ("base", "merged")},
    "one sample": {"tasks": ["cars", "dtd"], "size": Size(1, 1, 3, 2, 10)},
    "not calibrated": {"tasks": ["cars", "dtd"], "variants": ("base", "merged")},
    "only the base": {"tasks": ["cars", "dtd"], "variants": ("base",)},
    "no merged model": {"tasks": ["cars", "dtd"], "variants": ("calibrated:a", "calibrated:b")},
    "no labels": {"tasks": ["cars"], "has_labels": False},
    "names with markup": {
        "name": HOSTILE,
        "tasks": [f"{HOSTILE} 手写", "$\\input{/etc/passwd}$", "=cmd|' /C calc'!A0\x1b[31mred\nline"],
        "class_names": [HOSTILE, "=1+1"],
        "variants": ("merged", "calibrated:featcal"),
    },
}


QUICK = ("no blocks",)


@pytest.mark.parametrize(
    "made",
    [pytest.param(made, marks=() if name in QUICK else pytest.mark.slow) for name, made in RUNS.items()],
    ids=RUNS,
)
def test_every_run_has_a_report_in_every_format_and_no_invented_number(
    made: dict[str, object], tmp_path: pathlib.Path
) -> None:
    folder = write_full_run(tmp_path / "run", **{"size": TINY, **made})  # type: ignore[arg-type]
    found = Report(folder).files(formats())
    for name in ("report.md", "report-light.html", "latex/final-drift.tex"):
        assert not re.search(r"\b(nan|inf|None|<NA>)\b", found[name].decode()), name
    assert json.loads(found["report.json"])["run"]["tasks"] == list(open_run(folder).tasks)


def test_columns_that_hold_nothing_are_said_to_be_missing(tmp_path: pathlib.Path) -> None:
    folder = write_full_run(tmp_path / "run", size=TINY)
    for table in schema.TABLES.values():
        path = folder / layout.table_file(table.name)
        if path.exists():
            rows = tables.read_table(path, table)
            numbers = [
                c.name for c in table.columns if c.dtype in ("float", "bool") and c.name not in table.key
            ]
            path.unlink()
            tables.append_rows(path, table, rows.drop(columns=numbers))
    content = Report(folder, "full").content
    assert {figure.name for figure in content.figures if not figure.missing} == set()
    assert content.verdict.changes == ()
    assert set(Report(folder).files(["html-light", "md", "json"])) >= {"report-light.html", "report.md"}


@pytest.mark.parametrize("harm", ["truncated", "removed"])
def test_a_damaged_table_is_an_error_that_names_it(harm: str, tmp_path: pathlib.Path) -> None:
    folder = write_full_run(tmp_path / "run", size=TINY)
    path = folder / layout.table_file("layers")
    path.write_bytes(path.read_bytes()[:200]) if harm == "truncated" else path.unlink()
    with pytest.raises(RunError, match=re.escape(str(path))):
        Report(folder).save(tmp_path / "out", formats())
    assert not (tmp_path / "out").exists()
