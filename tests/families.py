"""The table of model families and what works with each: made of what tests declare that they show.

    VIT = pytest.mark.family("ViT (transformers)")

    @pytest.mark.shows("drift", files="hf-vit")        # "yes" under drift, words of its own under files
    @pytest.mark.parametrize("build", [pytest.param(vit, marks=VIT), pytest.param(deit, marks=VIT)])
    def test_...

A test with both marks, be they its own or those of a parameter (a fixture's, too), fills the cells of its families
under its columns, one of `COLUMNS`; a test of a refusal says `shows(files="refused")`. A new family is a new parameter
with its mark. Then

    python -m tests.families > docs/families.md

collects all tests and writes the table; `test_families.py` fails where the file says something else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

OPEN_CLIP = pytest.mark.family("CLIP ViT (open_clip)")
TRANSFORMERS_CLIP = pytest.mark.family("CLIP ViT (transformers)")
STACK = pytest.mark.family("any module with a list of blocks")

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "families.md"

COLUMNS = {
    "files": "`loader`",
    "live": "live",
    "heads": "scores",
    "drift": "drift",
    "attribution": "attribution",
    "sites": "calibrated",
    "routes": "routes",
    "reloads": "reloads",
}
"""What a test may show, and how the table calls it."""

Shown = Mapping[str, Mapping[str, set[str]]]
"""By family and column, the words of all tests."""

SHOWN = pytest.StashKey[Shown]()
"""Where the session keeps what its collected tests show."""

HEAD = """# Model families

Made from the tests by `python -m tests.families`: a cell holds what at least one test shows, a dash means that no test
does. *Live* are models in memory. *Drift* is compared with the library's own forward pass. *Reloads* means that a saved
model gives the same features and scores in its own library; without a loader, a state dict is saved. *Routes* are those
of tokens in mixtures of experts.

In DeBERTa, the projections of queries and keys also read a table of relative positions, so they stay as merged. A
family without a loader works in memory or with `loader: python:module:function`.

"""


def shown(items: Iterable[pytest.Item]) -> Shown:
    """What these tests declare that they show; those that are always skipped, or expected to fail, show nothing.

    Raises:
        pytest.UsageError: one of them names a column that there isn't.
    """
    found: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for item in items:
        if any(item.iter_markers("skip")) or any(item.iter_markers("xfail")):
            continue
        families = [name for mark in item.iter_markers("family") for name in mark.args]
        for mark in item.iter_markers("shows"):
            words = {**dict.fromkeys(mark.args, "yes"), **mark.kwargs}
            if unknown := words.keys() - COLUMNS.keys():
                raise pytest.UsageError(f"{item.nodeid} shows {unknown}; there are {', '.join(COLUMNS)}")
            for family in families:
                for column, word in words.items():
                    found[family][column].add(word)
    return found


def table(found: Shown) -> str:
    """The document that says so."""
    lines = [["family", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    for family in sorted(found, key=str.casefold):
        cells = found[family]
        lines.append([family, *(_cell(cells.get(column, set())) for column in COLUMNS)])
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(words: set[str]) -> str:
    """All words, without a `yes` that others make more precise."""
    return ", ".join(sorted(words - {"yes"} or words)) or "–"


def is_whole(config: pytest.Config) -> bool:
    """Whether these are all tests there are, not those of some files only."""
    here = config.invocation_params.dir
    given = {(here / argument).resolve() for argument in config.args}
    return not given.isdisjoint({ROOT, ROOT / "tests"}) and not (
        config.getoption("ignore") or config.getoption("ignore_glob")
    )


def main() -> None:
    """Print the table."""

    class Plugin:
        found: Shown | None = None

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.found = session.config.stash[SHOWN]

    plugin, said = Plugin(), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-qq", "-n0", str(ROOT / "tests")], plugins=[plugin])
    if code or plugin.found is None:
        sys.exit(said.getvalue())
    sys.stdout.write(table(plugin.found))


if __name__ == "__main__":
    from tests import families  # as the tests import it, whose stash is asked

    families.main()
