from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from driftlens.runs.run import open_run
from tests.reports.gallery import DOCS, write_docs
from tests.runs.full_run import write_full_run


@pytest.mark.slow
def test_pictures_of_the_docs_are_small(tmp_path: Path) -> None:
    write_docs(open_run(write_full_run(tmp_path / "run")), tmp_path)
    for name in DOCS:
        with Image.open(tmp_path / name) as picture:
            assert picture.width <= 1400 and len(picture.convert("L").getcolors(256) or []) > 10
        assert (tmp_path / name).stat().st_size < 500_000
