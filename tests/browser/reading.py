"""Reading a page as a visitor does: wait until it is drawn, then look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

STILL = """() => {
    const now = performance.now();
    const inside = root => [...root.querySelectorAll("*")].flatMap(
        each => each.shadowRoot ? inside(each.shadowRoot) : each.tagName === "IFRAME" ? [each.offsetHeight] : []
    );
    const heights = inside(document).join();
    if (heights !== window.stillHeights) [window.stillHeights, window.stillSince] = [heights, now];
    return (!heights || now - window.stillSince > 300) && document.getAnimations().every(
        moving => moving.playState !== "running" || moving.effect.getComputedTiming().iterations === Infinity
    );
}"""
"""True once nothing moves but what turns for ever, as a spinner does, and frames have grown to what they hold."""


class Opened:
    """A file in a browser, with what the browser complained about and asked for."""

    def __init__(self, page: Any, path: Path, address: str = "") -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri() + (f"#{address}" if address else ""))


def eventually(page: Any, condition: str) -> None:
    """Wait until a JavaScript condition holds; the browser's own waiting would need `eval`, which the page forbids."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never became true: {condition}")


def settled(page: Any) -> None:
    """Wait until the script has run, nothing of it failed and nothing moves: a press on what slides is lost."""
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for(timeout=60_000)
    expect(page.get_by_test_id("stSkeleton")).to_have_count(0, timeout=60_000)
    expect(page.get_by_test_id("stException")).to_have_count(0)
    page.wait_for_function(STILL)


def drawn(page: Any, element: Any, *, timeout: float) -> None:
    """Wait until the element is on the page, and alone: while a script runs, its last run's are beside its own.

    Args:
        page: the page.
        element: a locator that may match an element twice until the page is settled.
        timeout: milliseconds until the first one is there.
    """
    expect(element.first).to_be_visible(timeout=timeout)
    settled(page)
    expect(element).to_have_count(1)


def choose(page: Any, field: str, *options: str, closes: bool = True) -> None:
    """Choose options of a field by typing, where nothing scrolls any more, which would close its list.

    Args:
        page: the page.
        field: what the field is called.
        options: what its list calls them.
        closes: whether the list closes by itself; where several can be chosen it stays.
    """
    box = page.get_by_role("combobox", name=field, exact=True)
    box.evaluate("box => box.scrollIntoView({block: 'center'})")  # at an edge its focus would scroll again
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for option in options:
        box.fill(option)
        page.get_by_role("option", name=option, exact=True).click()
        settled(page)
    if not closes:
        page.keyboard.press("Escape")
        settled(page)


def visit(page: Any, title: str) -> None:
    """Go to a page by the sidebar, which takes a fraction of what opening its address anew takes."""
    heading = page.get_by_role("heading", level=1)
    before = heading.inner_text()
    if page.get_by_test_id("stExpandSidebarButton").is_visible():  # in a narrow window
        page.get_by_test_id("stExpandSidebarButton").click()
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True).click()
    expect(heading).not_to_have_text(before)
    settled(page)


def open_drawer(page: Any, title: str) -> None:
    """Open the drawer of this title, and wait until it stands open with what it holds."""
    page.get_by_text(title, exact=True).click()
    settled(page)


PATIENCE = 180_000
"""Milliseconds that a job may take on a busy machine, most of them to import torch."""
