"""Norms only: FeatCal's closed form of norms, under a name of its own."""

from __future__ import annotations

import pytest
import torch

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import PRESETS, FeatCal, Norms
from tests.calibration.helpers import calibrated, subject


@pytest.mark.parametrize("name", ["open_clip_vit", "llama"])
def test_it_is_featcal_of_norms_alone(name: str) -> None:
    models = subject(name)
    own, theirs = (calibrated(models, each) for each in (Norms(lam=0.2), FeatCal(lam=0.2, update=("norm",))))
    assert own.keys() == theirs.keys() and own and all("norm" in key or "ln_" in key for _, key in own)
    for place, value in own.items():
        assert torch.equal(value, theirs[place])


def test_its_presets_are_those_of_featcal_but_for_what_is_solved() -> None:
    assert calibrators["norms"] is Norms and Norms.presets.keys() == PRESETS.keys()
    for name, settings in Norms.presets.items():
        made = Norms(**settings)
        assert made.update == ("norm",) and "update" not in made.get_params()
        assert all(made.get_params()[key] == PRESETS[name][key] for key in ("lam", "rho", "alpha"))
    assert Norms().changed(rho=1).get_params()["rho"] == 1
