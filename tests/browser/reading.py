"""Reading a page as a visitor does: wait until it is drawn, then look."""

from __future__ import annotations

from typing import Any


def settled(page: Any) -> None:
    """Wait until the script has run and nothing of it failed."""
    from playwright.sync_api import expect

    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for(timeout=60_000)
    expect(page.get_by_test_id("stSkeleton")).to_have_count(0, timeout=60_000)
    expect(page.get_by_test_id("stException")).to_have_count(0)


def drawn(page: Any, element: Any, *, timeout: float) -> None:
    """Wait until the element is on the page, and alone: while a script runs, its last run's are beside its own.

    Args:
        page: the page.
        element: a locator that may match an element twice until the page is settled.
        timeout: milliseconds until the first one is there.
    """
    from playwright.sync_api import expect

    expect(element.first).to_be_visible(timeout=timeout)
    settled(page)
    expect(element).to_have_count(1)
