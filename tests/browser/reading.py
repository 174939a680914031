"""Reading a page as a visitor does: wait until it is drawn, then look."""

from __future__ import annotations

from typing import Any


def settled(page: Any) -> None:
    """Wait until the script has run and nothing of it failed."""
    from playwright.sync_api import expect

    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for(timeout=60_000)
    expect(page.get_by_test_id("stSkeleton")).to_have_count(0, timeout=60_000)
    expect(page.get_by_test_id("stException")).to_have_count(0)


def metric(page: Any, label: str) -> str:
    """The value of the card with this label."""
    card = page.get_by_test_id("stMetric").filter(has_text=label)
    value: str = card.get_by_test_id("stMetricValue").inner_text(timeout=60_000)
    return value
