"""One world in the forms of two libraries gives the same tables."""

from __future__ import annotations

import pathlib
import shutil

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

import driftlens as dl
from driftlens.runs.run import DriftRun
from tests.families import OPEN_CLIP, TRANSFORMERS_CLIP
from tests.zoo.world import LOADERS, SCALING, Form, World


@pytest.fixture(scope="module")
def transformers_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    spec = world.spec("hf", metrics={"jacobian": {"samples": 2}, "cka": True})
    return dl.analyze(spec, out=tmp_path_factory.mktemp("hf") / "run", progress="none")


def numbers(frame: pd.DataFrame, *without: str) -> pd.DataFrame:
    return frame.drop(columns=["path", *without], errors="ignore")


@pytest.mark.parametrize("table", ["layers", "samples", "outputs", "accuracy"])
@OPEN_CLIP
@TRANSFORMERS_CLIP
@pytest.mark.shows("drift", "attribution")
def test_both_forms_give_the_same_tables(finished: DriftRun, transformers_run: DriftRun, table: str) -> None:
    # Errors of self-checks are differences of rounding; drift of the stem's class token is the same for all samples, so
    # that its deviation and its similarity are rounding too.
    noise = ("closure_error", "jacobian_error", "softmax_integral_error", "ce_integral_error")
    one, other = (numbers(getattr(run, table)(), *noise) for run in (finished, transformers_run))
    pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=2e-6, check_exact=False)


def test_both_forms_compare_the_same_parameters(finished: DriftRun, transformers_run: DriftRun) -> None:
    one, other = (
        run.params().query("scope != 'module'").drop(columns="path") for run in (finished, transformers_run)
    )
    pd.testing.assert_frame_equal(
        one.reset_index(drop=True), other.reset_index(drop=True), rtol=1e-5, atol=1e-6
    )


REAL_TASKS = ("clothing10", "sign_digits")
COMPARED = [
    *("drift_l2_mean", "drift_rel", "drift_vs_base", "cos_mean"),
    *("mismatch_l2_mean", "propagation_l2_mean", "amplification"),
]


def real_run(data: pathlib.Path, form: Form, models: pathlib.Path, out: pathlib.Path) -> DriftRun:
    """A run of two real experts on few samples; each form saves its merged model in its own base's dtype."""
    suffix = ".safetensors" if form == "open_clip" else ""
    source = models / ("model_config.json" if form == "open_clip" else "base")
    spec = {
        "version": 1,
        "architecture": {"loader": LOADERS[form], "source": str(source)},
        "base": {"weights": str(models / f"base{suffix}")},
        "merge": {"method": "task_arithmetic", "scaling": SCALING},
        "experts": {task: {"weights": str(models / f"{task}{suffix}")} for task in REAL_TASKS},
        "data": {
            "defaults": {"n": 4, "n_diagnosis": 6, "n_test": 6},
            **{task: {"kind": "npz", "file": str(data / f"{task}.npz")} for task in REAL_TASKS},
        },
        "metrics": {"jacobian": False},
        "compute": {"device": "cpu"},
    }
    return dl.analyze(spec, out=out, progress="none")


@pytest.fixture(scope="module")
def real_open_clip(real: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    out = tmp_path_factory.mktemp("real") / "run"
    return real_run(real / "data", "open_clip", real / "open_clip", out)


def in_float16(folders: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """transformers' folders with their weights rounded to float16."""
    for name in ("base", *REAL_TASKS):
        (target / name).mkdir(parents=True)
        for settings in (folders / name).glob("*.json"):
            shutil.copy(settings, target / name)
        weights = load_file(folders / name / "model.safetensors")
        save_file(
            {key: tensor.half() for key, tensor in weights.items()}, target / name / "model.safetensors"
        )
    return target


def test_real_weights_of_equal_rounding_give_equal_rows(
    real: pathlib.Path, real_open_clip: DriftRun, tmp_path: pathlib.Path
) -> None:
    # open_clip's files hold float16. Rounded likewise, transformers' hold the very same numbers, and so do the merged
    # models: summed in float32 by both and rounded to float16. What is left is float32 arithmetic in another order.
    rounded = real_run(real / "data", "hf", in_float16(real / "hf", tmp_path / "models"), tmp_path / "run")
    one, other = (run.layers()[COMPARED] for run in (real_open_clip, rounded))
    pd.testing.assert_frame_equal(one, other, rtol=1e-4, atol=1e-6)


def test_rounding_weights_to_float16_moves_real_rows_by_little(
    real: pathlib.Path, real_open_clip: DriftRun, tmp_path: pathlib.Path
) -> None:
    # transformers' own files are float32, so every weight differs by up to 2^-11 of itself; drift is a small
    # difference of features and feels that two to three times as much (1.3e-3 measured).
    unrounded = real_run(real / "data", "hf", real / "hf", tmp_path / "run")
    one, other = (run.layers()[COMPARED] for run in (real_open_clip, unrounded))
    pd.testing.assert_frame_equal(one, other, rtol=5e-3, atol=1e-5)
    with pytest.raises(AssertionError):
        pd.testing.assert_frame_equal(one, other, rtol=1e-5, atol=1e-6)
