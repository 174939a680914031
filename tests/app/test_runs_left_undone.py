"""The list of runs on a finished run whose further calibration ended early."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlens.errors import Cancelled
from driftlens.records.run import open_run
from driftlens.records.writer import RunWriter
from tests.app.conftest import Open
from tests.app.test_pages import OF_A_RUN, said


def test_a_cancelled_calibration_is_told_beside_a_run_that_is_done(open_app: Open, root: Path) -> None:
    with pytest.raises(Cancelled), RunWriter.resume(root / "full") as writer:
        writer.begin_variants(["calibrated:x"])
        with writer.phase("calibrate:x"):
            raise Cancelled("cancelled")
    app = open_app(root)
    assert app.dataframe[0].value["state"].tolist() == ["done"]
    (told,) = [
        entry.value for entry in app.info if "calibration 'x' was cancelled" in entry.value.replace("\\", "")
    ]
    assert told.startswith("**full**") and "resume" in told


@pytest.mark.parametrize("view", OF_A_RUN)
def test_a_damaged_status_is_told_and_keeps_no_page_from_its_run(
    open_app: Open, root: Path, view: str
) -> None:
    (root / "full" / "status.json").write_text('{"state": "done", "done": "x"}')
    app = open_app(root, view)
    assert not app.error and open_run(root / "full").id in app.query_params["run"]
    told = "status.json can't be read: done is 'x'. Remove it; the results do not depend on it."
    assert (told in said(app)) == (view == "overview")
    assert told in said(open_app(root, "runs"))
