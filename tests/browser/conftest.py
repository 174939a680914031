"""Fixtures of this folder: the real server on saved runs, and a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftlens.runs.manifest import THUMB_SIDE as SIDE, thumbs_file
from driftlens.runs.run import DriftRun, open_run
from tests.browser.chromium import lacking, launch
from tests.browser.server import serving
from tests.pipelines.fixtures import light, world
from tests.runs.full_run import write_full_run

__all__ = ["app_url", "browser", "light", "page", "runs_folder", "workshop", "world"]

PATIENCE = 60_000
"""Milliseconds that a page may take to show something while other tests compute."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one, tests skip, or fail where DRIFTLENS_REQUIRE_BROWSER=1 asks for it."""
    reason = lacking()
    if reason:
        if os.environ.get("DRIFTLENS_REQUIRE_BROWSER") == "1":
            pytest.fail(f"DRIFTLENS_REQUIRE_BROWSER=1, but {reason}")
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        started = launch(playwright)
        yield started
        started.close()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs: one calibrated, with pictures of one task, and one merged only."""
    folder = tmp_path_factory.mktemp("runs")
    write_full_run(folder / "merged", name="merged only", variants=("base", "merged"), seed=1)
    write_full_run(folder / "full", name="full run")
    _save_pictures(open_run(folder / "full"), "mnist")
    return folder


@pytest.fixture(scope="session")
def app_url(browser: Any, runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard on `runs_folder`."""
    with serving(runs_folder, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def _bench(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A dashboard for runs that a test writes, changes or makes: one server for all, as each takes seconds to start."""
    root = tmp_path_factory.mktemp("bench") / "runs"
    root.mkdir()
    with serving(root, root.with_name("log")) as address:
        yield address, root


@pytest.fixture
def workshop(_bench: tuple[str, Path]) -> Iterator[tuple[str, Path]]:
    """The address of a dashboard on an empty folder, and that folder, which is emptied behind the test."""
    yield _bench
    for left in _bench[1].iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh browser page in the light theme."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    context.set_default_timeout(PATIENCE)
    yield context.new_page()
    context.close()


def _save_pictures(run: DriftRun, task: str) -> None:
    """A grey of its own for every diagnosis sample."""
    greys = np.arange(len(run.sample_ids(task)), dtype=np.uint8)
    file = run.path / thumbs_file(task)
    file.parent.mkdir()
    np.savez_compressed(file, pictures=np.broadcast_to(greys[:, None, None, None], (len(greys), SIDE, SIDE, 3)).copy())
