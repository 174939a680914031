"""Run the tutorials of the docs, and write into the pages what their commands print and draw.

    python -m tests.tutorials [NAME ...]

A comment in a page says what follows it:

- `<!-- output: Accuracy | Main source ... Next -->`: lines printed by the commands above: the first with `Accuracy`,
  and all from the next with `Main source` to the next with `Next`. Without a colon, all lines.
- `<!-- picture: figures/drift.png -->`: an image that the commands wrote.
- `<!-- screenshot: layers runs/clip -->`: a page of the dashboard on a run, or a page in an HTML file.

A block whose first line is a comment with a file name is written to that file, and not run.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {page.stem.removeprefix("tutorial-"): page for page in sorted(DOCS.glob("tutorial-*.md"))}
WIDEST = 1200
"""Pixels of the widest picture."""
STEP = re.compile(
    r"^```(?P<language>bash|python|yaml)\n(?P<code>.*?)^```$"
    r"|^<!-- output(?:: (?P<lines>[^\n]*))? -->\n```text\n(?P<shown>.*?)^```$"
    r"|^<!-- (?P<kind>picture|screenshot): (?P<source>[^\n]*) -->\n!\[[^\n]*?\]\((?P<file>[^\n]*?)\)",
    re.MULTILINE | re.DOTALL,
)
_CLONE = ("driftlens", "examples")
"""Folders of the repository that commands name."""
_NOT_RUN = re.compile(r"^(?:pip install|driftlens ui) .*$", re.MULTILINE)


def execute(page: Path, place: Path, replaced: Mapping[str, str] | None = None) -> Iterator[tuple[re.Match[str], str]]:
    """Run a page's blocks of code in a folder; yield its comments with what the block before each printed.

    Args:
        page: the tutorial.
        place: an empty folder.
        replaced: commands by what to run in place of them.
    """
    for name in _CLONE:
        (place / name).symlink_to(ROOT / name)
    printed = ""
    for step in STEP.finditer(page.read_text(encoding="utf-8")):
        code = step["code"]
        if code and (name := re.match(r"# (\w+\.(?:yaml|py))\n", code)):
            (place / name[1]).write_text(code, encoding="utf-8")
        elif code and step["language"] != "yaml":
            for command, other in (replaced or {}).items():
                code = code.replace(command, other)
            printed = _run(_NOT_RUN.sub("", code), step["language"], place)
        elif not code:
            yield step, printed


def _run(code: str, language: str, place: Path) -> str:
    """Return what a block prints; one thread, so that numbers do not depend on how many cores there are."""
    arguments = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-W", "ignore", "-c"]
    fixed = {"DRIFTLENS_THREADS": "1", "OMP_NUM_THREADS": "1", "DRIFTLENS_PROGRESS": "none", "HF_HUB_OFFLINE": "1"}
    shown = {"PYTHONIOENCODING": "utf-8", "COLUMNS": "110", "TQDM_DISABLE": "1"}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*arguments, code],
        cwd=place,
        env={**os.environ, **fixed, **shown, "PATH": programs},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def excerpt(printed: str, wanted: str | None) -> str:
    """Return the wanted lines of an output, with dots where lines between them are left out.

    Raises:
        LookupError: no line has a wanted text.
    """
    lines = printed.strip("\n").splitlines()

    def find(text: str, start: int) -> int:
        for at in range(start, len(lines)):
            if text in lines[at]:
                return at
        raise LookupError(f"no line has {text!r}:\n{printed}")

    if wanted is None:
        return "\n".join(lines) + "\n"
    shown, end = list[str](), 0
    for part in wanted.split(" | "):
        first, _, last = part.partition(" ... ")
        start = find(first, end)
        stop = find(last, start) + 1 if last else start + 1
        shown += ["..."] if shown and start > end else []
        shown += lines[start:stop]
        end = stop
    return "\n".join(line.rstrip() for line in shown) + "\n"


def write_page(page: Path, place: Path, browser: Any) -> None:
    """Run a tutorial and write its outputs into the page, and its pictures next to it."""
    text = page.read_text(encoding="utf-8")
    parts, end = list[str](), 0
    for step, printed in execute(page, place):
        if step["kind"]:
            file = page.parent / step["file"]
            file.parent.mkdir(exist_ok=True)
            source = step["source"]
            content = (
                (place / source).read_bytes() if step["kind"] == "picture" else _screenshot(source, place, browser)
            )
            _save_picture(content, file)
        else:
            start, stop = step.span("shown")
            parts += [text[end:start], excerpt(printed, step["lines"])]
            end = stop
    page.write_text("".join([*parts, text[end:]]), encoding="utf-8")


def _screenshot(source: str, place: Path, browser: Any) -> bytes:
    """Return the first screen of a page of the dashboard on a run, or of an HTML file."""
    from tests.browser.reading import Opened, eventually
    from tests.browser.screenshots import open_page, page_address
    from tests.browser.server import serving

    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    name, _, run = source.partition(" ")
    if run:
        with serving(place / run, place / "log") as address:
            open_page(page, page_address(address, name))
            page.wait_for_timeout(500)
            taken: bytes = page.screenshot()
    else:
        file, _, state = name.partition("#")
        Opened(page, place / file, state)
        eventually(page, "document.readyState === 'complete' && (!window.explorer || explorer.frames > 0)")
        page.wait_for_timeout(500)
        taken = page.screenshot()
    page.close()
    return taken


def _save_picture(content: bytes, file: Path) -> None:
    """Save a picture as small as a page shows it: drawings in few colours, screens as WebP."""
    with Image.open(io.BytesIO(content)) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((WIDEST, 10 * WIDEST))
        if file.suffix == ".png":
            picture.quantize(96).save(file, optimize=True)
        else:
            picture.save(file, quality=55, method=6)


def main(*names: str) -> None:
    """Write the tutorials named, or all."""
    from playwright.sync_api import sync_playwright

    from tests.browser.chromium import launch

    with sync_playwright() as playwright:
        browser = launch(playwright)
        for name in names or PAGES:
            with tempfile.TemporaryDirectory() as place:
                write_page(PAGES[name], Path(place), browser)
            print(name)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
