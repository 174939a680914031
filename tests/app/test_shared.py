"""A folder that others change while it is looked at, and jobs that others start."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest

from driftlens.runs.run import open_run
from driftlens.utils.errors import RunLockedError
from driftlens_app import processes
from driftlens_app.processes import poll_job
from driftlens_app.run_cache import list_runs
from driftlens_app.settings import Settings
from driftlens_app.show import escape_markdown
from tests.app.conftest import Open, until
from tests.app.pages import begin, errors, finish, record_job, said, state
from tests.refusing import refusing
from tests.runs.full_run import Size, write_full_run


@pytest.mark.slow
def test_a_viewed_run_that_vanishes_never_becomes_another(open_app: Open, root: Path, tmp_path: Path) -> None:
    viewed, newer = "full", write_full_run(root / "newer").name
    app = open_app(root, "overview", run=viewed)
    shutil.move(root / "full", tmp_path / "away")
    for page in ("overview", "overview", "layers", "runs"):
        app.switch_page(f"views/{page}.py").run()
        assert app.selectbox(key="run").value is None and f"run '{viewed}' is not here" in errors(app)
    shutil.move(tmp_path / "away", root / "full")
    app.run()
    assert app.selectbox(key="run").value == viewed and not app.error
    shutil.move(root / "full", tmp_path / "away")
    app.run()
    app.selectbox(key="run").select(newer).run()
    assert app.selectbox(key="run").value == newer and not app.error


@pytest.mark.parametrize("name", ["a link", "z link"])
def test_a_link_inside_the_folder_does_not_hide_the_run(root: Path, name: str) -> None:
    (root / name).symlink_to(root / "full")
    (root / f"{name} too").symlink_to(root / name)
    assert [(run.path.name, run.problem) for run in list_runs(Settings(root))] == [("full", "")]


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_another_users_job_is_refused_in_words_and_the_same_one_is_shared(run: Path) -> None:
    job = begin(run, "steady")
    assert begin(run, "steady").pid == job.pid
    words = ("full has a running job", "calibrate steady", "UTC")
    with refusing(RunLockedError, *words, hint="Wait for it or cancel it"):
        begin(run, "mine")
    assert len(processes._CHILDREN) == 1
    finish(run)
    until(lambda: state(run) == "done", "it is done")
    assert poll_job(run).job.name == "steady"  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_job_that_failed_while_the_server_was_down_shows_its_own_error(
    open_app: Open, root: Path, run: Path
) -> None:
    job = record_job(run / "logs", run, code=None, host=platform.node())
    assert "stopped unexpectedly" in errors(open_app(root, "repair"))
    job.log.write_text("loading\nerror: the disk is full\nhint: Make room on it.\n")
    assert poll_job(run).state == "failed"  # type: ignore[union-attr]
    app = open_app(root, "repair")
    assert "the disk is full" in errors(app) and "stopped unexpectedly" not in errors(app)


@pytest.mark.slow
def test_the_best_is_not_offered_where_too_few_samples_could_be_held_out(open_app: Open, root: Path) -> None:
    few = open_run(write_full_run(root / "few", size=Size(samples=7))).id
    app = open_app(root, "repair", run=few)
    (button,) = [each for each in app.button if each.label == "Find the best repair"]
    assert button.disabled and "has 7 calibration samples, but the search needs at least 8 per task" in said(app)
    (other,) = [each for each in app.button if each.label == "FeatCal calibrate"]
    assert not other.disabled


@pytest.mark.parametrize(
    "name",
    [
        "https://evil.example/a",
        "HTTP://evil.example",
        "www.evil.example",
        "Www.evil.example",
        "a@evil.example",
    ],
)
def test_an_address_in_a_name_is_text(name: str) -> None:
    """GitHub's Markdown looks for these in text whose escapes are already read (spec, section 6.9)."""
    shown = escape_markdown(f"see {name} there").replace("\\", "")
    assert not re.search(r"(https?://|www(?=\.))[-.\w]+|[-.\w+]+@[-\w]+(\.[-\w]+)+", shown, re.IGNORECASE)
    assert shown.replace("\N{WORD JOINER}", "") == f"see {name} there"
