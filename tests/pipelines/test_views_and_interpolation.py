"""Calibrations that read views of samples, and models that keep a share of their way from the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import driftlens as dl
from driftlens.checkpoints.tensor_sources import InMemorySource, InterpolatedSource, StateSource
from driftlens.experiment.model_card import calibration_command
from driftlens.pipelines import calibration_plan
from driftlens.pipelines.calibrate import calibrate, prepare_calibration
from driftlens.results.calibration_summary import auto_choice_sentences, calibration_effect_tables
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import DataError, SpecError
from tests.pipelines.calibrating import copied, request
from tests.zoo.world import World


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"calibrations/{name}/weights.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["residual", pytest.param("featcal", marks=pytest.mark.slow)])
def test_views_change_weights_and_no_count(roomy: DriftRun, tmp_path: Path, method: str) -> None:
    """Without a copy all is as if nobody had asked; the record says what was read, and how to ask for it again."""
    folder = copied(roomy, tmp_path / "run")
    for name, views in (("plain", None), ("none", "none"), ("mixed", "mix:1")):
        run = calibrate(folder, request(name, method=method, views=views, attribution=False, layers=[2]))
    plain, none, mixed = (weights(folder, name) for name in ("plain", "none", "mixed"))
    assert equal(plain, none) and not equal(plain, mixed)
    infos = run.manifest.calibrations
    assert infos["plain"].samples == infos["mixed"].samples
    assert infos["plain"].views == {} and set(infos["mixed"].views.values()) == {"mix:1"}
    assert "--views=mix:1" in calibration_command("mixed", infos["mixed"])
    if method == "residual":
        assert (infos["plain"].settings["mu"], infos["mixed"].settings["mu"]) == (0, 0.9)


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"views": "words"}, "need texts"), ({"views": "mix", "samples": 1}, "but it has one")],
)
def test_views_that_can_not_be_made_are_refused_before_the_run_is_touched(
    roomy: DriftRun, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        calibrate(roomy.path, request(**asked))


@pytest.mark.slow
def test_views_of_the_spec_are_read_by_calibrations_and_regmean(world: World, tmp_path: Path) -> None:
    """A task's own entry goes over the defaults; neither diagnosis nor test has copies."""
    spec = world.spec(metrics={"jacobian": False}, merge={"method": "regmean"})
    merged = {}
    for views in (None, "crop:1"):
        spec["data"]["defaults"]["views"] = views
        run = dl.analyze(spec, out=tmp_path / f"{views}", progress="none")
        merged[views] = load_file(run.path / "models/merged.safetensors")
    assert not equal(merged[None], merged["crop:1"])
    spec["data"]["shapes"] |= {"views": "none"}
    spec["data"]["defaults"]["views"] = "mix:2"
    run = dl.analyze(spec, out=tmp_path / "own", progress="none")
    opened = prepare_calibration(run.path, request())
    sets = [(of.calibration, of.diagnosis, of.test) for _, of in sorted(opened.study.tasks.items())]
    assert [[of and of.num_with_views for of in each] for each in sets] == [[12, 5, 9], [4, 5, 9]]
    assert opened.plan.views == {"flowers": "mix:2", "shapes": "none"}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.5])
def test_floats_keep_a_share_of_their_way_from_the_base(generator: torch.Generator, share: float) -> None:
    """Bit for bit the base at 0 and the end at 1, in the dtype of the end; whole numbers are the end's."""
    start, end = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64).bfloat16().unbind()
    sources = [
        InMemorySource(name, {"w": value, "n": torch.tensor([number])})
        for number, (name, value) in enumerate({"base": start, "end": end}.items())
    ]
    found = InterpolatedSource(sources[0], sources[1], share)
    want = ((1 - share) * start.double() + share * end.double()).bfloat16()
    assert torch.equal(found.read("w"), want) and torch.equal(found.read("w", (2, 5)), want[2:5])
    assert found.read("n") == 1 and (share not in (0, 1) or torch.equal(want, (start, end)[int(share)]))


@pytest.mark.slow
def test_all_tensors_keep_a_share_and_the_record_says_so(roomy: DriftRun, world: World, tmp_path: Path) -> None:
    folder, base = copied(roomy, tmp_path / "run"), world.state("base")
    for name, share in (("whole", 1), ("shrunk", 0.5)):
        run = calibrate(folder, request(name, interpolate=share, attribution=False, layers=[2]))
    whole, shrunk = weights(folder, "whole"), weights(folder, "shrunk")
    for key, value in shrunk.items():
        torch.testing.assert_close(value, (base[key] + whole[key]) / 2)
    moved = [key for key, value in whole.items() if not torch.equal(value, base[key])]
    assert {"visual.proj", "visual.conv1.weight"} <= {*moved}  # not what was solved for alone
    # The card tells the moves of the file that is there, not of what was solved for before the interpolation.
    merged = load_file(folder / "models/merged.safetensors")
    log = run.calibration("shrunk").set_index("site")["weight_change"]
    key = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    for name, other in (("shrunk", shrunk), ("whole", whole)):
        moved_by = float((other[key] - merged[key]).norm() / merged[key].norm())
        told = run.calibration(name).set_index("site")["weight_change"]["transformer.resblocks.0.mlp.c_fc"]
        assert told == pytest.approx(moved_by, rel=1e-5)
    assert log.notna().all() and len(log) == len(run.calibration("whole"))
    sheets = {sheet.name: sheet for sheet in calibration_effect_tables(run, "shrunk")}
    assert "objective left" not in sheets["weight-moves-shrunk"].column_formats
    info = run.manifest.calibrations["shrunk"]
    assert info.interpolation == {"asked": 0.5, "share": 0.5}
    assert "--interpolate=0.5" in calibration_command("shrunk", info)
    assert any("base + 0.5" in sentence for sentence in auto_choice_sentences(run, "shrunk"))


@pytest.mark.slow
def test_a_share_that_is_applied_twice_is_caught(
    roomy: DriftRun, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(base: StateSource, end: StateSource, share: float) -> InterpolatedSource:
        return InterpolatedSource(base, InterpolatedSource(base, end, share), share)

    monkeypatch.setattr(calibration_plan, "InterpolatedSource", twice)
    with pytest.raises(AssertionError):
        test_all_tensors_keep_a_share_and_the_record_says_so(roomy, world, tmp_path)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"method": "surgery", "interpolate": 0.5}, "changes no weights"),
        ({"auto": True, "samples": 4}, "at least"),
    ],
)
def test_impossible_interpolation_is_refused_before_the_run_is_touched(
    roomy: DriftRun, asked: dict[str, Any], says: str
) -> None:
    wanted = request(**asked)
    with pytest.raises((SpecError, DataError), match=says):
        calibrate(roomy.path, wanted)
    assert not roomy.manifest.calibrations
