"""A spec that is pasted in a real browser, by the real engine: refused with its line, mended, and analyzed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from driftlens.runs.run import DriftRun, open_run
from tests.browser.reading import PATIENCE, check, settled
from tests.browser.server import serving

pytestmark = pytest.mark.slow


def test_a_broken_spec_is_mended_and_started(page: Any, light: DriftRun, tmp_path: Path) -> None:
    good = (light.path / "spec.yaml").read_text()
    lines = good.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("experts:"))
    bad = "\n".join([*lines[:at], "exprets:", *lines[at + 1 :]])
    root = tmp_path / "runs"
    root.mkdir()
    said: list[str] = []
    page.on("console", lambda entry: said.append(entry.text) if entry.type in ("error", "warning") else None)
    with serving(root, tmp_path / "log") as address:
        page.goto(f"{address}/new_run")
        settled(page)
        field, start = (
            page.get_by_label("Spec", exact=True),
            page.get_by_role("button", name="Start the analysis"),
        )
        # What is dropped lies in the field that could have been pasted into.
        dropped = {"name": "mine.yaml", "mimeType": "application/yaml", "buffer": bad.encode()}
        page.locator("input[type=file]").set_input_files(dropped)
        expect(field).to_have_value(bad)
        settled(page)
        expect(start).to_be_disabled()
        page.get_by_role("button", name="Check the spec").click()
        problem = page.get_by_test_id("stAlertContentError").filter(has_text=f"Line {at + 1}:")
        expect(problem).to_contain_text("exprets: unknown key", timeout=PATIENCE)
        expect(page.get_by_text(f"{at + 1}  exprets:")).to_be_visible()
        expect(start).to_be_disabled()

        field.fill(good)
        field.press("Control+Enter")
        settled(page)
        expect(problem).to_have_count(0)
        expect(start).to_be_disabled()
        check(page)
        expect(page.get_by_text("driftlens analyze pasted.yaml --out pasted")).to_be_visible()
        start.click()
        page.wait_for_url("**/overview?**", timeout=PATIENCE)
        assert open_run(root / "pasted").tasks == light.tasks
    assert not said
