"""A run that was measured without tracing its drift back to layers: its pages offer to do so as a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from driftlens.runs.run import open_run
from driftlens_app import processes
from driftlens_app.processes import poll_job
from tests.app.conftest import Open, until
from tests.app.pages import called, errors, finish, press, said, state, step
from tests.quick import few
from tests.runs.full_run import write_full_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("worker")]
BUTTON = "Attribute the drift to layers"
VIEWS = ("layers", "overview")
COLUMNS = ("final_share", "remainder_share", "prefix_share", "jacobian_error", "jacobian_samples", "nodes")


def leave_out(run: Path, *variants: str, columns: Sequence[str] = COLUMNS) -> bytes:
    """Take the attribution of these variants out, as `--no-attribution` does; returns the table as it was."""
    file = run / "tables" / "layers.parquet"
    before, rows = file.read_bytes(), pq.read_table(file)
    is_left_out = pc.is_in(rows["variant"], pa.array(variants))
    for name in columns:
        at = rows.schema.get_field_index(name)
        empty = pa.nulls(len(rows), rows.schema.field(at).type)
        rows = rows.set_column(at, rows.schema.field(at), pc.if_else(is_left_out, empty, rows[name]))
    pq.write_table(rows, file)
    return before


@pytest.fixture
def run(root: Path) -> Path:
    """A run of which no variant has an attribution."""
    leave_out(root / "full", *open_run(root / "full").variants)
    return root / "full"


@pytest.mark.parametrize("view", ("overview", "samples"))
def test_a_run_that_was_stopped_before_its_first_layer_is_shown(open_app: Open, root: Path, view: str) -> None:
    file = root / "full" / "tables" / "layers.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    app = open_app(root, view)
    assert "KeyError" not in str(errors(app)) and BUTTON not in [button.label for button in app.button]


@pytest.mark.parametrize("view", few(VIEWS, quick=["layers"]))
def test_the_button_starts_the_command_whose_progress_is_shown_until_the_columns_are_there(
    open_app: Open, root: Path, view: str
) -> None:
    run = root / "full"
    before = leave_out(run, "merged", "calibrated:featcal")
    app = press(open_app(root, view, layers="Sources"), BUTTON)
    assert called(run) == ["analyze", str(run), "--progress", "jsonl"]
    step(run, 0)
    until(lambda: (view := poll_job(run)) is not None and view.progress.done == 1, "one layer is done")  # type: ignore[union-attr]
    app.run()
    assert "Attribution of full" in said(app) and "layer 3 of 6" in said(app)
    assert BUTTON not in [button.label for button in app.button]
    (run / "tables" / "layers.parquet").write_bytes(before)
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    app.run()
    assert "not traced back" not in said(app) and not app.error
    assert not {BUTTON, "Cancel"} & {button.label for button in app.button}


def test_only_the_models_that_lack_it_are_named(open_app: Open, root: Path) -> None:
    leave_out(root / "full", "calibrated:featcal")
    app = open_app(root, "layers", layers="Sources")
    assert "not attributed to layers yet: featcal." in said(app)
    assert len(app.get("plotly_chart")) > 0


def test_overview_says_once_that_it_is_lacking(open_app: Open, root: Path) -> None:
    leave_out(root / "full", "merged", "calibrated:featcal")
    app = open_app(root, "overview")
    assert [note.value for note in app.info if "attribut" in note.value] == [
        "Drift not attributed to layers yet: merged; featcal."
    ]


@pytest.mark.parametrize("view", few(VIEWS, ["layers"]))
def test_a_run_with_it_offers_nothing(open_app: Open, root: Path, view: str) -> None:
    app = open_app(root, view, layers="Sources")
    assert BUTTON not in [button.label for button in app.button] and "not traced back" not in said(app)


def test_what_another_spec_would_give_names_its_command(open_app: Open, root: Path) -> None:
    run = open_run(write_full_run(root / "headless", has_heads=False))
    app = open_app(root, "samples", run=run.id, part="Decisions")
    assert "in the spec" in said(app) and "driftlens analyze" in said(app) and not app.exception


@pytest.mark.parametrize("view", few(VIEWS, ["layers"]))
def test_a_read_only_dashboard_only_says_so(open_app: Open, root: Path, run: Path, view: str) -> None:
    app = open_app(root, view, layers="Sources", read_only=True)
    assert "not attributed to layers yet" in said(app)
    assert BUTTON not in [button.label for button in app.button] and not errors(app)
    assert not processes._CHILDREN
