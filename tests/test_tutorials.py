"""The tutorials of the docs run from top to bottom, and print what their pages show."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.tutorials import DOCS, PAGES, STEP, excerpt, execute

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
TOLERANCES = (1, 1.5, 0.05)
"""By how much a number without, with one and with more decimals may differ from that on the page: rounding of another
machine moves an answer or two. Large ones may differ by 5 %."""
DEMO = "driftlens demo --suite image --out runs/clip"


def is_close(number: str, other: str) -> bool:
    value, again = (float(each.replace(",", "")) for each in (number, other))
    allowed = TOLERANCES[min(len(number.partition(".")[2]), len(TOLERANCES) - 1)]
    return abs(value - again) <= max(allowed, 0.05 * abs(value))


def words(line: str) -> list[str]:
    """What a line says without its numbers, and without what pads its columns."""
    return NUMBER.sub("#", line).split()


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_is_short_and_quotes_what_its_commands_printed(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    assert 600 <= len(prose.split()) <= 900
    printed = "\n".join(step["shown"] for step in STEP.finditer(text) if step["shown"] is not None)
    shares = re.findall(r"[\d.]+(?= %| points)", prose.replace("95 % interval", ""))
    missing = [share for share in shares if share not in NUMBER.findall(printed)]
    assert shares and missing == []
    assert not re.search(r"/(?:home|tmp|root|work)/", text)


def test_pictures_of_tutorials_are_shown_and_small() -> None:
    shown = {
        step["file"] for page in PAGES.values() for step in STEP.finditer(page.read_text("utf-8")) if step["file"]
    }
    files = [*(DOCS / "assets/tutorials").iterdir()]
    assert shown == {str(file.relative_to(DOCS)) for file in files}
    assert sum(file.stat().st_size for file in files) < 1_500_000


def test_lines_of_an_output_are_found_by_what_they_say() -> None:
    printed = "\nfirst: 1\n  second: 2\n\nthird: 3\nlast: 4\n"
    assert excerpt(printed, None) == "first: 1\n  second: 2\n\nthird: 3\nlast: 4\n"
    assert excerpt(printed, "second ... third | last") == "  second: 2\n\nthird: 3\nlast: 4\n"
    assert excerpt(printed, "first | last") == "first: 1\n...\nlast: 4\n"
    with pytest.raises(LookupError, match="'absent'"):
        excerpt(printed, "absent")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for step, printed in execute(PAGES[name], place, _finished_demo() if name == "clip" else {}):
        if step["kind"] == "picture":
            assert (place / step["source"]).is_file()
        elif step["kind"]:
            run = step["source"].partition(" ")[2] or step["source"].partition("#")[0]
            assert (place / run).exists()
        else:
            again = excerpt(printed, step["lines"])
            for line, other in zip(step["shown"].splitlines(), again.splitlines(), strict=True):
                assert words(line) == words(other), again
                assert all(map(is_close, NUMBER.findall(line), NUMBER.findall(other))), f"{line}\n{other}"


def _finished_demo() -> dict[str, str]:
    """The demo's run that is made as DRIFTLENS_DEMO, if it is, in place of the command that makes it."""
    if "DRIFTLENS_DEMO" not in os.environ:
        return {}
    made = Path(os.environ["DRIFTLENS_DEMO"])
    while not made.exists():
        time.sleep(1)
    return {DEMO: f"mkdir runs && cp -r '{made}' runs/clip"}
