"""`check`, `compare` and `project` on the command line: exit codes, one JSON document, text that says what is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from driftlens.results.compare import compare
from driftlens.runs.run import open_run
from driftlens.runs.verify import verify_files
from tests.cli.conftest import Cli
from tests.runs.full_run import Size, write_full_run
from tests.runs.spoiling import spoil

SIZE = Size(blocks=1, samples=8, width=5, tests=200)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_run(tmp_path_factory.mktemp("judging") / "run", tasks=("cars", "dtd"), size=SIZE)


@pytest.fixture
def own(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own"))


@pytest.fixture
def checks(tmp_path: Path) -> Callable[..., Path]:
    def write(*entries: str) -> Path:
        file = tmp_path / "checks.yaml"
        file.write_text("checks:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries))
        return file

    return write


def test_a_failed_check_is_exit_code_three_with_its_number(
    run_cli: Cli, written: Path, checks: Callable[..., Path], tmp_path: Path
) -> None:
    file = checks("metric: cos_mean, agg: max, lte: 0.5, name: low", "metric: drift_rel, per: task, gte: 0")
    junit = tmp_path / "deep" / "out.xml"
    result = run_cli("check", written, "--tests", file, "--junit", junit)
    assert result.code == 3 and result.err == ""
    largest = open_run(written).layers()["cos_mean"].max()
    assert f"fail: low: {largest:.4g} (n = {SIZE.samples}) at task" in result.out and "wanted <= 0.5" in result.out
    assert result.out.splitlines()[-1] == "2 passed, 1 failed"
    assert ElementTree.parse(junit).getroot().get("failures") == "1"


def test_results_as_json_are_one_document(run_cli: Cli, written: Path, checks: Callable[..., Path]) -> None:
    file = checks("metric: cos_mean, per: task, gte: -1", "metric: cos_mean, where: {layer: 99}, gte: 0")
    result = run_cli("check", written, "--tests", file, "--json")
    document = json.loads(result.out)
    assert result.code == 0 and document["ok"] is True and document["run"] == open_run(written).id
    assert (document["pass"], document["skip"], document["executed"]) == (2, 1, 2)
    assert [entry["group"] for entry in document["results"]] == [{"task": "cars"}, {"task": "dtd"}, {}]
    assert document["results"][2]["value"] is None and "no layer 99" in document["results"][2]["reason"]


def test_that_nothing_was_checked_is_said(run_cli: Cli, written: Path, checks: Callable[..., Path]) -> None:
    file = checks("metric: cos_mean, where: {variant: 'calibrated:x'}, gte: 0")
    result = run_cli("check", written, "--tests", file)
    assert result.code == 0
    assert result.out.splitlines()[-1].endswith("1 skipped, no check was executed")


def test_a_warning_is_said_and_passes(run_cli: Cli, written: Path, checks: Callable[..., Path]) -> None:
    result = run_cli("check", written, "--tests", checks("metric: cos_mean, gte: 2, severity: warn"))
    assert result.code == 0 and result.out.splitlines()[-1] == "0 passed, 0 failed, 1 warned"


def test_without_a_file_the_self_checks_run(run_cli: Cli, written: Path) -> None:
    result = run_cli("check", written, "--json")
    found = {entry["metric"]: entry for entry in json.loads(result.out)["results"]}
    assert found["closure"]["value"] == open_run(written).layers()["closure_error"].max()
    assert found["contributions"]["status"] == "fail" and result.code == 3


def test_a_check_that_makes_no_sense_is_wrong_usage(run_cli: Cli, written: Path, checks: Callable[..., Path]) -> None:
    result = run_cli("check", written, "--tests", checks("metric: cos_maen, gte: 0"))
    assert result.code == 2 and "cos_maen" in result.message and "cos_mean" in result.hint


def test_two_variants_are_compared_task_by_task(run_cli: Cli, written: Path) -> None:
    result = run_cli("compare", written)
    rows = compare(written).tasks.set_index("task")
    assert result.code == 0 and "merged -> featcal" in result.out
    for task in ("cars", "dtd"):
        line = next(line for line in result.out.splitlines() if line.startswith(task))
        assert f"{100 * rows.loc[task, 'drift_relative']:+.1f} %" in line
        assert f"{100 * rows.loc[task, 'score_change']:+.1f}" in line
    assert "rescaling" not in result.out and "diagnosis samples answered by both" in result.out


@pytest.mark.slow
def test_equal_runs_are_said_to_be_equal_and_no_more(run_cli: Cli, written: Path) -> None:
    said = run_cli("compare", written, written).out.strip().split("\n\n")
    assert len(said) == 2 and said[1].startswith("Bit-identical: ")
    other = run_cli("compare", written, written, "--before", "base", "--after", "merged").out.split("\n\n")
    assert other[1] == said[1] and other[2].splitlines()[1].startswith("mean change of accuracy over 2 tasks: ")


@pytest.mark.slow
def test_compared_runs_as_json_hold_every_layer(run_cli: Cli, written: Path, own: Path) -> None:
    document = json.loads(run_cli("compare", written, own, "--json").out)
    assert document["equality"]["bit_equal"] is True and document["mismatches"] == []
    assert len(document["layers"]) == 2 * 4 * 3 and len(document["pairs"]) == 4
    assert all(row["drift_change"] == 0 for row in document["layers"])


@pytest.mark.slow
def test_a_tolerance_is_demanded_with_exit_code_three(run_cli: Cli, written: Path, own: Path) -> None:
    assert run_cli("compare", written, own, "--tolerance", 0).code == 0
    value = pq.read_table(own / "tables" / "samples.parquet")["cos"][0].as_py()
    spoil(own, "samples", 0, "cos", value - 1e-4)
    loose = run_cli("compare", written, own, "--tolerance", 1e-3)
    assert loose.code == 0 and "Equal within 0.001" in loose.out and "samples.cos" in loose.out
    tight = run_cli("compare", written, own, "--tolerance", 1e-5)
    assert tight.code == 3 and "Not equal within 1e-05" in tight.out
    assert run_cli("compare", written, own).code == 0  # nothing was demanded
    alone = run_cli("compare", written, "--tolerance", 1e-3)
    assert alone.code == 2 and "second" in alone.hint


def test_names_that_would_steer_the_terminal_are_made_harmless(run_cli: Cli, tmp_path: Path) -> None:
    """Those that reverse what is read, and those that nobody sees, too."""
    steering = "\x1b\u061c\u200b\u200e\u200f\u202e\u2066\ufeff"
    path = write_full_run(tmp_path / "run", tasks=(f"{steering}[31mred",), size=SIZE)
    junit = tmp_path / "checks.xml"
    for command in (["check", path, "--junit", junit], ["compare", path], ["show", path]):
        result = run_cli(*command)
        assert not {*steering} & {*result.out, *result.err}, command
        assert command[0] == "check" or "[31mred" in result.out
    assert not {*steering} & {*junit.read_text(encoding="utf-8")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_full_run(tmp_path / "run", tasks=("cars",), size=Size(1, 3, 3, 2, 10))


def test_without_a_folder_the_report_lands_in_the_run(run_cli: Cli, run: Path) -> None:
    result = run_cli("report", run, "--format", "html-light,md", "--sections", "summary")
    assert result.code == 0
    names = ["report-light.html", "report.md"]
    assert result.out.splitlines() == [f"wrote {run / 'reports' / name}" for name in names]
    assert {f"reports/{name}" for name in names} <= set(open_run(run).manifest.files)
    assert verify_files(run).ok


@pytest.mark.slow
def test_with_a_folder_the_run_is_left_alone(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = run_cli("report", run, "--format", "json, latex", "--out", tmp_path / "out", "--json")
    paths = [Path(path) for path in json.loads(result.out)]
    assert paths[0] == tmp_path / "out" / "report.json" and all(path.is_file() for path in paths)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


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
    arguments: list[str], code: int, message: str, run_cli: Cli, run: Path
) -> None:
    result = run_cli("report", run, *arguments)
    assert result.code == code
    assert message in result.message
    assert not (run / "reports").exists()


@pytest.mark.slow
def test_a_notebooks_backend_that_is_not_here_is_no_obstacle(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "driftlens", "report", str(run), "--format", "html-light"]
    environment = {**os.environ, "MPLBACKEND": "no_such_backend"}
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "report-light.html").is_file(), done.stderr
