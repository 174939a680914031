"""mergekit's recipes: numbers by hand, mergekit's own where it is installed, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import StateSource, TensorsSource
from driftlens.jobs.study.recipe import Followed
from driftlens.spec.mergekit import METHODS, recipe_of
from tests.cli.conftest import Cli
from tests.quick import few
from tests.zoo.decoders import CONFIGS, TINY, saved
from tests.zoo.mixtures import MIXTURES

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
    if method in ("nuslerp", "multislerp"):
        own = [{"weight": [0.2, 0.9, 0.4]}, {"weight": 0.7}]
    elif "weight" in METHODS[method].parameters:
        own = [{"weight": [0.2, 0.9, 0.4]}, {"weight": [{"filter": "mlp", "value": [1, 0]}, {"value": 0.7}]}]
    if "density" in METHODS[method].parameters and method != "task_arithmetic":
        own = [each | {"density": density} for each, density in zip(own, (0.6, [0.3, 0.8]), strict=True)]
    models = [
        {"model": folders[name], "parameters": each} for name, each in zip(("one", "two"), own, strict=True)
    ]
    made = {"merge_method": method, "models": models, "base_model": folders["base"], "dtype": "float32"}
    if METHODS[method].base == "ignored":
        del made["base_model"]
    if METHODS[method].models == (2, 2) and method != "nuslerp":
        made |= {"models": models[:1], "base_model": folders["two"]}
    if method == "slerp":
        made["parameters"] = {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3]},
                {"filter": "norm", "value": 0.9},
                {"value": 0.4},
            ]
        }
    return made | more


def written(made: dict[str, Any], folder: Path) -> Path:
    file = folder / "recipe.yml"
    file.write_text(yaml.safe_dump(made))
    return file


def weights(folder: object) -> dict[str, Tensor]:
    return load_file(Path(str(folder)) / "model.safetensors")


def test_lists_go_over_layers_and_filters_over_names(folders: Folders, tmp_path: Path, run_cli: Cli) -> None:
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


def test_nothing_is_read_twice_or_held_for_nothing(folders: Folders) -> None:
    """Of a model's tensors that of one key is there, and of the models but the base one at a time."""
    made, alive, most = recipe_of(recipe(folders, "ties")), Counter[str](), Counter[str]()

    class Counted:
        def __init__(self, name: str) -> None:
            self._source = open_checkpoint(folders[name])
            self.name, self.headers = name, self._source.headers

        def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
            tensor = self._source.read(key, rows).clone()
            alive.update([self.name])
            weakref.finalize(tensor, alive.subtract, [self.name])
            most.update({"experts": max(0, alive["one"] + alive["two"] - most["experts"])})
            most.update({self.name})
            return tensor

    merged = Followed(made, {folders[name]: Counted(name) for name in MODELS}, 3)
    for key in merged.headers:
        merged.read(key)
    assert most == Counter({"experts": 1} | dict.fromkeys(MODELS, len(merged.headers)))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_is_merged_while_another_is_written_is_the_same_and_read_once(
    folders: Folders, is_reversed: bool
) -> None:
    """And begun tensors have together no more bytes than the largest."""
    made, read, most = recipe_of(recipe(folders, "ties", out_dtype="bfloat16")), Counter[str](), list[int]()

    class Noted:
        def __init__(self, name: str) -> None:
            self._source = open_checkpoint(folders[name])
            self.name, self.headers = name, self._source.headers

        def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
            read.update([key] if rows is None else [])
            return self._source.read(key, rows)

    models: dict[str, StateSource] = {folders[name]: Noted(name) for name in MODELS}
    alone = Followed(made, models, 3)
    wanted = {key: alone.read(key) for key in alone.headers}
    largest = max(tensor.nbytes for tensor in wanted.values())

    class Counted(ThreadPoolExecutor):
        def submit(self, call: Any, /, *args: Any, **more: Any) -> Any:
            begun = super().submit(call, *args, **more)
            waiting.append((args[0], begun))
            return begun

    waiting: list[tuple[str, Any]] = []
    with Counted(3) as threads:
        ahead = Followed(made, models, 3, threads=threads)
        read.clear()
        done = set[str]()
        for key in reversed(wanted) if is_reversed else wanted:
            assert torch.equal(ahead.read(key), wanted[key])
            done.add(key)
            most.append(sum(wanted[name].nbytes for name, _ in waiting if name not in done))
    assert set(read.values()) == {len(MODELS)}
    assert vars(ahead.change) == pytest.approx(vars(alone.change))
    assert 0 < max(most) <= largest or is_reversed


def test_no_tokenizer_is_opened_to_merge_weights(
    folders: Folders, tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a tokenizer was opened")

    monkeypatch.setattr("driftlens.models.preprocessing.tokenizer_in", opened)
    done = run_cli("merge", written(recipe(folders, "linear"), tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    for file in Path(folders["base"]).glob("token*.json"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_merging_reads_no_tables() -> None:
    """Half of what a merge imports of its own would be for tables that it hasn't."""
    code = (
        "import sys, driftlens.cli, driftlens.jobs.study.recipe, driftlens.jobs.study.card;"
        "print({'pandas', 'pyarrow', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


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


def test_slices_have_settings_of_their_own(folders: Folders, tmp_path: Path, run_cli: Cli) -> None:
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


@pytest.mark.parametrize("is_flag", [False, True], ids=["recipe", "flag"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_what_the_written_type_loses_of_a_merge_is_told(
    out_dtype: str, folders: Folders, tmp_path: Path, run_cli: Cli, *, is_flag: bool
) -> None:
    models = [{"model": folders[name], "parameters": {"weight": 0.001}} for name in ("one", "two")]
    made = recipe(folders, "task_arithmetic") | {"models": models, "out_dtype": out_dtype}
    flags = ["--out-dtype", out_dtype] if is_flag else []
    made |= {"out_dtype": "float16"} if is_flag else {}
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out", *flags)
    assert {value.dtype for value in weights(tmp_path / "out").values()} == {getattr(torch, out_dtype)}
    is_told = "of the entries that the merge changes equal the base's again in bfloat16" in done.err
    assert done.code == 0 and is_told == (out_dtype == "bfloat16")
    assert ("the merge changes" in (tmp_path / "out" / "README.md").read_text()) == is_told


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


@pytest.mark.slow
@pytest.mark.parametrize("method", DROPPED)
def test_random_masks_follow_the_law(method: str, folders: Folders, tmp_path: Path, run_cli: Cli) -> None:
    file = written(dropped(folders, method), tmp_path)
    for name in ("out", "again"):
        done = run_cli("merge", file, "--out", tmp_path / name)
        assert done.code == 0, done.err
    merged, again = weights(tmp_path / "out"), weights(tmp_path / "again")
    is_drawn_by_the_law(method, folders, merged)
    assert all(torch.equal(merged[key], again[key]) for key in merged)


@pytest.mark.slow
def test_dtypes_say_what_is_computed_in_and_what_is_written(
    folders: Folders, tmp_path: Path, run_cli: Cli
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


FAMILIES = ("Llama, untied", "Mistral", "Qwen3", "Gemma 2", "Phi-3")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "linear, not normalized": ("linear", {"parameters": {"normalize": False}}),
    "slerp": ("slerp", {}),
    "nuslerp": ("nuslerp", {}),
    "nuslerp by rows": ("nuslerp", {"parameters": {"nuslerp_flatten": False, "nuslerp_row_wise": True}}),
    "multislerp": ("multislerp", {}),
    "karcher": ("karcher", {}),
    "model_stock": ("model_stock", {}),
    "model_stock by rows": ("model_stock", {"parameters": {"filter_wise": True}}),
    "nearswap": ("nearswap", {"parameters": {"t": 0.1}}),
    "arcee_fusion": ("arcee_fusion", {}),
    "sce": ("sce", {"parameters": {"select_topk": 0.3}}),
    "ram": ("ram", {}),
    "ramplus_tl": ("ramplus_tl", {}),
    "task_arithmetic": ("task_arithmetic", {"parameters": {"normalize": True, "lambda": 0.7}}),
    "ties": ("ties", {"parameters": {"int8_mask": True}}),
    "ties, rescaled": ("ties", {"parameters": {"normalize": False, "rescale": True}}),
    "breadcrumbs": ("breadcrumbs", {"parameters": {"gamma": 0.1}}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {}),
    "slices": ("slices", {}),
    **{f"{name}, nothing dropped": (name, {"density": 1.0}) for name in DROPPED},
}


def stored(family: str, dtype: str, root: Path) -> Folders:
    """The three models of a family, as this dtype stores them."""
    made = {}
    for seed, name in enumerate(MODELS):
        saved((CONFIGS | MIXTURES)[family], root / name, seed)
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=getattr(torch, dtype))
        model.save_pretrained(root / name)
        made[name] = str(root / name)
    return made


ALL_AT_ONCE = """
import json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for file, out in json.load(sys.stdin):
    made = MergeConfiguration.model_validate(yaml.safe_load(open(file)))
    run_merge(made, out, options=MergeOptions(quiet=True, write_model_card=False))
"""


def mergekit(recipes: Mapping[str, dict[str, Any]], folder: Path) -> dict[str, Path]:
    """What mergekit makes of recipes, with one thread: the order of a sum is part of its rounding."""
    assert MERGEKIT is not None
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    outs, pairs = {}, []
    for number, (case, made) in enumerate(recipes.items()):
        (folder / f"{number}").mkdir(parents=True)
        outs[case] = folder / f"{number}" / "out"
        pairs.append([str(written(made, folder / f"{number}")), str(outs[case])])
    command = [str(Path(MERGEKIT).with_name("python")), "-c", ALL_AT_ONCE]
    subprocess.run(command, check=True, env=alone, capture_output=True, input=json.dumps(pairs).encode())
    return outs


def units_apart(a: Tensor, b: Tensor) -> int:
    """How many representable numbers lie between two tensors of one dtype, at most."""
    if a.dtype == torch.float32:
        return 0 if torch.equal(a, b) else 2
    places = [
        torch.where(at < 0, -(at & 0x7FFF), at)
        for at in (a.view(torch.int16).int(), b.view(torch.int16).int())
    ]
    return int((places[0] - places[1]).abs().max())


def in_memory(folder: Path) -> StateSource:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return TensorsSource(str(folder), model.state_dict())


STORED = [
    *((family, "bfloat16") for family in FAMILIES),
    (FAMILIES[0], "float16"),
    *((family, "float32") for family in (FAMILIES[0], "Mixtral", "Qwen3-MoE")),
]
WHOLLY = {(FAMILIES[0], "bfloat16"), (FAMILIES[0], "float32")}
SOME = {"slerp", "ties", "model_stock by rows", "slices"}
"""Of the others, CI follows these: arithmetic is as for all, what differs are names, ties and shapes."""


def recipes_for(folders: Folders) -> dict[str, dict[str, Any]]:
    """A recipe of every case, and of three pairs of dtypes, for models as they are stored."""
    recipes: dict[str, dict[str, Any]] = {}
    for case, (method, more) in CASES.items():
        made = in_slices(folders, "task_arithmetic") if method == "slices" else recipe(folders, method)
        made = {name: value for name, value in (made | more).items() if name not in ("dtype", "density")}
        for model in made["models"] if "density" in more else ():
            model["parameters"]["density"] = 1.0
        recipes[case] = made
    for dtype, out_dtype in (("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")):
        recipes[f"{dtype} to {out_dtype}"] = recipe(folders, "ties", dtype=dtype, out_dtype=out_dtype)
    return recipes


@pytest.mark.slow
@pytest.mark.skipif(MERGEKIT is None, reason="mergekit-yaml is not on PATH, nor named by DRIFTLENS_MERGEKIT")
@pytest.mark.parametrize("others", few(["some", "all"], (), some=["some"]))
def test_what_mergekit_makes_is_made(others: str, tmp_path: Path, run_cli: Cli) -> None:
    """Bit for bit in float32, to one unit in the last place in half precision."""
    recipes: dict[str, dict[str, Any]] = {}
    for family, dtype in STORED:
        folders = stored(family, dtype, tmp_path / family / dtype)
        recipes |= {
            f"{family} in {dtype}, {case}": made
            for case, made in recipes_for(folders).items()
            if others == "all" or case in SOME or (family, dtype) in WHOLLY
        }
    for case, theirs in mergekit(recipes, tmp_path / "theirs").items():
        (tmp_path / "ours").mkdir()
        done = run_cli("merge", written(recipes[case], tmp_path), "--out", tmp_path / "ours" / "out")
        assert done.code == 0, (case, done.err)
        is_what_mergekit_made(case, recipes[case], tmp_path / "ours" / "out", theirs)
        shutil.rmtree(tmp_path / "ours")


def is_what_mergekit_made(case: str, made: dict[str, Any], out: Path, there: Path) -> None:
    merged = weights(out)
    base = weights(Path(made.get("base_model") or made["models"][0]["model"]).with_name("base"))
    ours, theirs = merged, open_checkpoint(str(there))
    # It writes experts of a mixture as they are in memory.
    if any("experts" in key for key in theirs.headers):
        theirs, after = map(in_memory, (there, out))
        assert ours.keys() == base.keys()
        ours = {key: after.read(key) for key in after.headers}
    assert set(theirs.headers) == set(ours), case
    for key, value in ours.items():
        wanted = theirs.read(key)
        if made["merge_method"] in ("arcee_fusion", "ramplus_tl"):
            wanted = wanted.to(value.dtype)  # it leaves them wider than its own config.json says
        assert value.dtype == wanted.dtype, (case, key)
        assert units_apart(value, wanted) <= (0 if value.dtype == torch.float32 else 1), (case, key)
    assert any(not torch.equal(base[key].to(value), value) for key, value in merged.items()), case


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_added_to_the_model_before_the_plus_and_rounded_as_it_is(
    dtype: torch.dtype, folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    AutoModelForCausalLM.from_pretrained(folders["two"], dtype=dtype).save_pretrained(tmp_path / "two")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    adapted = get_peft_model(start, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    made = recipe(folders, "linear")
    made["models"] = [
        {"model": f"{tmp_path / 'two'}+{tmp_path / 'adapter'}", "parameters": {"weight": 1}},
        {"model": folders["one"], "parameters": {"weight": 1}},
    ]
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    whole = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "two"), tmp_path / "adapter"
    ).merge_and_unload()
    one = weights(folders["one"])
    for key, value in weights(tmp_path / "out").items():
        torch.testing.assert_close(value, (one[key] + whole.state_dict()[key]) / 2)


def with_more_rows(folder: str, rows: int) -> None:
    """A model with room for more tokens than its tokenizer has."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "asked",
    [
        {"tokenizer_source": "union"},
        {"tokenizer": {"source": "base"}},
        {"tokenizer": {"source": "base", "tokens": {"red": {"source": "x"}}}},
    ],
    ids=["union", "base", "tokens that all have"],
)
def test_a_tokenizer_is_followed_where_all_have_one_and_rows_of_no_token_stay(
    asked: dict[str, Any], folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    for name in MODELS:
        shutil.copytree(folders[name], tmp_path / name)
        with_more_rows(str(tmp_path / name), 48)
    made = recipe({name: str(tmp_path / name) for name in MODELS}, "ties") | asked
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    tokens = len(AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab())
    assert tokens < 48
    merged, base = weights(tmp_path / "out"), weights(tmp_path / "base")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(merged[key][tokens:], base[key][tokens:])
        assert not torch.equal(merged[key][:tokens], base[key][:tokens])


def grown(folder: str, place: Path) -> None:
    """A model with a token more than the others."""
    shutil.copytree(folder, place)
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModelForCausalLM.from_pretrained(place)
    tokenizer.add_tokens(["<tool>"])
    with_more_rows(str(place), model.config.vocab_size + 1)
    tokenizer.save_pretrained(place)


def test_rows_of_tokens_that_the_base_lacks_are_left_out_where_its_tokenizer_is_asked_for(
    folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    grown(folders["one"], tmp_path / "one")
    for number, places in enumerate((folders | {"one": str(tmp_path / "one")}, folders)):
        made = recipe(places, "ties", tokenizer_source="base")
        done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / f"{number}")
        assert done.code == 0 and ("1 of its rows are left out" in done.err) == (number == 0), done.err
    merged = weights(tmp_path / "1")
    assert all(torch.equal(value, merged[key]) for key, value in weights(tmp_path / "0").items())
    assert "<tool>" not in AutoTokenizer.from_pretrained(tmp_path / "0").get_vocab()


SPOILED: dict[str, tuple[str, Any]] = {
    "biased": ("model.layers.1.mlp.up_proj.bias", lambda _: torch.zeros(24)),
    "nan": ("lm_head.weight", lambda value: value.clone().index_fill(0, torch.tensor([0]), torch.inf)),
}


def with_swapped_words(folder: Path) -> None:
    stated = json.loads((folder / "tokenizer.json").read_text())
    words = stated["model"]["vocab"]
    stated["model"]["vocab"] = dict(zip(words, [*words.values()][::-1], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(stated))


def test_without_a_tokenizer_rows_are_merged_by_their_numbers_and_what_differs_is_said(
    folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    shutil.copytree(folders["one"], tmp_path / "one")
    with_swapped_words(tmp_path / "one")
    places = folders | {"one": str(tmp_path / "one")}
    for number, made in enumerate((recipe(places, "ties"), recipe(folders, "ties"))):
        done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / f"{number}")
        assert done.code == 0 and ("the expert of one_0" in done.err) == (number == 0), done.err
    merged = weights(tmp_path / "1")
    assert all(torch.equal(value, merged[key]) for key, value in weights(tmp_path / "0").items())
    asked = recipe(places, "ties", tokenizer_source="base")
    done = run_cli("merge", written(asked, tmp_path), "--out", tmp_path / "asked")
    assert done.code and "other ids than the base's" in done.message


@pytest.mark.slow
def test_a_chat_template_is_that_of_most_models_or_the_one_that_is_written(
    folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    for name, template in zip(MODELS, ("{{ 1 }}", "{{ 2 }}", "{{ 2 }}"), strict=True):
        shutil.copytree(folders[name], tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
    places = {name: str(tmp_path / name) for name in MODELS}
    for asked, wanted in (("auto", "{{ 2 }}"), ("{{ 3 }}", "{{ 3 }}"), (None, "{{ 1 }}")):
        made = recipe(places, "ties") | ({"chat_template": asked} if asked else {})
        out = tmp_path / f"out {wanted}"
        done = run_cli("merge", written(made, tmp_path), "--out", out)
        assert done.code == 0, done.err
        assert AutoTokenizer.from_pretrained(out).chat_template == wanted
    made = recipe(places, "ties", chat_template="chatml")
    assert run_cli("merge", written(made, tmp_path), "--out", tmp_path / "chatml").code == 0
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = AutoTokenizer.from_pretrained(tmp_path / "chatml").apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    assert text == "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in talk) + (
        "<|im_start|>assistant\n"
    )


def test_layers_of_different_models_follow_each_other(folders: Folders, tmp_path: Path, run_cli: Cli) -> None:
    spans = (("one", [0, 1]), ("two", [1, 3]))
    slices = [{"sources": [{"model": folders[name], "layer_range": span}]} for name, span in spans]
    made = {
        "merge_method": "passthrough",
        "slices": slices,
        "parameters": {"scale": [{"filter": "o_proj", "value": 0}, {"value": 1}]},
    }
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    one, two = (weights(folders[name]) for name in ("one", "two"))
    for key, value in weights(tmp_path / "out").items():
        source = one if "layers.0" in key or "embed" in key else two
        assert torch.equal(value, source[key] * (0 if "o_proj" in key else 1)), key


def test_what_mergekit_passes_over_is_passed_over_and_said(
    folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    more = {"normalize": False, "tags": ["merge"], "parameters": {"embed_slerp": True, "adaptive": 1}}
    done = run_cli("merge", written(recipe(folders, "linear", **more), tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert all(f"`{name}`" in done.err for name in ("normalize", "tags", "embed_slerp", "adaptive"))
    right = run_cli("merge", written(recipe(folders, "linear"), tmp_path), "--out", tmp_path / "right")
    assert right.code == 0
    merged = weights(tmp_path / "out")
    assert all(torch.equal(value, merged[key]) for key, value in weights(tmp_path / "right").items())


SPELLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a model as a mapping": (
        {"models": [{"model": {"model": {"path": "a"}, "lora": "b"}}, {"model": {"model": "c"}}]},
        {"models": [{"model": "a+b"}, {"model": "c"}]},
    ),
    "a revision": (
        {"models": [{"model": {"model": {"path": "a/b", "revision": "v1"}}}]},
        {"models": [{"model": "a/b@v1"}]},
    ),
    "layers as text": (
        {"slices": [{"sources": [{"model": "a", "layer_range": ["0", 2.0]}], "residual_weight": 1}]},
        {"slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}]}]},
    ),
}


@pytest.mark.parametrize("form", SPELLED)
def test_models_and_layers_are_spelled_as_mergekit_reads_them(form: str) -> None:
    read = [recipe_of({"merge_method": "linear", **made}) for made in SPELLED[form]]
    assert read[0].slices == read[1].slices


def test_slices_have_bases_of_their_own(folders: Folders, tmp_path: Path, run_cli: Cli) -> None:
    slices = [
        {
            "sources": [{"model": folders[name], "layer_range": span} for name in ("one", "two")],
            "base_model": folders[base],
        }
        for base, span in (("one", [0, 1]), ("two", [1, 3]))
    ]
    made = {"merge_method": "slerp", "slices": slices, "parameters": {"t": 0}, "dtype": "float32"}
    done = run_cli("merge", written(made, tmp_path), "--out", tmp_path / "out")
    assert done.code == 0, done.err
    one, two = (weights(folders[name]) for name in ("one", "two"))
    for key, value in weights(tmp_path / "out").items():
        base = one if "layers.0" in key or "embed" in key else two
        torch.testing.assert_close(value, base[key], msg=key)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"merge_method": "tise"}, "merge_method is 'tise'"),
    "weights of 0": (
        {
            "merge_method": "linear",
            "models": [
                {"model": name, "parameters": {"weight": at}} for name, at in (("one", 0.5), ("two", -0.5))
            ],
            "base_model": None,
        },
        "the weights sum to 0",
    ),
    "epsilon": ({"merge_method": "della", "parameters": {"epsilon": 0.6}}, "epsilon 0.6"),
    "no method": ({"merge_method": None}, "merge_method is 'None'"),
    "mixture": ({"gate_mode": "hidden"}, "it makes a mixture of its models"),
    "models and slices": ({"slices": [{}]}, "it has models and slices"),
    "no slices": ({"slices": []}, "it has none of them"),
    "slices that move": ({"slices": [[1, 3]]}, "layer 0 comes next"),
    "slices that repeat": ({"slices": [[0, 2], [1, 3]]}, "layer 2 comes next"),
    "slices that end early": ({"slices": [[0, 2]]}, "its slices end before or behind layer 3"),
    "slices that go on": ({"slices": [[0, 4]]}, "its slices end before or behind layer 3"),
    "no layers": ({"slices": [None]}, "a slice takes the layers [None, None, None]"),
    "forced tokens": (
        {"tokenizer": {"source": "base", "tokens": {"red": {"source": "one", "force": True}}}},
        "changes the vocabulary",
    ),
    "padding": ({"tokenizer": {"source": "base", "pad_to_multiple_of": 8}}, "changes the vocabulary"),
    "tokens": (
        {"tokenizer": {"source": "base", "tokens": {"red": {"source": "one"}, "<new>": {"source": "one"}}}},
        "tokenizer.tokens has a source for '<new>', which base lacks",
    ),
    "tokenizer twice": ({"tokenizer": {"source": "base"}, "tokenizer_source": "base"}, "and tokenizer"),
    "template": ({"chat_template": "llama3"}, "chat_template is 'llama3'"),
    "parameter": ({"parameters": {"densty": 0.5}}, "no parameter 'densty'"),
    "key": ({"modles": []}, "modles can't be followed"),
    "no base": ({"base_model": None}, "ties needs base_model"),
    "adapters": ({"base_model": "model+lora+lora"}, "is no path or Hub id"),
    "no models": ({"models": "all"}, "models is 'all'"),
    "weight missing": ({"models": [{"model": "one"}]}, "weight is missing for"),
    "no tokenizer": ({"base_model": "bare", "tokenizer_source": "union"}, "the tokenizer of bare is asked"),
    "tokenizer gone": ({"tokenizer_source": "gone"}, "the tokenizer of gone is asked for"),
    "model gone": ({"models": ("one", "gone")}, "there is no model gone"),
    "adapter gone": ({"models": ("one", "two+gone")}, "there is no model gone"),
    "no adapter": ({"models": ("one", "two+one")}, "one holds no adapter"),
    "not in the cache": ({"models": ("one", "nobody/nothing")}, "nobody/nothing"),
    "other shapes": ({"models": ("one", "wide")}, "and of base differ in shape: [16, 32] for [16, 24]"),
    "other depth": ({"models": ("one", "deep")}, "deep has 4 layers, and base 3"),
    "other tokens": (
        {"models": ("one", "swapped"), "tokenizer_source": "union"},
        "swapped: its tokenizer gives texts other ids than the base's (model in tokenizer.json, ids 'is' 21 for 4,",
    ),
    "more in layers": (
        {"models": ("one", "biased")},
        "biased has 'model.layers.1.mlp.up_proj.bias', which base",
    ),
    "less in layers": (
        {"models": ("one", "two"), "base_model": "biased"},
        "biased has 'model.layers.1.mlp.up_proj",
    ),
    "not a number": ({"models": ("one", "nan")}, "'lm_head.weight' holds 16 NaN or infinite values of 640"),
    "union": (
        {"models": ("one", "grown"), "tokenizer_source": "union"},
        "grown has '<tool>', which base lacks, and the tokenizer that is asked for (union) would have them",
    ),
    "tokens of another": ({"tokenizer_source": "grown"}, "the tokenizer that is asked for (grown)"),
    "words of another": ({"tokenizer_source": "swapped"}, "swapped: its tokenizer gives texts other ids"),
    "grown": ({"models": ("one", "grown")}, "differ in shape: [41, 16] for [40, 16]"),
    "other family": ({"models": ("one", "mistral")}, "mistral is a mistral model, and base a llama model"),
    "no decoder": ({"models": ("one", "bert")}, "bert is a bert model (BertModel), no causal language model"),
    "no configuration": ({"base_model": "plain"}, "plain has no config.json"),
    "a file": ({"base_model": "base/model.safetensors"}, "base/model.safetensors has no config.json"),
    "no weights": ({"models": ("one", "empty")}, "empty holds no weights"),
    "pointer": ({"models": ("one", "pointer")}, "is a Git LFS pointer"),
    "cut short": ({"models": ("one", "short")}, "is not a complete safetensors file"),
    "shard gone": ({"models": ("one", "shards")}, "is missing, though model.safetensors.index.json lists it"),
    "layer gone": ({"models": ("one", "lacking")}, "lacking lacks 'model.layers.1.mlp.up_proj.weight'"),
    "gguf": ({"models": ("one", "gguf")}, "is a quantised GGUF file"),
    "quantised": ({"models": ("one", "packed")}, "packed holds quantised weights (gptq)"),
    "place taken": ({"models": ("one", "two")}, "exists already"),
    "dtype": ({"dtype": "int64"}, "dtype is 'int64'"),
    "out_dtype": ({"out_dtype": "half"}, "out_dtype is 'half'"),
    "code": ({"base_model": "code"}, "code needs code of its own, which is never run (modeling.Own)"),
}


@pytest.mark.parametrize("form", ["file", "values"])
def test_python_follows_a_recipe_in_the_place_of_a_spec(
    folders: Folders, tmp_path: Path, run_cli: Cli, form: str
) -> None:
    values = recipe(folders, "linear")
    file = written(values, tmp_path)
    made = dl.merge(file if form == "file" else values, out=tmp_path / "made", out_dtype="bfloat16")
    assert run_cli("merge", file, "--out", tmp_path / "cli", "--out-dtype", "bfloat16").code == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (made, tmp_path / "cli"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {value.dtype for value in ours.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "given", [("validate",), ("merge", "--method", "ties", "--out", "x"), ("merge",)], ids=str
)
def test_a_recipe_in_the_place_of_a_spec_is_named_with_the_command_that_follows_it(
    given: tuple[str, ...], folders: Folders, tmp_path: Path, run_cli: Cli
) -> None:
    file = written(recipe(folders, "ties"), tmp_path)
    refused = run_cli(given[0], file, *given[1:])
    assert refused.code == 2 and [*tmp_path.iterdir()] == [file]
    followed = f"`driftlens merge {file} --out FOLDER` follows it"
    assert (followed if len(given) > 1 or given[0] != "merge" else "--out alone makes") in refused.hint


ANSWERS = """
import contextlib, io, json, sys
from driftlens.cli import main
for file, out in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main(["merge", file, "--out", out, "--offline"])
    except SystemExit as leaving:
        print(json.dumps([leaving.code, said.getvalue(), sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def to_refuse(more: dict[str, Any]) -> dict[str, Any]:
    """A recipe of ties with something in it; models may be names, and slices spans of layers."""
    made = recipe({name: name for name in MODELS}, "ties", **more)
    if isinstance(names := more.get("models"), tuple):
        made["models"] = [{"model": name, "parameters": {"weight": 1}} for name in names]
    if "slices" in more and more["slices"] != [{}]:
        models = [*made.pop("models"), {"model": "base"}]
        made["slices"] = [
            {"sources": [{**model, "layer_range": span} for model in models]} for span in more["slices"]
        ]
    return made


def broken(root: Path, whole: str) -> None:
    """Folders that are no model of the family, or no whole one."""
    stated = json.loads((Path(whole) / "config.json").read_text())
    configs: dict[str, dict[str, Any] | None] = {
        "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        "bert": {"model_type": "bert", "architectures": ["BertModel"]},
        "code": {
            "model_type": "own",
            "architectures": ["OwnForCausalLM"],
            "auto_map": {"AutoModel": "modeling.Own"},
        },
        "plain": None,
        **{name: {} for name in ("empty", "pointer", "short", "shards", "lacking", "gguf")},
    }
    for name, config in configs.items():
        shutil.copytree(whole, root / name)
        if config is None:
            (root / name / "config.json").unlink()
        else:
            (root / name / "config.json").write_text(json.dumps(stated | config))
    tensors = load_file(Path(whole) / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, root / "lacking" / "model.safetensors")
    content = (root / "short" / "model.safetensors").read_bytes()
    (root / "short" / "model.safetensors").write_bytes(content[:-100])
    (root / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (root / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("empty", "gguf", "shards"):
        (root / name / "model.safetensors").unlink()
    (root / "gguf" / "model.gguf").write_bytes(b"GGUF")


@pytest.fixture(scope="module")
def refusals(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Code, message and large libraries that were imported, of every faulty recipe in one process."""
    root = tmp_path_factory.mktemp("refused")
    for name, folder in folders.items():
        (root / name).symlink_to(folder)
    for name, config in {"wide": {"intermediate_size": 32}, "deep": {"num_hidden_layers": 4}}.items():
        saved(LlamaConfig(**TINY | config), root / name)
    shutil.copytree(folders["base"], root / "bare", ignore=shutil.ignore_patterns("token*"))
    shutil.copytree(folders["two"], root / "swapped")
    with_swapped_words(root / "swapped")
    shutil.copytree(folders["two"], root / "packed")
    grown(folders["two"], root / "grown")
    for name, (key, value) in SPOILED.items():
        shutil.copytree(folders["two"], root / name)
        tensors = weights(root / name)
        save_file(tensors | {key: value(tensors.get(key))}, root / name / "model.safetensors")
    packed = json.loads((root / "packed" / "config.json").read_text())
    (root / "packed" / "config.json").write_text(
        json.dumps(packed | {"quantization_config": {"quant_method": "gptq"}})
    )
    (root / "taken").mkdir()
    (root / "taken" / "file").touch()
    broken(root, folders["one"])
    pairs = []
    for fault, (more, _) in REFUSED.items():
        (folder := root / "recipes" / fault).mkdir(parents=True)
        pairs.append(
            [str(written(to_refuse(more), folder)), "taken" if "taken" in fault else f"{folder}/out"]
        )
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS], cwd=root, input=json.dumps(pairs), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all([*folder.iterdir()] == [folder / "recipe.yml"] for folder in (root / "recipes").iterdir())
    return dict(zip(REFUSED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_recipe_may_not_ask_is_refused_by_name_before_torch_is_imported(
    fault: str, refusals: dict[str, list[Any]]
) -> None:
    """Importing takes most of the second and a half that a refusal may take."""
    code, said, imported = refusals[fault]
    assert code and REFUSED[fault][1] in said.replace("\n", " "), said
    assert not imported
    assert not re.search(r"architecture\.|loader|`architecture`", said)  # no keys of a recipe
