"""Loading times of the dashboard and memory of its server: 8 tasks, 12 blocks, 256 samples, and 80 small runs.

`python -m benchmarks dashboard`; `python -m benchmarks.dashboard` opens all pages of a run by many users at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Origin

from benchmarks.figures import record
from benchmarks.pages import SIZE, TASKS, server_at
from driftlens_app.show import pages
from tests.browser.chromium import lacking, launch
from tests.browser.reading import settled
from tests.browser.server import serving
from tests.runs.full_run import Size, write_full_run

RUNS, LOADS = 80, 3
WANTED = {
    "usable after `driftlens ui`": 4.0,
    "first page, Overview of a run": 1.0,
    f"first page, Runs with {RUNS} runs": 1.0,
}
"""Seconds; the first page is one that a browser window opens on a server that is up."""
SESSIONS, LAPS = 30, 2
MOST_MEMORY = 600
"""MB, of the server and its children, after every page was opened with both folders."""


def run(device: str) -> None:
    """Record median and largest seconds of each, in a headless browser that draws in software, and MB of the server."""
    del device
    reason = lacking()
    if reason:
        print(f"dashboard: not measured, since {reason}")
        return
    from playwright.sync_api import sync_playwright

    found: dict[str, list[float]] = {name: [] for name in WANTED}
    first, overview, many = found.values()
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = pathlib.Path(scratch)
        write_full_run(folder / "one" / "run", tasks=[f"task {at}" for at in range(TASKS)], size=SIZE)
        _write_many(folder / "many")
        browser = launch(playwright)
        window = browser.new_page(viewport={"width": 1400, "height": 1000})
        for _ in range(LOADS):
            started = time.perf_counter()
            with serving(folder / "one", folder / "log") as address:
                window.goto(address)
                _drawn(window)
                first.append(time.perf_counter() - started)
        shutil.move(folder / "one" / "run", folder / "many" / "run")
        with serving(folder / "many", folder / "log") as address:
            for path in pages():
                window.goto(f"{address}/{pathlib.Path(path).stem}")
                _drawn(window)
            run_id = json.loads((folder / "many" / "run" / "manifest.json").read_text())["id"]
            for _ in range(LOADS):
                overview.append(_seconds(lambda: window.goto(f"{address}/overview?run={run_id}"), window))
                many.append(_seconds(lambda: window.goto(address), window))
            memory = _megabytes(address)
        browser.close()
    for name, seconds in found.items():
        value = f"{statistics.median(seconds):.2f} s (largest {max(seconds):.2f} s)"
        record("dashboard", f"{name}, median of {LOADS}", value, f"at most {WANTED[name]:.1f} s")
    record("dashboard", "memory of the server", f"{memory:.0f} MB", f"at most {MOST_MEMORY} MB")


async def crowd() -> str:
    """What many sessions at once make of the server: errors shown and logged, and MB after each of their visits.

    Each opens every page, beginning at another one, and says to the server what a browser would; thirty browsers
    would leave the server nothing of this machine.
    """
    faults, memory = list[str](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        run = write_full_run(folder / "runs" / "run", tasks=[f"task {at}" for at in range(TASKS)], size=SIZE)
        asked = f"run={json.loads((run / 'manifest.json').read_text())['id']}"
        paths = ["", *(pathlib.Path(path).stem for path in list(pages())[1:])]  # the first has no name
        with serving(folder / "runs", folder / "log") as address:
            async with contextlib.AsyncExitStack() as stack:
                stream = f"{address.replace('http', 'ws')}/_stcore/stream"
                sessions = [
                    await stack.enter_async_context(connect(stream, origin=Origin(address), max_size=None))
                    for _ in range(SESSIONS)
                ]
                for lap in range(LAPS * len(paths)):
                    visits = (
                        _shown_faults(session, paths[(lap + at) % len(paths)], asked)
                        for at, session in enumerate(sessions)
                    )
                    faults += [fault for some in await asyncio.gather(*visits) for fault in some]
                    memory.append(f"{_megabytes(address):.0f}")
        logged = [line for line in (folder / "log").read_text().splitlines() if "Traceback" in line]
    return (
        f"{SESSIONS} sessions x {len(paths)} pages, {LAPS} times: {len(faults)} errors shown, {len(logged)} in the "
        f"server's log; its MB after every {SESSIONS} visits: {', '.join(memory)}"
        + "".join(f"\n{fault}" for fault in faults)
    )


async def _shown_faults(session: ClientConnection, page: str, asked: str) -> list[str]:
    """Open a page in a session, wait until its script has run, and return the errors on it."""
    wanted, faults = BackMsg(), list[str]()
    wanted.rerun_script.query_string, wanted.rerun_script.page_name = asked, page
    await session.send(wanted.SerializeToString())
    while True:
        told = ForwardMsg.FromString(await session.recv(decode=False))
        if told.delta.new_element.HasField("exception"):
            faults.append(f"{page}: {told.delta.new_element.exception.message}")
        if told.HasField("page_not_found"):
            faults.append(f"{page}: there is no such page")
        if told.HasField("script_finished"):
            return faults


def _write_many(folder: pathlib.Path) -> None:
    source = write_full_run(folder / "run-00", size=Size(blocks=2, samples=6, width=4, classes=2, tests=40))
    manifest = json.loads((source / "manifest.json").read_text())
    for at in range(1, RUNS - 1):
        copy = folder / f"run-{at:02d}"
        shutil.copytree(source, copy)
        (copy / "manifest.json").write_text(json.dumps({**manifest, "id": f"run-{at:08x}"}))


def _seconds(load: Callable[[], Any], window: Any) -> float:
    started = time.perf_counter()
    load()
    _drawn(window)
    return time.perf_counter() - started


def _drawn(window: Any) -> None:
    """Wait until a page has its heading and its script has run."""
    window.get_by_role("heading", level=1).first.wait_for(timeout=60_000)
    settled(window)


def _megabytes(address: str) -> float:
    """Resident memory of the server at an address, with what it started."""
    server = server_at(address)
    return sum(one.memory_info().rss for one in (server, *server.children(recursive=True))) / 1e6


if __name__ == "__main__":
    print(asyncio.run(crowd()))
