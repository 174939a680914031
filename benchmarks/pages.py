"""Wall time and server CPU time of a click: every page opened again; 8 tasks, 256 samples."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from typing import Any

import psutil

from benchmarks.figures import record
from driftlens_app.show import pages
from tests.browser.chromium import lacking, launch
from tests.browser.reading import settled
from tests.browser.server import serving
from tests.runs.full_run import Size, write_full_run

TASKS, SIZE = 8, Size(12, 256, 64)
VISITS = 5
WANTED, WANTED_OF_SERVER = 0.8, 0.1
"""Seconds by the clock, and of the server's processor."""

_DRAWN = """() => [...document.querySelectorAll('[data-testid=stPlotlyChart]')]
    .every(chart => chart.querySelector('.main-svg .cartesianlayer .subplot'))"""
_HAS_OTHER_TITLE = "before => ![before, undefined].includes(document.querySelector('h1')?.innerText)"
_STILL_FOR = "() => window.stillHeights ? (performance.now() - window.stillSince) / 1000 : 0"
_PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def run(device: str) -> None:
    """Record median seconds of every page and of its server, in a headless browser that draws in software."""
    del device
    reason = lacking()
    if reason:
        print(f"pages: not measured, since {reason}")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = pathlib.Path(scratch)
        write_full_run(folder / "runs" / "run", tasks=[f"task {at}" for at in range(TASKS)], size=SIZE)
        with serving(folder / "runs", folder / "log") as address:
            browser = launch(playwright)
            window = browser.new_page(viewport={"width": 1400, "height": 1000})
            window.goto(address)
            settled(window)
            found = _visited(window, server_at(address))
            browser.close()
    for name, (clock, processor) in found.items():
        case = f"{name}, opened again"
        record("pages", f"{case}: wall time of a click", f"{statistics.median(clock):.2f} s", f"at most {WANTED:g} s")
        target = f"at most {WANTED_OF_SERVER:.2f} s of server CPU"
        record("pages", f"{case}: server CPU of a click", f"{statistics.median(processor):.2f} s", target)


def server_at(address: str) -> psutil.Process:
    """The process that listens at an address of this machine."""
    port = int(address.rpartition(":")[2])
    (pid,) = {
        listening.pid
        for listening in psutil.net_connections("tcp")
        if listening.status == psutil.CONN_LISTEN and listening.laddr.port == port
    }
    return psutil.Process(pid)


def _visited(window: Any, server: psutil.Process) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of every click but the first, by page: by the clock, and of the server's processor."""
    names = [page.title for page in pages().values() if page.needs_run]
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}

    for _ in range(1 + VISITS):
        for name in names:
            before = sum(server.cpu_times()[:2])
            seconds[name][0].append(_visit(window, name))
            seconds[name][1].append(sum(server.cpu_times()[:2]) - before)
    return {name: (clock[1:], processor[1:]) for name, (clock, processor) in seconds.items()}


def _visit(window: Any, name: str) -> float:
    """Seconds from the click in the navigation until the script has run and every chart is drawn."""
    link = window.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True)
    before = window.locator("h1").inner_text()
    started = time.perf_counter()
    link.click()
    window.wait_for_function(_HAS_OTHER_TITLE, arg=before)
    return _drawn(window, started)


def _drawn(window: Any, started: float) -> float:
    """Seconds since `started` at which the script has run, every chart is drawn, and frames have their height."""
    window.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for(timeout=60_000)
    window.wait_for_function(_DRAWN)
    window.evaluate(_PAINTED)
    charts = time.perf_counter() - started
    settled(window)
    # It waits until frames have stood still for a while, which no reader does.
    frames = time.perf_counter() - started - window.evaluate(_STILL_FOR)
    window.wait_for_timeout(1000)  # whatever the page still does must not count as the next one's
    return max(charts, frames)
