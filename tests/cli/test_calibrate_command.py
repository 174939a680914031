"""`driftlens calibrate`: flags in, table and exit code out; interrupted for real and resumed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from driftlens.experiment.model_card import calibration_command, escape_markdown, model_card
from driftlens.pipelines.calibrate import calibrate
from driftlens.results.calibration_summary import auto_choice_sentences
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.writer import RunWriter
from driftlens_reports.build import Report
from driftlens_reports.terminal import calibration_text
from tests.cli.conftest import Cli
from tests.pipelines.calibrating import (
    NAME,
    VARIANT,
    copied,
    files_of,
    request,
    roomy_run,
    same_rows,
    spoil_merged,
)
from tests.zoo.world import TASKS, World, clip, write_spec

QUIET = ("--progress", "none")


@pytest.mark.slow
def test_the_table_shows_before_after_and_expert(folder: Path, run_cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "model"
    result = run_cli(
        *("calibrate", folder, "--name", NAME, "--preset", "paper-clip"),
        *("--save-weights", target, *QUIET),
    )
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    run = open_run(folder)
    for task in TASKS:
        (row,) = [line for line in lines if line[:1] == [task]]
        assert row[-2] == f"{100 * run.value('drift_rel', task=task, variant=VARIANT):.1f}"
        values = [run.accuracy(task, name)["value"].iloc[0] for name in ("base", "expert", "merged", VARIANT)]
        assert row[1:9:2] == [f"{100 * value:.1f}" for value in values]
    assert not any(line[:3] == ["featcal,", "anchor", "only"] for line in lines)  # `-v` tells it
    assert "rescaling" not in result.out
    assert f"wrote {target}" in result.out
    assert "Notice: the stem" in result.out and "was not calibrated" not in result.err
    clip(load_file(target / "open_clip_model.safetensors"))  # strict: every key, every shape
    card = ModelCard.load(target / "README.md")
    _, scores = card.text.split(f"### {NAME}: accuracy of every model on every task")
    for task in TASKS:
        value = 100 * run.accuracy(task, VARIANT)["value"].iloc[0]
        assert f"| {task} | {NAME} | {value:.1f} % |" in scores
    assert "create_model_from_pretrained" in card.text


@pytest.mark.slow
def test_the_command_that_is_named_at_the_end_saves_the_model(folder: Path, run_cli: Cli, tmp_path: Path) -> None:
    done = run_cli("calibrate", folder, "--name", NAME, "--no-attribution", *QUIET)
    command = next(line for line in done.err.splitlines() if "--save-weights" in line).split("`")[1]
    words = [str(tmp_path / "out") if word == "FOLDER" else word for word in shlex.split(command)[1:]]
    saved = run_cli(*words, *QUIET)
    assert saved.code == 0 and f"wrote {tmp_path / 'out'}" in saved.out and "calibrate" not in saved.err
    found, kept = tmp_path / "out/open_clip_model.safetensors", f"calibrations/{NAME}/weights.safetensors"
    found, expected = load_file(found), load_file(folder / kept)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_all_that_is_saved_has_the_type_that_the_flag_names(folder: Path, run_cli: Cli, tmp_path: Path) -> None:
    given = ("calibrate", folder, "--name", NAME, "--layers", 2, "--no-attribution", *QUIET)
    refused = run_cli(*given, "--out-dtype", "int8")
    assert refused.code == 2 and "bfloat16" in refused.err
    done = run_cli(*given, "--out-dtype", "float16", "--save-weights", tmp_path / "out")
    assert done.code == 0, done.err
    saved = load_file(tmp_path / "out/open_clip_model.safetensors")
    kept = load_file(folder / f"calibrations/{NAME}/weights.safetensors")
    merged = load_file(folder / "models/merged.safetensors")
    assert {value.dtype for value in merged.values() if value.is_floating_point()} == {torch.float32}
    changed = [key for key, value in kept.items() if not torch.equal(value, merged[key].half())]
    assert changed and all("resblocks.0." in key for key in changed)
    for key, value in kept.items():
        assert saved[key].dtype == torch.float16 and torch.equal(saved[key], value)
    assert "| Saved in | float16 |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
def test_json_holds_the_same_numbers(folder: Path, run_cli: Cli) -> None:
    result = run_cli(
        "calibrate", folder, "--name", NAME, "--set", "rho=1", "--set", "update=[linear]", "--json", *QUIET
    )
    found, run = json.loads(result.out), open_run(folder)
    assert result.code == 0 and found["variant"] == VARIANT and found["control"] == ""
    assert (found["settings"]["rho"], found["settings"]["update"]) == (1, ["linear"])
    rows = {(row["task"], row["variant"]): row for row in found["before_after"]}
    for task in TASKS:
        assert rows[task, VARIANT]["drift"] == run.value("drift_l2_mean", task=task, variant=VARIANT)
        assert rows[task, "expert"]["drift"] is None
    for change in found["accuracy_changes"]:
        before, after = (rows[change["task"], variant]["accuracy"] for variant in ("merged", VARIANT))
        assert change["change"] == after - before and change["low"] <= change["change"] <= change["high"]
        assert change["split"] == "test" and change["paired"]["n"] == change["n"] and change["is_paired"]
    for entry in found["means"]:
        change = entry["means"][VARIANT]["value"] - entry["means"]["merged"]["value"]
        assert entry["tasks"] == list(TASKS) and entry["change"]["value"] == pytest.approx(change)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--set", "lam=-1"), 2, "lam"),
        (("--layers", "*.resblock.*"), 2, "resblocks"),
        (("--sites", "*.nosuch"), 2, "nosuch"),
        (("--preset", "paper"), 2, "paper-clip"),
        (("--set", "lam"), 2, "name=value"),
        (("--set", "lambda=1"), 2, "lambda"),
        (("--samples", 0), 2, "calibrate: --samples: Input should be"),
        (("--shrink", 9), 2, "--shrink is now called --interpolate"),
        (("--samples", 100), 4, "100"),
        (("--method", "surgery9"), 2, "surgery9"),
        (("--device", "tpu"), 2, "tpu"),
        (("--method", "residual", "--set", "fold=3"), 2, "Did you mean 'folds'"),
        (("--method", "residual", "--set", "lam=0.1"), 2, "lam"),
        (("--method", "residual", "--set=mu=0.9", "--set=weights=uniform"), 2, "Set weights to gradient"),
        (("--method", "residual", "--set", "folds=5"), 4, "set folds to at most 4"),
        (("--method", "residual", "--samples", 3), 4, "set folds to at most 3"),
        (("--method", "residual", "--auto"), 4, "has 4 calibration samples"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_settings_are_refused_in_two_lines_and_leave_no_trace(
    folder: Path, run_cli: Cli, flags: tuple[object, ...], code: int, words: str
) -> None:
    before = files_of(folder)
    refused = run_cli("calibrate", folder, "--name", NAME, *flags, *QUIET)
    assert (refused.code, refused.out) == (code, "") and words in refused.err and "defect" not in refused.err
    assert files_of(folder) == before


@pytest.mark.slow
def test_one_task_and_a_site_that_never_varies_are_calibrated_and_singular_systems_are_named(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """What queries, keys and values of the second block read is 0 in every model."""
    silent = {}
    for name in ("base", TASKS[0]):
        state = world.state(name)
        for part in ("weight", "bias"):
            state[f"visual.transformer.resblocks.1.ln_1.{part}"].zero_()
        save_file(state, tmp_path / f"{name}.safetensors")
        silent[name] = {"weights": str(tmp_path / f"{name}.safetensors")}
    changes = {
        "base": silent["base"],
        "experts": {TASKS[0]: silent[TASKS[0]]},
        "metrics": {"jacobian": False},
    }
    folder = tmp_path / "run"
    assert run_cli("analyze", write_spec(spec_file, world.one_task(**changes)), "--out", folder, *QUIET).code == 0
    before = open_run(folder)
    command = ("calibrate", folder, "--name", NAME, "--method", "residual", *QUIET)
    refused = run_cli(*command, "--set", "cv=off", "--set", "ridge=1e-300")
    assert refused.code == 4 and "layer 2, transformer.resblocks.0." in refused.message and "ridge" in refused.hint
    assert not (folder / f"calibrations/{NAME}/weights.safetensors").exists()
    same_rows(open_run(folder), before)
    assert run_cli(*command).code == 0
    weights = load_file(folder / f"calibrations/{NAME}/weights.safetensors")
    assert weights and all(bool(value.isfinite().all()) for value in weights.values())
    assert run_cli("check", folder).code == 0


def test_a_locked_run_is_refused(folder: Path, run_cli: Cli) -> None:
    with RunWriter.resume(folder):
        assert run_cli("calibrate", folder, "--name", NAME, *QUIET).code == 5


WEIGHTS = f"calibrations/{NAME}/weights.safetensors"


@pytest.fixture(scope="module")
def run(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    asked = request(
        parameters={"lam": 0.2, "alpha": 0.4, "update": ["linear", "norm"], "solve_dtype": "float32"},
        sites=["*.mlp.*", "*.ln_?"],
        layers=[2, 4],
        samples=3,
    )
    return calibrate(copied(light, tmp_path_factory.mktemp("runs") / "run"), asked)


@pytest.mark.slow
def test_the_command_on_the_card_makes_the_same_weights(
    run: DriftRun, light: DriftRun, tmp_path: Path, run_cli: Cli
) -> None:
    card = (run.path / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")
    (line,) = (line for line in card.splitlines() if line.startswith("    driftlens calibrate RUN "))
    again = copied(light, tmp_path / "again")
    arguments = [str(again) if word == "RUN" else word for word in shlex.split(line)[1:]]
    assert run_cli(*arguments, "--progress", "none").code == 0
    found, expected = load_file(again / WEIGHTS), load_file(run.path / WEIGHTS)
    assert all((found[key] == expected[key]).all() for key in expected)


@pytest.mark.slow
def test_card_and_header_name_sites_layers_seed_and_samples(run: DriftRun) -> None:
    info = run.manifest.calibrations[NAME]
    with safe_open(run.path / WEIGHTS, "pt") as file:
        header = file.metadata()
    assert json.loads(header["calibration_sites"]) == ["*.mlp.*", "*.ln_?"] and header["calibration_preset"] == ""
    assert json.loads(header["calibration_layers"]) == [2, 4] and json.loads(header["calibration_seed"]) == info.seed
    assert json.loads(header["calibration_samples"]) == dict(info.samples)
    assert json.loads(header["calibration_sample_digests"]) == dict(info.sample_digests)
    card = model_card(run, NAME)
    assert "featcal on layers 2, 4" in card and "| Preset | none |" in card
    assert r"| Sites | \*.mlp.\*, \*.ln\_? (8 modules) |" in card


def test_what_an_older_run_did_not_record_is_not_made_up(run: DriftRun) -> None:
    older = dataclasses.replace(run.manifest.calibrations[NAME], seed=None)
    assert calibration_command(NAME, older) == ""


@pytest.mark.slow
def test_the_settings_chosen_are_those_calibrated_with(
    world: World, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_merged(monkeypatch)
    folder = roomy_run(world, tmp_path).path
    flags = (
        "--name",
        NAME,
        "--method",
        "featcal",
        "--auto",
        "--set",
        "lam=50",
        "--set",
        "rho=4",
        "--layers",
        "2",
    )
    found = json.loads(run_cli("calibrate", folder, *flags, "--json", *QUIET).out)
    assert found["automatic"]
    assert set(open_run(folder).calibration(NAME)["lam"]) == {found["settings"]["lam"]}
    assert found["selection"]["chosen"] == found["settings"]
    assert {"lam": 50.0, "rho": 4.0, "alpha": 0.3}.items() <= found["selection"]["start"].items()
    sentence, numbers, shrunk = auto_choice_sentences(open_run(folder), NAME)
    assert shrunk.startswith("All weights are base + ")
    assert "featcal with lam 50.0, rho 4.0 " in numbers and "the base 1000 (" in numbers
    shown = calibration_text(open_run(folder), NAME)
    assert sentence in shown and numbers in shown
    card = (folder / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")
    assert escape_markdown(sentence) in card
    sections = Report(open_run(folder), "calibration").content.sections
    assert f"{NAME}: {sentence}" in [text for section in sections for text in section.sentences]


@pytest.mark.slow
def test_views_and_shares_are_flags(folder: Path, run_cli: Cli) -> None:
    words = ("calibrate", folder, "--name", "v", "--method", "residual", "--set", "folds=2")
    refused = run_cli(*words, "--interpolate", "2")
    assert refused.code == 2 and "less than or equal to 1.5" in refused.err
