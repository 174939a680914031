"""`driftlens report`: where it writes, what it says, and how it refuses."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from driftlens.runs.run import open_run
from driftlens.runs.verify import verify
from tests.cli.conftest import Cli
from tests.records.full_run import Size, write_full_run


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_full_run(tmp_path / "run", tasks=("cars",), size=Size(1, 3, 3, 2, 10))


def test_without_a_folder_the_report_lands_in_the_run(run_cli: Cli, run: pathlib.Path) -> None:
    result = run_cli("report", run, "--format", "html-light,md", "--sections", "summary")
    assert result.code == 0
    names = ["report-light.html", "report.md"]
    assert result.out.splitlines() == [f"wrote {run / 'reports' / name}" for name in names]
    assert {f"reports/{name}" for name in names} <= set(open_run(run).manifest.files)
    assert verify(run).ok


def test_with_a_folder_the_run_is_left_alone(run_cli: Cli, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = run_cli("report", run, "--format", "json, latex", "--out", tmp_path / "out", "--json")
    paths = [pathlib.Path(path) for path in json.loads(result.out)]
    assert paths[0] == tmp_path / "out" / "report.json" and all(path.is_file() for path in paths)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_many_files_of_one_kind_are_one_line(run_cli: Cli, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    result = run_cli("report", run, "--format", "csv", "--out", out, "--sections", "glossary")
    assert result.out == f"wrote {len(list((out / 'csv').iterdir()))} files in {out / 'csv'}\n"


def test_named_sections_are_those_of_the_report(
    run_cli: Cli, run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run_cli("report", run, "--format", "json", "--out", tmp_path, "--sections", "checks,verdict")
    content = json.loads((tmp_path / "report.json").read_text())
    assert [section["name"] for section in content["sections"]] == ["verdict", "checks"]


def test_results_of_checks_are_shown_and_do_not_fail_the_command(
    run_cli: Cli, run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    checks = tmp_path / "checks.yaml"
    checks.write_text("checks:\n  - {metric: cos_mean, gte: 2, name: impossible}\n")
    result = run_cli(
        *("report", run, "--format", "md", "--out", tmp_path, "--sections", "checks", "--checks", checks)
    )
    assert result.code == 0
    assert "impossible" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--format", "pdf"], 2, "a report has no format 'pdf'; there are html,"),
        (["--format", ","], 2, "no format is chosen"),
        (["--sections", "layer"], 2, "a report has no section 'layer'; there are verdict,"),
        (["--checks", "absent.yaml"], 2, "absent.yaml"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], code: int, message: str, run_cli: Cli, run: pathlib.Path
) -> None:
    result = run_cli("report", run, *arguments)
    assert result.code == code
    assert message in result.message
    assert not (run / "reports").exists()


def test_a_folder_that_is_no_run_is_exit_code_four(run_cli: Cli, tmp_path: pathlib.Path) -> None:
    result = run_cli("report", tmp_path)
    assert result.code == 4 and "is not a run" in result.message


@pytest.mark.slow
def test_a_notebooks_backend_that_is_not_here_is_no_obstacle(
    run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "driftlens", "report", str(run), "--format", "html-light"]
    environment = {**os.environ, "MPLBACKEND": "no_such_backend"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and (tmp_path / "out" / "report-light.html").is_file(), done.stderr
