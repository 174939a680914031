from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from driftlens.runs.run import open_run
from tests.records.full_run import write_full_run
from tests.reports.gallery import FIGURES, write_gallery


@pytest.mark.slow
def test_the_gallery_is_small_pictures_and_a_page_without_a_script(tmp_path: Path):
    run = open_run(write_full_run(tmp_path / "run"))
    files = write_gallery(run, tmp_path / "gallery")
    assert [path.name for path in files] == [*(f"{name}.png" for name in FIGURES), "report-light.html"]
    for path in files[:-1]:
        with Image.open(path) as picture:
            assert picture.width <= 2000 and len(picture.convert("L").getcolors(256) or []) > 10
        assert path.stat().st_size < 500_000
    page = files[-1].read_text(encoding="utf-8")
    assert "<script" not in page and "featcal" in page and len(page) < 1_000_000
