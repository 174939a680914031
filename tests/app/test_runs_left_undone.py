"""The list of runs on a finished run whose further calibration ended early."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlens.errors import Cancelled
from driftlens.records.writer import RunWriter
from tests.app.conftest import Open


def test_a_cancelled_calibration_is_told_beside_a_run_that_is_done(open_app: Open, root: Path) -> None:
    with pytest.raises(Cancelled), RunWriter.resume(root / "full") as writer:
        writer.begin_variants(["calibrated:x"])
        with writer.phase("calibrate:x"):
            raise Cancelled("cancelled")
    app = open_app(root)
    assert app.dataframe[0].value["state"].tolist() == ["done"]
    (said,) = [
        entry.value for entry in app.info if "calibration 'x' was cancelled" in entry.value.replace("\\", "")
    ]
    assert said.startswith("**full**") and "resume" in said
