"""What tests of judging share: the size of their full run, and one check at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import driftlens as dl
from driftlens.results.checks import CheckResult
from driftlens.runs.run import DriftRun
from tests.runs.drawn_runs import CAL, CONTROL, OTHER
from tests.runs.full_run import Size

SIZE = Size(blocks=2, samples=9, width=5, tests=200)
CALIBRATED = "calibrated:featcal"


def judge(run: DriftRun | Path, **entry: Any) -> list[CheckResult]:
    return list(dl.check(run, {"checks": [entry]}).results)


def only(run: DriftRun | Path, **entry: Any) -> CheckResult:
    (result,) = judge(run, **entry)
    return result


def at(**right: Sequence[int]) -> dict[tuple[str, str], int]:
    """Right answers of every model on tasks t0, t1 and so on."""
    names = {"cal": CAL, "other": OTHER, "control": CONTROL}
    return {
        (f"t{task}", names.get(name, name)): k
        for task in range(len(right["merged"]))
        for name, ks in right.items()
        for k in [ks[task]]
    }
