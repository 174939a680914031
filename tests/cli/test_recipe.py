"""mergekit's recipes: numbers by hand, mergekit's own where it is installed, and what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from driftlens.checkpoints.loading import open_checkpoint
from tests.cli.conftest import Cli
from tests.zoo.decoders import CONFIGS, saved

MERGEKIT = os.environ.get("DRIFTLENS_MERGEKIT") or shutil.which("mergekit-yaml")
MODELS = ("base", "one", "two")
Folders = dict[str, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(MODELS):
        saved(CONFIGS["Llama, untied"], root / name, seed)
    return {name: str(root / name) for name in MODELS}


def recipe(folders: Folders, method: str, **more: Any) -> dict[str, Any]:
    """Two models with weights and densities of their own, where the method has them."""
    own: list[dict[str, Any]] = [{}, {}]
    if method not in ("slerp", "karcher", "model_stock"):
        own = [{"weight": [0.2, 0.9, 0.4]}, {"weight": [{"filter": "mlp", "value": [1, 0]}, {"value": 0.7}]}]
    if method not in ("slerp", "karcher", "model_stock", "linear", "task_arithmetic"):
        own = [each | {"density": density} for each, density in zip(own, (0.6, [0.3, 0.8]), strict=True)]
    models = [
        {"model": folders[name], "parameters": each} for name, each in zip(("one", "two"), own, strict=True)
    ]
    made = {"merge_method": method, "models": models, "base_model": folders["base"], "dtype": "float32"}
    if method in ("linear", "karcher"):
        del made["base_model"]
    if method == "slerp":
        made |= {"models": models[:1], "base_model": folders["two"]}
        made["parameters"] = {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3]},
                {"filter": "norm", "value": 0.9},
                {"value": 0.4},
            ]
        }
    return made | more


def written(made: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    file = folder / "recipe.yml"
    file.write_text(yaml.safe_dump(made))
    return file


def weights(folder: object) -> dict[str, Tensor]:
    return load_file(pathlib.Path(str(folder)) / "model.safetensors")


def test_lists_go_over_layers_and_filters_over_names(
    folders: Folders, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    made = recipe(folders, "task_arithmetic", parameters={"lambda": 0.5})
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    base, one, two = (weights(folders[name]) for name in MODELS)
    found = weights(tmp_path / "out")
    first = {
        "embed_tokens": 0.2,
        "layers.0": 0.2,
        "layers.1": 0.9,
        "layers.2": 0.4,
        "model.norm": 0.2,
        "lm_head": 0.2,
    }
    second = {"layers.0.mlp": 1.0, "layers.1.mlp": 0.5, "layers.2.mlp": 0.0}
    for key, start in base.items():
        a = next(value for part, value in first.items() if part in key)
        b = next((value for part, value in second.items() if part in key), 0.7)
        wanted = start + 0.5 * (a * (one[key] - start) + b * (two[key] - start))
        torch.testing.assert_close(found[key], wanted)
    assert "mergekit" in (tmp_path / "out" / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def in_slices(folders: Folders, method: str) -> dict[str, Any]:
    """The first layer apart from the others, with settings of slices and of their models."""
    made = recipe(folders, method)
    del made["models"]

    def sources(first: int, end: int, *given: dict[str, Any]) -> list[dict[str, Any]]:
        settings = [*given, {}]
        return [
            {"model": folders[name], "layer_range": [first, end], "parameters": own}
            for name, own in zip(("one", "two", "base"), settings, strict=True)
        ]

    weights = [{"filter": "self_attn", "value": [0.2, 0.8]}, {"value": 0.5}]
    return made | {
        "slices": [
            {"sources": sources(0, 1, {"weight": 0.3}, {}), "parameters": {"weight": [0.9, 0.1]}},
            {"sources": sources(1, 3, {"weight": weights}, {"weight": [1, 0]})},
        ],
        "parameters": {"weight": 7, "density": 1.0},
    }


def test_slices_have_settings_of_their_own(folders: Folders, tmp_path: pathlib.Path, run_cli: Cli) -> None:
    done = run_cli("merge", written(in_slices(folders, "dare_linear"), tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    base, one, two = (weights(folders[name]) for name in MODELS)
    found = weights(tmp_path / "out")
    # Of one layer the last entry of a list holds, and the first one before and behind all layers.
    wanted = {
        "embed_tokens": (0.3, 0.9),
        "layers.0": (0.3, 0.1),
        "layers.1.self_attn": (0.2, 1.0),
        "layers.2.self_attn": (0.8, 0.0),
        "layers.1": (0.5, 1.0),
        "layers.2": (0.5, 0.0),
        "model.norm": (0.5, 1.0),
        "lm_head": (0.5, 1.0),
    }
    for key, start in base.items():
        a, b = next(value for part, value in wanted.items() if part in key)
        torch.testing.assert_close(found[key], start + a * (one[key] - start) + b * (two[key] - start))


DROPPED = ("dare_linear", "dare_ties", "della", "della_linear")


def dropped(folders: Folders, method: str) -> dict[str, Any]:
    """One model, so that what is left of its task vector can be seen."""
    own = {"weight": 1.0, "density": 0.6} | ({"epsilon": 0.3} if "della" in method else {})
    made = recipe(folders, method) | {"models": [{"model": folders["one"], "parameters": own}]}
    assert made["base_model"] == folders["base"]
    return made


def is_drawn_by_the_law(method: str, folders: Folders, merged: dict[str, Tensor]) -> None:
    """Sizes add up to the task vector's; shares that stay are within five standard errors of their chances."""
    base, one = weights(folders["base"]), weights(folders["one"])
    kept, chances = [], []
    for key in ("model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        vector, left = one[key] - base[key], merged[key] - base[key]
        torch.testing.assert_close(left.abs().sum(), vector.abs().sum(), rtol=1e-3, atol=0)
        places = vector.abs().argsort(dim=1).argsort(dim=1) / (vector.shape[1] - 1)
        kept.append((left.abs() > 1e-6).double().flatten())
        chances.append((0.6 + (0.6 * (places - 0.5) if "della" in method else 0 * places)).double().flatten())
    found, chance = torch.cat(kept), torch.cat(chances)
    for part in (chance > 0, chance > chance.median(), chance < chance.median()):
        if part.any():
            error = (chance[part] * (1 - chance[part])).sum().sqrt()
            assert abs(found[part].sum() - chance[part].sum()) < 5 * error
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("method", DROPPED)
def test_random_masks_follow_the_law(
    method: str, folders: Folders, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    file = written(dropped(folders, method), tmp_path)
    for name in ("out", "again"):
        done = run_cli("merge", file, "--out", tmp_path / name)
        assert done.code == 0, done.err
    merged, again = weights(tmp_path / "out"), weights(tmp_path / "again")
    is_drawn_by_the_law(method, folders, merged)
    assert all(torch.equal(merged[key], again[key]) for key in merged)


def test_dtypes_say_what_is_computed_in_and_what_is_written(
    folders: Folders, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    base, one, two = (weights(folders[name]) for name in MODELS)
    cases = {("float32", None): torch.float32, ("bfloat16", None): torch.bfloat16}
    cases |= {("float32", "float16"): torch.float16, ("bfloat16", "float32"): torch.float32}
    for (dtype, out_dtype), stored in cases.items():
        made = recipe(folders, "task_arithmetic", dtype=dtype, parameters={"lambda": 0.5})
        made["models"] = [{**model, "parameters": {"weight": 0.75}} for model in made["models"]]
        made |= {"out_dtype": out_dtype} if out_dtype else {}
        out = tmp_path / f"{dtype}-{out_dtype}"
        done = run_cli("merge", written(made, tmp_path), "--out", out)
        assert done.code == 0, done.err
        found, computed = weights(out), getattr(torch, dtype)
        for key in base:
            first, *others = (model[key].to(computed) for model in (base, one, two))
            step = 0.75 * (others[0] - first) + 0.75 * (others[1] - first)
            wanted = first + 0.5 * step
            assert found[key].dtype == stored and wanted.dtype == computed
            torch.testing.assert_close(found[key], wanted.to(stored), rtol=1e-5, atol=1e-7)
        if computed == torch.bfloat16:
            assert all(torch.equal(value, value.bfloat16().to(stored)) for value in found.values())
        config = json.loads((out / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == str(stored).removeprefix("torch.")
        assert AutoModelForCausalLM.from_pretrained(out).dtype == stored
    assert not list(tmp_path.glob(".partial-*"))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "linear, not normalized": ("linear", {"parameters": {"normalize": False}}),
    "slerp": ("slerp", {}),
    "karcher": ("karcher", {}),
    "model_stock": ("model_stock", {}),
    "model_stock by rows": ("model_stock", {"parameters": {"filter_wise": True}}),
    "task_arithmetic": ("task_arithmetic", {"parameters": {"normalize": True, "lambda": 0.7}}),
    "ties": ("ties", {"parameters": {"int8_mask": True}}),
    "ties, rescaled": ("ties", {"parameters": {"normalize": False, "rescale": True}}),
    "breadcrumbs": ("breadcrumbs", {"parameters": {"gamma": 0.1}}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {}),
    "computed in half precision": ("task_arithmetic", {"dtype": "bfloat16", "out_dtype": "float32"}),
    "written in half precision": ("ties", {"out_dtype": "bfloat16"}),
    "slerp in half precision": ("slerp", {"dtype": "float16"}),
    "slices": ("slices", {}),
    **{f"{name}, nothing dropped": (name, {"density": 1.0}) for name in DROPPED},
    **{f"{name}, in law": (name, {"alone": True}) for name in DROPPED},
}


@pytest.mark.slow
@pytest.mark.skipif(MERGEKIT is None, reason="mergekit-yaml is not on PATH, nor named by DRIFTLENS_MERGEKIT")
@pytest.mark.parametrize("case", CASES)
def test_what_mergekit_makes_is_made(
    case: str, folders: Folders, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    method, more = CASES[case]
    made = in_slices(folders, "task_arithmetic") if method == "slices" else recipe(folders, method)
    made = dropped(folders, method) if "alone" in more else made | more
    if made.pop("density", None):
        for model in made["models"]:
            model["parameters"]["density"] = 1.0
    file = written(made, tmp_path)
    assert MERGEKIT is not None
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([MERGEKIT, str(file), str(tmp_path / "theirs"), "--quiet"], check=True, env=alone)
    done = run_cli("merge", file, "--out", tmp_path / "ours")
    assert done.code == 0, done.err
    theirs, ours = open_checkpoint(str(tmp_path / "theirs")), weights(tmp_path / "ours")
    assert set(theirs.headers) == set(ours)
    if "alone" in more:
        is_drawn_by_the_law(method, folders, {key: theirs.read(key) for key in ours})
        return
    is_rounded = "half" in case
    for key, value in ours.items():
        tolerance = {"rtol": 2e-2, "atol": 4e-3} if is_rounded else {"rtol": 1e-4, "atol": 2e-6}
        torch.testing.assert_close(value, theirs.read(key), **tolerance)  # their dtypes too
    base = weights(folders["base"])
    assert any(not torch.equal(base[key].to(value), value) for key, value in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert len({config.get("dtype", config.get("torch_dtype")) for config in configs}) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"merge_method": "passthrough"}, "merge_method is 'passthrough'"),
    "epsilon": ({"merge_method": "della", "parameters": {"epsilon": 0.6}}, "epsilon is 0.6"),
    "models and slices": ({"slices": []}, "slices can't be followed"),
    "no slices": ({"slices": []}, "models is []"),
    "slices that move": ({"slices": [[1, 3]]}, "a slice takes the layers [[1, 3], [1, 3]]"),
    "slices that repeat": ({"slices": [[0, 2], [1, 3]]}, "a slice takes the layers [[1, 3], [1, 3]]"),
    "slices that end early": ({"slices": [[0, 2]]}, "its slices end before or behind layer 3"),
    "slices that go on": ({"slices": [[0, 4]]}, "its slices end before or behind layer 3"),
    "no layers": ({"slices": [None]}, "a slice takes the layers [None, None]"),
    "tokenizer": ({"tokenizer_source": "base"}, "tokenizer_source can't be followed"),
    "parameter": ({"parameters": {"densty": 0.5}}, "no parameter 'densty'"),
    "no base": ({"base_model": None}, "ties needs base_model"),
    "adapter": ({"base_model": "org/model+org/lora"}, "is no path or Hub id"),
    "no models": ({"models": "all"}, "models is 'all'"),
    "weight missing": ({"models": [{"model": "one"}]}, "weight is missing for"),
    "dtype": ({"dtype": "int64"}, "dtype is 'int64'"),
    "out_dtype": ({"out_dtype": "half"}, "out_dtype is 'half'"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_recipe_may_not_ask_is_refused_by_name(
    fault: str, folders: Folders, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    more, message = REFUSED[fault]
    made = recipe(folders, "ties", **more)
    if fault == "weight missing":
        made["models"] = [{"model": folders["one"]}]
    if fault.startswith(("slices", "no slices", "no layers")):
        models = made.pop("models")
        made["slices"] = [
            {"sources": [{**model, "layer_range": span} for model in models]} for span in more["slices"]
        ]
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 2 and message in done.err.replace("\n", " "), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yml"]
