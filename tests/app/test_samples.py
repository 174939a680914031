"""Samples: pictures belong to their samples, and what a run lacks or has damaged is said in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from driftlens.runs.manifest import thumbs_file
from driftlens.runs.run import open_run
from driftlens_reports.explorer import Explorer
from tests.app.conftest import Open
from tests.app.pages import errors, said
from tests.runs.full_run import write_full_run, write_run


def embedded(app: AppTest) -> dict[str, Any]:
    """What the page gives its explorer."""
    (given,) = [at.proto.json for at in app.get("bidi_component") if at.proto.component_name.endswith("explorer")]
    told: dict[str, Any] = json.loads(given)
    return told


def brought(app: AppTest) -> str:
    """The name of the explorer's page and, if the browser lacks it, the page."""
    (given,) = [
        at.proto.bytes for at in app.get("bidi_component") if at.proto.component_name.endswith("explorer_page")
    ]
    text: str = given.decode()
    return text


def test_without_a_repair_a_link_stands_for_the_command(open_app: Open, tmp_path: Path) -> None:
    run = write_run(tmp_path / "bare")
    app = open_app(tmp_path, "samples")
    name, page = brought(app).split("\n", 1)
    assert name == embedded(app)["page"] and "No repaired model yet." in page
    assert "driftlens calibrate" not in page
    assert "driftlens calibrate" in Explorer(run).page.decode()
    assert [link.proto.label for link in app.get("page_link")] == ["Repair this run"]


def test_the_page_of_the_explorer_is_sent_once_for_all_pages_of_the_dashboard(open_app: Open, root: Path) -> None:
    app = open_app(root, "samples")
    first = brought(app)
    app.switch_page("views/repair.py").run()
    assert brought(app) == first[:65] and len(first) > 10_000


@pytest.mark.slow
def test_without_class_scores_the_output_page_says_what_gives_them(open_app: Open, tmp_path: Path) -> None:
    write_full_run(tmp_path / "full", has_labels=False)
    write_run(tmp_path / "bare", has_labels=False, has_heads=False, name="bare")
    app = open_app(tmp_path, "samples", part="Decisions", run=open_run(tmp_path / "bare").id)
    assert not app.error
    told = said(app)
    assert "The run has no class scores. Add `heads` to the spec" in told and "with heads of two classes" in told


@pytest.mark.slow
def test_a_damaged_file_of_pictures_is_an_error_in_its_place(open_app: Open, root: Path) -> None:
    file = root / "full" / thumbs_file("cars")
    file.parent.mkdir()
    file.write_bytes(b"PK no archive")
    app = open_app(root, "samples", task="cars")
    assert "cars.npz" in errors(app) and app.radio(key="part").value == "Explore"


@pytest.mark.slow
def test_the_flips_that_overview_counts_are_what_the_explorer_is_asked_for(open_app: Open, root: Path) -> None:
    app = open_app(root, "overview", task="cars")
    app.button(key="to-samples").click().run()
    told = embedded(app)
    assert (told["show"], told["task"]) == ("", "cars")
    assert told["state"] == "task=cars&stage=merged&only.flip=1&sort=margin" and told["asked"]
