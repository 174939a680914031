"""Calibrations that read views of samples, and models that keep a share of their way from the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftlens.jobs.contest.methods import request_of, wanted_methods
from safetensors.torch import load_file

import driftlens as dl
from driftlens.base.access import Context
from driftlens.base.errors import Cancelled, DataError, SpecError
from driftlens.calibration.automatic import folds_of
from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.sources import Between, TensorsSource
from driftlens.data.samples import part_of
from driftlens.engine.calibrating import Ground
from driftlens.engine.sites import select_sites
from driftlens.findings.before_after import calibration_sheets, selection_sentences
from driftlens.jobs.calibrate.job import calibrate, open_calibration
from driftlens.jobs.calibrate.variants import with_parameters
from driftlens.jobs.contest import contest, shrinking
from driftlens.jobs.contest.automatic import choice_of
from driftlens.jobs.study.card import calibration_command
from driftlens.runs.run import DriftRun
from driftlens.spec.data import Views
from tests.pipeline.calibrating import copied, request
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
    ("asked", "says"), [({"views": "words"}, "are of texts"), ({"views": "mix", "samples": 1}, "one sample")]
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
    opened = open_calibration(run.path, request())
    sets = [(of.calibration, of.diagnosis, of.test) for _, of in sorted(opened.study.tasks.items())]
    assert [[of and of.num_read for of in each] for each in sets] == [[12, 5, 9], [4, 5, 9]]
    assert opened.plan.views == {"flowers": "mix:2", "shapes": "none"}


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 1.5])
def test_floats_keep_a_share_of_their_way_from_the_base(generator: torch.Generator, share: float) -> None:
    """Bit for bit the base at 0 and the end at 1, in the dtype of the end; whole numbers are the end's."""
    start, end = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64).bfloat16().unbind()
    sources = [
        TensorsSource(name, {"w": value, "n": torch.tensor([number])})
        for number, (name, value) in enumerate({"base": start, "end": end}.items())
    ]
    found = Between(sources[0], sources[1], share)
    want = ((1 - share) * start.double() + share * end.double()).bfloat16()
    assert torch.equal(found.read("w"), want) and torch.equal(found.read("w", (2, 5)), want[2:5])
    assert found.read("n") == 1 and (share not in (0, 1) or torch.equal(want, (start, end)[int(share)]))


@pytest.mark.slow
def test_all_tensors_keep_a_share_and_the_record_says_so(
    roomy: DriftRun, world: World, tmp_path: Path
) -> None:
    folder, base = copied(roomy, tmp_path / "run"), world.state("base")
    for name, share in (("whole", 1), ("shrunk", 0.5)):
        run = calibrate(folder, request(name, shrink=share, attribution=False, layers=[2]))
    whole, shrunk = weights(folder, "whole"), weights(folder, "shrunk")
    for key, value in shrunk.items():
        torch.testing.assert_close(value, (base[key] + whole[key]) / 2)
    moved = [key for key, value in whole.items() if not torch.equal(value, base[key])]
    assert {"visual.proj", "visual.conv1.weight"} <= {*moved}  # not what was solved for alone
    info = run.manifest.calibrations["shrunk"]
    assert info.shrink == {"asked": 0.5, "share": 0.5}
    assert "--shrink=0.5" in calibration_command("shrunk", info)
    assert any("base + 0.5" in sentence for sentence in selection_sentences(run, "shrunk"))


@pytest.mark.slow
def test_a_share_that_was_asked_for_is_not_said_to_be_chosen(roomy: DriftRun, tmp_path: Path) -> None:
    asked = request("best", method="featcal", auto=True, shrink=0.5, layers=[2], attribution=False)
    run = calibrate(copied(roomy, tmp_path / "run"), asked, choose=choice_of(asked))
    info, sentences = run.calibration_info("best"), selection_sentences(run, "best")
    assert info.automatic and info.shrink == {"asked": 0.5, "share": 0.5}
    assert sentences[-1] == "All weights are base + 0.5 (repaired - base)."


@pytest.mark.slow
def test_the_share_is_chosen_on_samples_that_the_repair_has_not_seen(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out scores of the curve are those of a repair by hand; what is saved is fitted to all samples."""
    more: dict[str, Any] = {"layers": [2, 3], "attribution": False}
    folder, asked = copied(roomy, tmp_path / "run"), request("auto", shrink="auto", **more)
    stopped: list[Any] = []

    def stop(event: Any) -> None:
        if event.phase == "calibrate" and event.done == 2 and not stopped:
            stopped.append(event)
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        calibrate(folder, asked, Context(on_progress=stop), choose=choice_of(asked))
    with monkeypatch.context() as patch:  # the curve is kept
        patch.setattr(contest.HeldOut, "of", None)
        run = calibrate(folder, asked.changed(resume=True), choose=choice_of(asked))
    shrink = run.manifest.calibrations["auto"].shrink
    curve = {entry["share"]: entry for entry in shrink["curve"]}
    assert [*curve] == [*shrinking.SHARES]
    assert shrink["share"] == min(curve, key=lambda share: curve[share]["score"])
    again = calibrate(folder, request("by-hand", shrink=shrink["share"], **more))
    assert equal(weights(folder, "auto"), weights(folder, "by-hand"))
    assert f"base + {shrink['share']:g} (repaired - base)" in " ".join(selection_sentences(again, "auto"))
    [sheet] = [sheet for sheet in calibration_sheets(again, "auto") if sheet.name == "shares-auto"]
    assert [row[:2] for row in sheet.rows] == [(share, entry["score"]) for share, entry in curve.items()]

    study = open_calibration(folder, request("other")).study
    pool, samples = study.pool, {task: at.calibration for task, at in study.tasks.items()}
    folds = {task: folds_of(len(of), task) for task, of in samples.items() if of is not None}
    rest = {
        task: part_of(of, sorted(at for fold in folds[task][:-1] for at in fold))
        for task, of in samples.items()
        if of is not None
    }
    layers = FeatCal().calibrate(Ground(pool, rest, select_sites(pool.chain, layers=[2, 3])))
    updates = {(layer.layer, name): value for layer in layers for name, value in layer.updates.items()}
    repaired = with_parameters(pool.chain, pool.source("merged"), study.like, updates)
    held_out = {task: part_of(of, folds[task][-1]) for task, of in samples.items() if of is not None}
    for share in (0.0, 0.6):
        mixture = {
            key: (1 - share) * pool.source("base").read(key).double() + share * repaired.read(key).double()
            for key in repaired.headers
        }
        pool.add("mixture", TensorsSource("mixture", {key: value.float() for key, value in mixture.items()}))
        judge = contest.Judge(study)
        scores = contest.HeldOut(study, held_out, judge).of("mixture")
        mean = float(np.mean([of.mean() for of in scores.values()]))
        assert curve[share]["score"] == pytest.approx(mean, rel=1e-4)
        assert curve[share]["score_low"] < mean < curve[share]["score_high"]


@pytest.mark.parametrize("share", [-0.1, 1.51, "much", True, float("nan"), float("inf")])
def test_odd_shares_are_refused(share: Any) -> None:
    with pytest.raises(SpecError, match=r"0 to 1\.5"):
        request(shrink=share)


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"method": "surgery", "shrink": 0.5}, "attaches"), ({"shrink": "auto", "samples": 4}, "at least")],
)
def test_shrinking_that_can_not_be_is_refused_before_the_run_is_touched(
    roomy: DriftRun, asked: dict[str, Any], says: str
) -> None:
    wanted = request(**asked)
    with pytest.raises((SpecError, DataError), match=says):
        calibrate(roomy.path, wanted, choose=choice_of(wanted))
    assert not roomy.manifest.calibrations


def test_entrants_are_asked_for_with_views_and_shares() -> None:
    """Rows of their own beside those without, and no settings of the method."""
    given: list[tuple[str, dict[str, object]]] = [
        ("residual", {}),
        ("residual", {"views": 3, "mu": 0.5}),
        ("featcal", {"shrink": "auto"}),
    ]
    asked = [request_of(entrant) for entrant in wanted_methods(given)]
    assert [of.name for of in asked] == ["residual", "residual-views-3-mu-0.5", "featcal-shrink-auto"]
    assert asked[1].views == Views() and asked[1].parameters == {"mu": 0.5} and asked[2].shrink == "auto"
    for odd in ({"views": 0}, {"shrink": 7}, {"vews": 1}):
        with pytest.raises(SpecError):
            wanted_methods([("residual", odd)])
