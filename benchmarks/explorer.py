"""Frame rate and response times of the explorer with many samples, in Chromium that draws in software."""

from __future__ import annotations

import itertools
import pathlib
import statistics
import tempfile
from typing import Any

from benchmarks.figures import record
from driftlens.config.requests import ViewRequest
from driftlens_reports.explorer import Explorer
from tests.browser.chromium import lacking, launch
from tests.runs.full_run import Size, write_full_run

SIZES = [Size(blocks=2, samples=samples, width=32, classes=10, tests=400) for samples in (20_000, 100_000)]
REPEATS = 5
WANTED = (30, 100, 150)
"""Frames a second, milliseconds of a change of colour and of a brush."""

_MOVED = """() => new Promise(done => {
    const times = [], strides = [];
    explorer.state.stage = 0;
    explorer.goTo(explorer.stages - 1);
    const tick = now => {
        times.push(now); strides.push(explorer.stride());
        explorer.state.stage < explorer.stages - 1 ? requestAnimationFrame(tick) : done([times, Math.max(...strides)]);
    };
    requestAnimationFrame(tick);
})"""
"""The moments at which the browser drew, from the first model to the last, and the largest stride."""
_COLOURED = """name => new Promise(done => {
    const started = performance.now();
    explorer.setColour(name);
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - started)));
})"""
_LISTEN = """() => { window.brushed = []; document.querySelector('canvas').addEventListener('pointerup', event =>
    requestAnimationFrame(() => requestAnimationFrame(() => window.brushed.push(performance.now() - event.timeStamp))),
    true); }"""
"""A brush takes from when the button is let go until what it chose is drawn, numbers and cards included."""


def run(device: str) -> None:
    """Record frames a second and milliseconds, in a headless browser that draws in software."""
    del device
    reason = lacking()
    if reason:
        print(f"explorer: not measured, since {reason}")
        return
    from playwright.sync_api import sync_playwright

    for made in SIZES:
        _record(made, sync_playwright)


def _record(of: Size, start: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch, start() as playwright:
        folder = pathlib.Path(scratch)
        made = write_full_run(folder / "run", tasks=["many"], size=of)
        path = Explorer(made, ViewRequest(samples=of.samples)).save(folder / "page.html")
        browser = launch(playwright)
        window = browser.new_page(viewport={"width": 1400, "height": 1000})
        window.goto(path.as_uri())
        window.locator(".card").first.wait_for()
        found = _measured(window)
        size = path.stat().st_size
        browser.close()
    frames, colour, brush = WANTED
    case = f"{of.samples:,} samples moving through four models"
    record("explorer", case, f"{found['frames']:.0f} frames per second", f"at least {frames}")
    record("explorer", f"{case}: slowest 5 % of frames", f"{found['slow']:.0f} ms")
    record("explorer", f"{case}: change of colour", f"{found['colour']:.0f} ms", f"at most {colour} ms")
    record("explorer", f"{case}: selection of an area", f"{found['brush']:.0f} ms", f"at most {brush} ms")
    record("explorer", f"{case}: one of how many is drawn while they move", f"{found['stride']:.0f}")
    record("explorer", f"{case}: size of the page", f"{size / 1e6:.1f} MB")


def _measured(window: Any) -> dict[str, float]:
    moved = [window.evaluate(_MOVED) for _ in range(3)]
    strides = [stride for _, stride in moved]
    moved = [times for times, _ in moved]
    gaps = [[b - a for a, b in itertools.pairwise(times)] for times in moved]
    colours = ["class", "drift", "right", "margin", "outcome"][:REPEATS]
    coloured = [window.evaluate(_COLOURED, name) for name in colours]
    window.evaluate(_LISTEN)
    box = window.locator("canvas").bounding_box()
    for at in range(REPEATS):
        window.mouse.move(box["x"] + 20 + 30 * at, box["y"] + 20)
        window.mouse.down()
        for x, y in ((0.6, 0.1), (0.7, 0.8), (0.2, 0.7)):
            window.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=10)
        window.mouse.up()
        window.wait_for_timeout(600)
    return {
        "stride": max(strides),
        "frames": statistics.median(1000 * len(each) / sum(each) for each in gaps),
        "slow": statistics.median(statistics.quantiles(each, n=20)[-1] for each in gaps),
        "colour": statistics.median(coloured),
        "brush": statistics.median(window.evaluate("window.brushed")),
    }
