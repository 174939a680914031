"""`calibrate --save-adapter`: the numbers are those of the saved files, and a failure leaves none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import driftlens as dl
from driftlens.config.requests import CalibrationRequest
from driftlens.experiment.model_card import model_card
from driftlens.pipelines import adapters
from driftlens.pipelines.calibrate import calibrate
from driftlens.results.calibration_summary import adapter_sentences
from driftlens.results.formatting import format_percent
from driftlens.results.measures import SCORE, change_on_task
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import RunError, SpecError
from driftlens.utils.intervals import mcnemar_test
from driftlens_reports.terminal import calibration_text, run_summary_text
from tests.refusing import refusing
from tests.zoo.decoders import CONFIGS
from tests.zoo.suite import TASKS, spec_of

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 asks transformers 5 for an attribute that this has renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
NAME, VARIANT = "featcal", "calibrated:featcal"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def spec(place: Path) -> dict[str, Any]:
    return spec_of(CONFIGS["Llama"], place) | {"metrics": {"jacobian": False}}


@pytest.fixture(scope="module")
def saved(spec: dict[str, Any], place: Path) -> DriftRun:
    """A calibrated run whose repair was saved at rank 3."""
    dl.analyze(spec, out=place / "run", progress="none")
    request = CalibrationRequest(name=NAME, save_adapter=place / "rank 3", rank=3, save_weights=place / "whole")
    return calibrate(place / "run", request)


def peft_merged(spec: dict[str, Any], adapter: Path, out: Path) -> Path:
    """Base and adapters as peft merges them, saved by transformers."""
    import transformers
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).merge_and_unload()
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(spec["base"]["weights"]).save_pretrained(out)
    return out


def test_the_recorded_numbers_are_those_of_what_peft_loads(
    saved: DriftRun, spec: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    """Measured once more as a merged model of its own run, and held against the repair by its saved answers."""
    whole = peft_merged(spec, place / "rank 3", tmp_path / "merged")
    again = {key: value for key, value in spec.items() if key != "merge"} | {"merged": {"weights": str(whole)}}
    run = dl.analyze(again, out=tmp_path / "again", progress="none")
    record = saved.manifest.calibrations[NAME].adapter
    assert [row["task"] for row in record["tasks"]] == list(TASKS) and 0.2 < record["kept"] < 0.99
    differs = False
    for row in record["tasks"]:
        task = row["task"]
        assert row["drift"] == pytest.approx(run.value("drift_rel", task=task), rel=1e-5)
        assert row["drift_repaired"] == saved.value("drift_rel", task=task, variant=VARIANT)
        score = run.accuracy(task, "merged").query("metric == @row['metric']").iloc[0]
        assert (row["score"], row["n"]) == (score["value"], score["n"])
        assert (row["low"], row["high"]) == (score["ci_low"], score["ci_high"])
        answers = [
            frame[frame["metric"] == row["metric"]].set_index("sample_id")["value"] == 1
            for frame in (saved.scores(task, VARIANT), run.scores(task, "merged"))
        ]
        change = mcnemar_test(answers[0].to_numpy(), answers[1].reindex(answers[0].index).to_numpy())
        assert (row["change"], row["change_low"]) == (change.difference, change.ci_low)
        differs |= abs(row["drift"] - row["drift_repaired"]) > 0.01
    assert differs, "rank 3 loses nothing here, so nothing was compared"


def test_at_full_rank_the_adapters_are_the_repair(saved: DriftRun, place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.path, tmp_path / "run"))
    run = calibrate(folder, CalibrationRequest(name=NAME, save_adapter=tmp_path / "full", rank=99))
    record = run.manifest.calibrations[NAME].adapter
    assert record["kept"] == pytest.approx(1, abs=1e-9)
    for row in record["tasks"]:
        assert row["drift"] == pytest.approx(row["drift_repaired"], rel=1e-5)
        assert (row["change"], row["score"]) == (0, run.accuracy(row["task"], VARIANT).iloc[0]["value"])
    # Nothing else of the run changes, and its digests hold.
    assert change_on_task(run, SCORE, "a", ("merged", VARIANT)) == change_on_task(
        saved, SCORE, "a", ("merged", VARIANT)
    )
    assert verify_files(folder).ok


def test_terminal_card_and_show_say_what_is_kept(saved: DriftRun) -> None:
    (sentence,) = adapter_sentences(saved, NAME)
    record = saved.manifest.calibrations[NAME].adapter
    count = sum(row["n"] for row in record["tasks"])
    assert "Adapters of rank 3" in sentence and f"n = {count}" in sentence and "relative drift" in sentence
    assert format_percent(record["kept"]) in sentence.partition(" of the change")[0]
    for text in (calibration_text(saved, NAME), run_summary_text(saved), model_card(saved, NAME)):
        assert "Adapters of rank 3" in text
    assert "Adapters of rank 3" in (saved.path / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")


def test_the_saved_adapters_are_an_expert(saved: DriftRun, spec: dict[str, Any], place: Path, tmp_path: Path) -> None:
    from driftlens.experiment.checklist import check_merge_files

    base = spec["base"]["weights"]
    checklist = check_merge_files(base, {"a": str(place / "rank 3"), "b": spec["experts"]["b"]["weights"]}, None)
    assert checklist.exit_code == 0 and not [row for row in checklist.findings if row.level == "problem"]
    # As a merged model its drift is the recorded one.
    again = {key: value for key, value in spec.items() if key != "merge"}
    again |= {"merged": {"weights": str(place / "rank 3")}}
    run = dl.analyze(again, out=tmp_path / "again", progress="none")
    for row in saved.manifest.calibrations[NAME].adapter["tasks"]:
        assert run.value("drift_rel", task=row["task"]) == pytest.approx(row["drift"], rel=1e-5)


def test_a_failure_while_measuring_leaves_no_adapters(
    saved: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved.path, tmp_path / "run"))

    def fail(*_: Any) -> None:
        raise RunError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "score_variants", fail)
        with refusing(RunError, "no more"):
            calibrate(folder, CalibrationRequest(name=NAME, save_adapter=tmp_path / "out", rank=2))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert dl.open_run(folder).manifest.calibrations[NAME] == saved.manifest.calibrations[NAME]
    run = calibrate(folder, CalibrationRequest(name=NAME, save_adapter=tmp_path / "out", rank=2))
    assert run.manifest.calibrations[NAME].adapter["rank"] == 2


@pytest.mark.parametrize(
    "options", [{"rank": 4}, {"save_adapter": Path("out")}, {"save_adapter": Path("out"), "rank": 0}]
)
def test_rank_and_folder_need_each_other(options: dict[str, Any]) -> None:
    with refusing(SpecError, "rank"):
        CalibrationRequest(name=NAME, **options)


def test_the_command_prints_the_record(saved: DriftRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from driftlens.cli import main

    folder = Path(shutil.copytree(saved.path, tmp_path / "run"))
    words = [
        "calibrate",
        str(folder),
        "--name",
        NAME,
        "--save-adapter",
        str(tmp_path / "out"),
        "--rank",
        "5",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        main(["-q", *words])
    assert end.value.code in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert told["adapter"]["rank"] == 5 and len(told["adapter"]["tasks"]) == len(TASKS)
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == RunError.exit_code and "exists already" in capsys.readouterr().err
    residual = CalibrationRequest(name="maps", method="surgery", save_adapter=tmp_path / "maps", rank=1)
    with refusing(SpecError, "changes no weights"):
        calibrate(folder, residual)
