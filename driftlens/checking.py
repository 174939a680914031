"""Checking a run: the user's checks, or those that every run makes on itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftlens.files import PathLike
from driftlens.records.checks import CheckReport, run_checks, run_self_checks
from driftlens.records.run import DriftRun, open_run


def check(run: DriftRun | PathLike, tests: PathLike | Mapping[str, Any] | None = None) -> CheckReport:
    """The verdicts on a run; `check(...).raise_if_failed()` stops a script on the first bad one.

    Args:
        run: a run, or its folder.
        tests: a YAML file of checks, or the mapping in it; None runs the built-in self-checks.

    Raises:
        SpecError: the checks make no sense; path, value and remedy are named.
        RunError: the run, or one of its tables, can't be read.
    """
    checks = None
    if tests is not None:
        from driftlens.spec.checks import load_checks

        checks = load_checks(tests)
    opened = run if isinstance(run, DriftRun) else open_run(run)
    return run_self_checks(opened) if checks is None else run_checks(opened, checks)
