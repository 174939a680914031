"""`docs/live.md`: its code runs as it stands, in the order of the page."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/live.md"


@pytest.mark.slow  # test_live_calibrate.py goes the same way in pieces
def test_the_page_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert {"at-rho-1", "featcal"} == set(names["run"].manifest.calibrations)  # type: ignore[attr-defined]
    assert (tmp_path / "calibrated/model.safetensors").is_file()
    assert (tmp_path / "report/report.html").is_file()
