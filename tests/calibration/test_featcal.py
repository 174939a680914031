"""FeatCal's manners: settings stored as given, refused in words when used, presets as published."""

from __future__ import annotations

import pytest
import torch

from driftlens.calibration.calibrator import preset_settings
from driftlens.calibration.featcal import PRESETS, FeatCal
from driftlens.utils.errors import SpecError
from tests.refusing import refusing


def test_settings_are_stored_as_given_and_shown_where_they_differ_from_the_defaults() -> None:
    update = ["linear"]
    calibrator = FeatCal(lam=-3, update=update)
    assert calibrator.lam == -3 and calibrator.update is update
    assert repr(calibrator) == "FeatCal(lam=-3, update=['linear'])"
    assert repr(FeatCal()) == "FeatCal()"


def test_parameters_can_be_read_changed_and_make_an_equal_calibrator() -> None:
    calibrator = FeatCal().changed(rho=1.0, alpha=0.5)
    assert (calibrator.rho, calibrator.alpha) == (1.0, 0.5)
    assert FeatCal(**calibrator.get_params()).get_params() == calibrator.get_params()


def test_scikit_learn_can_clone_it() -> None:
    from sklearn.base import clone

    assert clone(FeatCal(lam=0.2)).get_params() == FeatCal(lam=0.2).get_params()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lam", -1e-9),
        ("lam", float("nan")),
        ("lam", "0.05"),
        ("rho", float("inf")),
        ("alpha", 1.1),
        ("alpha", -0.1),
        ("alpha", True),
        ("eps", -1.0),
        ("update", ("linear", "bais")),
        ("update", ()),
        ("update", "linear"),
        ("anchor", "base"),
        ("solve_dtype", "float16"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{setting} is") as caught:
        FeatCal(**{setting: value}).check()  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_without_a_base_the_anchor_can_only_be_the_merged_model() -> None:
    with refusing(SpecError, match="there is no base", hint="rho to 1"):
        FeatCal(rho=2.0).check(has_base=False)
    FeatCal(rho=1.0).check(has_base=False)
    FeatCal(rho=2.0, anchor="none").check(has_base=False)


def test_presets_are_the_published_settings_and_that_of_the_studies() -> None:
    shown = {name: tuple(PRESETS[name][key] for key in ("lam", "rho", "alpha")) for name in PRESETS}
    assert shown == {
        "paper-clip": (0.05, 2.0, 0.3),
        "demo-clip": (0.05, 2.2, 0.25),
        "flan-t5": (1e-5, 2.0, 0.6),
        "llama-3b": (1e-5, 0.5, 0.15),
        "llama-8b": (3.0, 0.5, 0.15),
        "embeddings": (0.05, 3.0, 0.5),
    }
    for name in PRESETS:
        FeatCal(**PRESETS[name]).check()
    assert FeatCal(**PRESETS["paper-clip"]).get_params() == FeatCal().get_params()
    kinds = (("open-clip",), ("hf-t5",), ("hf-decoder",), ("embeddings", "hf-auto"))
    assert [*map(FeatCal.preset_for, kinds)] == ["paper-clip", "flan-t5", "llama-3b", "embeddings"]
    with refusing(SpecError, match="paper-clipp", hint="paper-clip"):
        preset_settings("featcal", "paper-clipp", {})


def test_a_task_counts_the_inverse_of_its_gram_norm() -> None:
    weights = FeatCal(eps=0.5).task_weight(torch.tensor([4.0, 0.1]))
    assert weights.tolist() == [0.25, 2.0]
