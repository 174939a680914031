"""A calibration can be repeated from what its card and its weights say, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from driftlens.calibration.featcal import FeatCal
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.study.card import calibration_command, model_card
from driftlens.runs.run import DriftRun
from tests.cli.conftest import Cli
from tests.pipeline.calibrating import NAME, copied, request

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


def test_the_command_on_the_card_makes_the_same_weights(
    run: DriftRun, light: DriftRun, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    card = (run.path / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")
    (line,) = (line for line in card.splitlines() if line.startswith("    driftlens calibrate RUN "))
    again = copied(light, tmp_path / "again")
    arguments = [str(again) if word == "RUN" else word for word in shlex.split(line)[1:]]
    assert run_cli(*arguments, "--progress", "none").code == 0
    found, expected = load_file(again / WEIGHTS), load_file(run.path / WEIGHTS)
    assert all((found[key] == expected[key]).all() for key in expected)


def test_card_and_header_name_sites_layers_seed_and_samples(run: DriftRun) -> None:
    info = run.manifest.calibrations[NAME]
    with safe_open(run.path / WEIGHTS, "pt") as file:
        header = file.metadata()
    assert (
        json.loads(header["calibration_sites"]) == ["*.mlp.*", "*.ln_?"]
        and header["calibration_preset"] == ""
    )
    assert (
        json.loads(header["calibration_layers"]) == [2, 4]
        and json.loads(header["calibration_seed"]) == info.seed
    )
    assert json.loads(header["calibration_samples"]) == dict(info.samples)
    assert json.loads(header["calibration_sample_digests"]) == dict(info.sample_digests)
    card = model_card(run, NAME)
    assert "featcal on layers 2, 4" in card and "| Preset | none |" in card
    assert r"| Sites | \*.mlp.\*, \*.ln\_? (8 modules) |" in card


def test_what_an_older_run_did_not_record_is_not_made_up(run: DriftRun) -> None:
    older = dataclasses.replace(run.manifest.calibrations[NAME], seed=None)
    assert calibration_command(NAME, older) == ""


def test_every_setting_is_spelled_as_the_flag_reads_it(run: DriftRun) -> None:
    info = dataclasses.replace(run.manifest.calibrations[NAME], settings=FeatCal(eps=1e-9).get_params())
    words = shlex.split(calibration_command(NAME, info))
    settings = (
        "lam=0.05",
        "eps=1e-09",
        'update=["linear", "bias", "norm"]',
        'anchor="merged"',
        "last_block_tokens=null",
    )
    assert {f"--set={setting}" for setting in settings} < set(words)
    assert "--sites=*.mlp.*,*.ln_?" in words
