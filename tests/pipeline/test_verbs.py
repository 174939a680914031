"""The command line's verbs as functions: each does what its command does."""

from __future__ import annotations

import html
import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import driftlens as dl
from driftlens.base.errors import NumericsError, SpecError
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest import merges as merges_module
from driftlens.merging.method import Merge
from driftlens.runs.run import DriftRun
from tests.pipeline.calibrating import copied, request
from tests.zoo.world import SCALING, World, merged_weights, write_spec


@pytest.mark.slow
def test_calibrate_takes_the_commands_options_by_name(
    world: World, light: DriftRun, tmp_path: pathlib.Path
) -> None:
    settings = {"lam": 0.2, "rho": 2.0, "alpha": 0.5}
    wanted = calibrate(copied(light, tmp_path / "wanted"), request(parameters=settings, samples=3))
    run = dl.calibrate(
        copied(light, tmp_path / "run"),
        name="featcal",
        preset="paper-clip",
        lam=0.2,
        parameters={"alpha": 0.5},
        samples=3,
        progress="none",
    )
    assert run.manifest.calibrations["featcal"].settings == wanted.manifest.calibrations["featcal"].settings
    found = run.calibrated_state("featcal")
    for key, value in load_file(wanted.path / "calibrations/featcal/weights.safetensors").items():
        assert torch.equal(found[key], value), key
    with pytest.raises(SpecError, match="made from a spec"):
        dl.calibrate(run, name="other", data={"flowers": torch.zeros(2, 3, 16, 16)})


@pytest.mark.slow
def test_sweep_adds_the_rows_of_its_command(light: DriftRun, tmp_path: pathlib.Path) -> None:
    given = {"accuracy": False, "samples": 3, "progress": "none"}
    rows = dl.sweep(copied(light, tmp_path / "run"), param={"lam": [0.2, 0.4]}, **given).sweeps()
    assert sorted(set(rows["lam"])) == [0.2, 0.4] and rows["accuracy"].isna().all()


def test_merge_and_validate_take_a_spec_in_every_form(world: World, tmp_path: pathlib.Path) -> None:
    file = dl.merge(
        write_spec(tmp_path / "run.yaml", world.spec()),
        method="task_arithmetic",
        parameters={"scaling": SCALING},
        out=tmp_path / "merged.safetensors",
    )
    for key, value in merged_weights(world).items():
        torch.testing.assert_close(load_file(file)[key], value, rtol=1e-6, atol=1e-7)
    assert not dl.validate(world.spec()).problems
    broken = dl.validate(world.spec(base={"weights": str(tmp_path / "nowhere.safetensors")}), device="cpu")
    assert [finding.subject for finding in broken.problems] == ["base"] and broken.exit_code == 4


@pytest.mark.slow
def test_compared_merges_are_a_table_that_says_what_was_not_made(
    world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, out = world.spec(), tmp_path / "out"
    merges = ["average", ("task_arithmetic", {"scaling": 0.5})]
    merged = merges_module.merged_source

    def overflowing(models: Any, merge: Merge, *arguments: Any, **options: Any) -> Any:
        if merge.method.name == "task_arithmetic":
            raise NumericsError("a weight is infinite")
        return merged(models, merge, *arguments, **options)

    monkeypatch.setattr(merges_module, "merged_source", overflowing)
    found = dl.compare_merges(values, merges, out=out, progress="none")
    rows = json.loads((out / "merges.json").read_text())["merges"]
    frame = found.frame()
    assert list(frame["merge"]) == [row["merge"] for row in rows if row["place"]]
    assert list(frame["KL to the experts (nat)"]) == [row["kl"] for row in rows if row["place"]]
    assert "task_arithmetic scaling=0.5: not made, as a weight is infinite" in found.notes()
    assert html.escape(found.notes()) in found._repr_html_() and "<td>average</td>" in found._repr_html_()
    assert not [child for child in out.iterdir() if child.is_dir()]
    with pytest.raises(SpecError, match="keep=True"):
        dl.compare_merges(values, merges, keep=True)
