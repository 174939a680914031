"""The notebooks of the docs run from top to bottom, and are kept with their outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from driftlens.runs.run import open_run
from tests.notebooks import FOLDER, ORDER, executed
from tests.published import has_published_numbers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


def test_every_notebook_is_in_the_order_and_on_the_site() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(ORDER)
    site = (FOLDER.parent.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"notebooks/{name}.ipynb" in site for name in ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_notebook_is_kept_with_what_came_out_of_it(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) / 2 and len(text) < 600_000
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert "/home/" not in text and "/tmp/" not in text and "/root/" not in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("names", [ORDER[:1], pytest.param(ORDER, marks=pytest.mark.every)], ids=["first", "all"])
def test_the_notebooks_run(names: tuple[str, ...], place: Path) -> None:
    """In one test, as the first makes the run that the others open: that of which README and docs have the numbers."""
    pytest.importorskip("nbclient", reason="executes notebooks: pip install 'driftlens-merge[docs]'")
    for name in names:
        executed(name, place)
    assert names != ORDER or any((place / "exhibits").iterdir())
    has_published_numbers(open_run(place / "driftlens-demo"), "text")
