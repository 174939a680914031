"""Pictures of every page of the dashboard, in both themes, on a desk and on a telephone, to be looked at.

    python -m tests.browser.screenshots RUN_OR_FOLDER OUT [PAGE ...]

Writes `OUT/<page>-<width>-<theme>.webp`.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from driftlens_app.show import pages
from tests.browser.chromium import launch
from tests.browser.reading import settled
from tests.browser.server import serving

_SHOTS = {
    f"{width}-{scheme}": {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    for width in (1440, 420)
    for scheme in ("light", "dark")
}
_TALLEST = 6000
_MAIN = "document.querySelector('[data-testid=stMain]')"


def main(root: str, out: str, *wanted: str) -> None:
    """Write the pictures of the pages `wanted`, all of them without any."""
    from playwright.sync_api import sync_playwright

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    names = wanted or _page_names()
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(Path(root), Path(scratch) / "log") as address,
        sync_playwright() as playwright,
    ):
        browser = launch(playwright)
        for kind, settings in _SHOTS.items():
            context = browser.new_context(**settings)
            for name in names:
                _shoot(context.new_page(), page_address(address, name), folder / f"{name}-{kind}.webp")
            context.close()
        browser.close()


def _page_names() -> list[str]:
    return [Path(path).stem for path in pages()]


def page_address(server: str, name: str) -> str:
    """The address of a page; the first one is the app's main page and has no address of its own."""
    return server if name == _page_names()[0] else f"{server}/{name}"


def open_page(page: Any, address: str) -> None:
    """Open a page of the dashboard and wait until it and its explorers are drawn."""
    page.goto(address)
    page.get_by_role("heading", level=1).first.wait_for(timeout=60_000)
    settled(page)
    for explorer in page.locator("iframe").all():
        explorer.scroll_into_view_if_needed()  # browsers let frames rest that nobody sees
        frame = explorer.element_handle().content_frame()
        frame.wait_for_function("window.explorer && explorer.frames > 0", timeout=60_000)
    page.evaluate(f"{_MAIN}.scrollTop = 0")


def _shoot(page: Any, address: str, file: Path) -> None:
    """The whole page: Streamlit scrolls inside, so the window is made as tall as what it holds."""
    open_page(page, address)
    for _ in range(2):  # what came into sight may have grown
        height = page.evaluate(f"{_MAIN}.scrollHeight")
        page.set_viewport_size({"width": page.viewport_size["width"], "height": min(height, _TALLEST)})
        page.wait_for_timeout(500)
        settled(page)
    page.evaluate(f"{_MAIN}.scrollTop = 0")
    Image.open(io.BytesIO(page.screenshot())).save(file, quality=40, method=6)
    page.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
