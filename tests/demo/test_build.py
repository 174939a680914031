"""The builder's tiny suites are trained anew, open in their libraries, and score what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlens.config.requests import AnalysisRequest
from driftlens.pipelines.analyze import analyze
from tests.quick import few
from tools.build_demo.__main__ import SUITES, write_spec
from tools.build_demo.recipe import Recipe, Schedule, TextRecipe

BRIEF = Schedule(steps=3, batch=16, matrix_rate=0.02, rate=2e-3)
SIZES = {
    "num_base": 30,
    "num_train": 200,
    "num_test": 130,
    "base": BRIEF,
    "expert": BRIEF,
    "width": 32,
    "layers": 1,
}
TINY = {
    "image": Recipe(**SIZES, embed_dim=16, text_width=16, text_layers=1),
    "text": TextRecipe(**SIZES, coded=0.5, lora=BRIEF, heads=2, inner=40, rank=2),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("suite", few(SUITES, (), some=["text"]))
def test_a_tiny_suite_is_built_twice_the_same_and_a_run_has_its_accuracies(suite: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    measured, again = [SUITES[suite].build(folder, TINY[suite]) for folder in folders]
    assert measured == again
    files, others = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders)
    assert files == others
    write_spec(folders[0], suite)
    run = analyze(folders[0] / "run.yaml", AnalysisRequest(out=tmp_path / "run", attribution=False))
    rows = run.accuracy()
    for variant in ("base", "expert"):
        found = dict(rows[rows["variant"] == variant].set_index("task")["value"])
        assert found == pytest.approx({task: each[variant] for task, each in measured.items()}, abs=1e-9)
    assert rows["task"].nunique() == len(measured)
