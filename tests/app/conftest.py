"""Fixtures of this folder: a folder of runs, the app on it, and a stand-in for the command line."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from streamlit.components.v2 import manifest_scanner
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Expander
from typer.testing import CliRunner

from driftlens.cli import build_app
from driftlens_app import calibration, processes, run_cache
from driftlens_app.settings import Settings
from tests.runs.full_run import write_full_run

MAIN = Path(processes.__file__).with_name("main.py")
Open = Callable[..., AppTest]


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """For each app Streamlit reads the metadata of every installed package anew, and compiles the pages' files."""
    with pytest.MonkeyPatch.context() as patch:
        scan = manifest_scanner.scan_component_manifests
        patch.setattr(manifest_scanner, "scan_component_manifests", functools.cache(scan))
        patch.setattr(ScriptCache, "get_bytecode", ScriptCache().get_bytecode)  # one's, for all
        yield


@functools.cache
def catalogue() -> dict[str, Any]:
    """What `driftlens doctor --methods --json` prints."""
    return dict(json.loads(CliRunner().invoke(build_app(), ["doctor", "--methods", "--json"]).stdout))


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server asks which calibrators there are; the command loads torch, and its answer stays the same."""
    monkeypatch.setattr(calibration, "run_json_command", lambda *_: catalogue())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one finished run, merged and calibrated; what the dashboard may look at."""
    write_full_run(tmp_path / "runs" / "full", name="a *full* run")
    for name, value in Settings((tmp_path / "runs").resolve()).environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path / "runs"


@pytest.fixture
def run(root: Path) -> Path:
    return root / "full"


@pytest.fixture
def open_app(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the app on a folder, at one of its pages: `open_app(root, "overview", read_only=True, task="cars")`."""

    def opened(root: Path, view: str = "runs", *, read_only: bool = False, **query: str) -> AppTest:
        for name, value in Settings(root.resolve(), read_only).environment().items():
            monkeypatch.setenv(name, value)
        run_cache._cached_link_check.cache_clear()
        st.cache_resource.clear()
        app = AppTest.from_file(str(MAIN), default_timeout=120)
        for name, value in query.items():
            app.query_params[name] = value
        app.run()
        if view != "runs":
            app.switch_page(f"views/{view}.py").run()
        assert not app.exception, app.exception
        return app

    return opened


def open_sections(app: AppTest) -> list[str]:
    """Open the charts that stand closed under their titles, and return the titles."""
    closed = [drawer for drawer in app.expander if (drawer.key or "").startswith("section-")]
    for drawer in closed:
        app.session_state[drawer.key] = True
    if closed:
        app.run()
    return [drawer.label for drawer in closed]


def opened_drawers(app: AppTest, label: str) -> list[Expander]:
    """What is folded away behind `label`, after it was opened."""
    for drawer in app.expander:
        if drawer.label == label:
            app.session_state[drawer.key] = True
    app.run()
    return [drawer for drawer in app.expander if drawer.label == label]


def shown_data(app: AppTest) -> list[pd.DataFrame]:
    """The tables under the charts."""
    return [drawer.dataframe[0].value for drawer in opened_drawers(app, "Show data")]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs run the stand-in; those that a test leaves running are ended."""
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, str(Path(__file__).with_name("worker.py"))))
    children: dict[int, object] = {}
    monkeypatch.setattr(processes, "_CHILDREN", children)
    yield
    for process in list(children.values()):
        if process.poll() is None:  # type: ignore[attr-defined]
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        process.wait()  # type: ignore[attr-defined]


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds()`, at most as long as a busy machine may take."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)
