"""The table of families in `docs/` says what the tests show, no more and no less."""

from __future__ import annotations

import pytest

from tests.families import FILE, SHOWN, is_whole, table


def test_the_table_in_docs_is_what_the_tests_show(request: pytest.FixtureRequest) -> None:
    """Where only some files are run: each family that their tests show has its row, and no cell of it is missing."""
    found, text = request.config.stash[SHOWN], FILE.read_text(encoding="utf-8")
    if is_whole(request.config):
        assert text == table(found), "run: python -m tests.families > docs/families.md"
    written = rows(text)
    for family, cells in rows(table(found)).items():
        assert family in written, f"{family} has no row: python -m tests.families > docs/families.md"
        for mine, theirs in zip(cells, written[family], strict=True):
            assert mine - {"yes"} <= theirs and (theirs or not mine), f"{family}: {mine} is not in {theirs}"


def rows(text: str) -> dict[str, list[set[str]]]:
    """The words of each family's cells."""
    lines = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {family: [set(cell.split(", ")) - {"–"} for cell in cells] for family, *cells in lines}
