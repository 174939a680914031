"""`driftlens sweep`: flags in, table and exit code out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlens.runs.run import open_run
from tests.cli.conftest import Cli
from tests.pipelines.calibrating import files_of

QUIET = ("--progress", "none")


@pytest.mark.slow
def test_the_table_holds_means_over_tasks_and_seeds(folder: Path, run_cli: Cli) -> None:
    shown = run_cli("sweep", folder, "--param", "n=4,2", "--seeds", 2, *QUIET)
    assert shown.code == 0
    rows = open_run(folder).sweeps()
    means = rows.groupby("n")["drift_l2_mean"].mean()
    lines = shown.out.splitlines()
    assert lines[0].split()[:6] == ["lam", "rho", "alpha", "n", "L2", "drift"]
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["0.05", "2", "0.3", f"{n}", f"{means[n]:#.3g}"] for n in (2, 4)
    ]
    by_seed = rows[rows["n"] == 2].groupby("seed")["accuracy"].mean()
    assert f"{100 * by_seed.mean():.1f} %" in lines[1] and f"{100 * by_seed.std():.1f} %" in lines[1]
    assert "means of 2 tasks, 2 seeds" in shown.out
    step = "(merged - base), so {0} times the step of Task Arithmetic"
    assert f"the anchor is base + 2 {step.format(2)}" in shown.out
    shown = run_cli("sweep", folder, "--param", "rho=1,2", "--param", "n=2", "--grid", *QUIET)
    assert f"the anchor is base + rho {step.format('rho')}" in shown.out
    shown = run_cli("sweep", folder, "--param", "rho=1", *QUIET)
    assert shown.code == 0 and "anchor" not in shown.out


@pytest.mark.slow
def test_one_document_on_stdout_with_every_row_of_the_sweeps_asked_for(folder: Path, run_cli: Cli) -> None:
    assert run_cli("sweep", folder, "--param", "rho=1", *QUIET).code == 0
    flags = ("--param", "lam=0.1", "--param", "lam=0.2", "--param", "alpha=0,1", "--grid")
    found = json.loads(run_cli("sweep", folder, *flags, "--json", *QUIET).out)
    assert found["sweeps"] == ["lam+alpha"] and len(found["rows"]) == 8
    assert {(row["lam"], row["alpha"]) for row in found["rows"]} == {
        (lam, alpha) for lam in (0.1, 0.2) for alpha in (0.0, 1.0)
    }


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--param", "lamda=1"), 2, "hint: Did you mean 'lam'?"),
        (("--param", "lam"), 2, "expected name=value"),
        (("--param", "n=1000"), 4, "1000 calibration samples requested"),
        (("--param", "lam=1", "--seeds", 0), 2, "sweep: --seeds: Input should be greater than or equal to 1"),
        (("--methods", "featcal", "--grid"), 2, "--preset, --seeds and --grid need a setting to vary"),
        ((), 2, "a sweep needs something to vary"),
    ],
)
def test_what_can_not_be_is_refused_in_two_lines_and_leaves_no_trace(
    folder: Path, run_cli: Cli, flags: tuple[object, ...], code: int, words: str
) -> None:
    before = files_of(folder)
    refused = run_cli("sweep", folder, *flags, *QUIET)
    assert (refused.code, refused.out) == (code, "")
    assert words in refused.err and "defect" not in refused.err
    assert files_of(folder) == before
