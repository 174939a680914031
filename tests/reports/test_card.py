"""The picture to share of a run has the size of link previews and states the headline."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib.figure
import pytest
from PIL import Image
from typer.testing import CliRunner

from driftlens.cli import build_app
from driftlens.results.verdict import headline
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError
from driftlens_reports.card import add_image_to_model_card, save_summary_image
from tests.runs.full_run import write_run

NAME = "$\\frac{a}{$ <b>&x</b>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    folder = tmp_path_factory.mktemp("card") / "run"
    return open_run(write_run(folder, name=NAME, variants=("base", "merged", "calibrated:featcal")))


def words(run: DriftRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the picture says, as matplotlib is told to write it."""
    told: list[str] = []
    real = matplotlib.figure.Figure.text

    def listened(self: object, x: float, y: float, text: str, **more: object) -> object:
        assert more["parse_math"] is False
        told.append(text)
        return real(self, x, y, text, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(matplotlib.figure.Figure, "text", listened)
    save_summary_image(run)
    return told


@pytest.mark.slow
def test_a_card_is_of_the_size_of_previews_and_says_the_headline(
    run: DriftRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = save_summary_image(run).read_bytes()
    assert Image.open(io.BytesIO(data)).size == (1200, 630) and data == save_summary_image(run).read_bytes()
    said = words(run, monkeypatch)
    found = headline(run)
    assert found.text.split()[0] in " ".join(said) and NAME in said
    assert any(text.endswith(f"run {run.id}") for text in said)
    assert any(text.startswith("features of ") for text in said) and "light blue: its expert" in said
    for mean in found.tiles.values():
        assert f"{100 * mean.value:.1f} %" in said


def test_the_command_writes_it_where_asked_for_and_into_the_run(run: DriftRun, tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["export", str(run.path), "--card", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["card.png"]
    made = save_summary_image(run)
    assert made == run.path / "reports" / "card.png"
    assert made.read_bytes() == (tmp_path / "new" / "card.png").read_bytes()


def test_a_calibration_that_is_not_there_leaves_no_file(run: DriftRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="featcal"):
        save_summary_image(run, tmp_path / "new" / "card.png", "nosuch")
    assert not (tmp_path / "new").exists()


def test_without_features_and_scores_there_is_a_card_all_the_same(tmp_path: Path) -> None:
    bare = open_run(write_run(tmp_path / "bare", has_labels=False, has_heads=False))
    assert Image.open(io.BytesIO(save_summary_image(bare).read_bytes())).size == (1200, 630)


def test_beside_saved_weights_the_model_card_shows_it_once(run: DriftRun, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# model\n\n## Verdict\n\n**said**\n")
    for _ in range(2):
        add_image_to_model_card(tmp_path, run, "featcal")
    assert (tmp_path / "README.md").read_text().count("(card.png)") == 1
    assert (tmp_path / "card.png").is_file()
