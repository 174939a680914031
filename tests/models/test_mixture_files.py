"""Experts in files, apart or fused: memory's tensors are made of either, and files get back what was theirs."""

from __future__ import annotations

import copy
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from driftlens.checkpoints.alignment import FileLayoutSource, KeyLayout, concat_pattern, expand_concat_pattern
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.config.spec import RunSpec, load_spec
from driftlens.experiment.merging import merge_experts
from driftlens.experiment.study_loading import open_models
from driftlens.models.architecture import build_on_meta
from driftlens.models.architectures.encoders import build_model, key_spellings, saved_key_names
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import IncompatibleModelsError
from tests.quick import few
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import of, saved
from tests.zoo.mixtures import MIXTURES, mixtures
from tests.zoo.tensors import assert_every_tensor, weights_in

EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
CONFIGS = {
    "Mixtral": of("mixtral", num_local_experts=3),
    "Qwen3-MoE": of("qwen3_moe", **EXPERTS),
    "OLMo hybrid": of(
        *("olmo_hybrid", "head_dim"),
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4},
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}


@pytest.fixture(params=[*CONFIGS])
def config(request: pytest.FixtureRequest) -> Any:
    return CONFIGS[request.param]


def layout_of(config: Any) -> tuple[KeyLayout, list[str]]:
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    skeleton = build_on_meta(partial(build_model, kind, config), "it")
    return KeyLayout(key_spellings(saved_key_names(skeleton), skeleton)), [*skeleton.state_dict()]


def write(config: Any, folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """As the library saves it, or as training code does: what memory holds, under a wrapper's prefix."""
    model = perturbed(with_seed(lambda: transformers.AutoModelForCausalLM.from_config(config))(), 0, 0.2)
    model.save_pretrained(folder)
    loaded: dict[str, torch.Tensor] = type(model).from_pretrained(folder).state_dict()
    if layout == "fused":
        state = {f"module.{key}": value for key, value in loaded.items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    elif layout == "core":
        held = load_file(folder / "model.safetensors")
        save_file({key.removeprefix("model."): value for key, value in held.items()}, folder / "model.safetensors")
    return loaded


class Watched:
    """A source that remembers what was read."""

    def __init__(self, source: StateSource) -> None:
        self.name, self.headers, self._source = source.name, source.headers, source
        self.seen: list[str] = []

    def read(self, key: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        self.seen.append(key)
        return self._source.read(key, rows)


@pytest.mark.parametrize("layout", ["apart", "fused", "core"])
def test_files_of_either_layout_give_the_tensors_of_memory_and_get_theirs_back(
    config: Any, layout: str, tmp_path: Path
) -> None:
    loaded = write(config, tmp_path, layout)
    known, keys = layout_of(config)
    stored = load_file(tmp_path / "model.safetensors")
    source = known.regroup(open_checkpoint(tmp_path))
    aligned = known.align(source, keys, None)
    assert [*aligned.headers] == keys and (len(stored) > len(keys)) == (layout != "fused")
    for key, value in loaded.items():
        assert torch.equal(aligned.read(key), value), key
        assert (aligned.headers[key].shape, aligned.headers[key].dtype) == (value.shape, value.dtype)
        if len(value) > 2:
            assert torch.equal(aligned.read(key, (1, 3)), value[1:3]), key
    back = FileLayoutSource(source)
    assert back.headers.keys() == stored.keys()
    for key, value in stored.items():
        assert torch.equal(back.read(key), value) and back.headers[key].shape == value.shape
        assert torch.equal(back.read(key, (1, 2)), value[1:2])


def test_of_one_expert_nothing_else_is_read(tmp_path: Path) -> None:
    loaded = write(CONFIGS["Mixtral"], tmp_path, "apart")
    watched = Watched(open_checkpoint(tmp_path))
    known, keys = layout_of(CONFIGS["Mixtral"])
    aligned = known.align(watched, keys, None)
    key = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(aligned.read(key, (2, 3)), loaded[key][2:3])
    block = "model.layers.1.block_sparse_moe.experts.2"
    assert watched.seen == [f"{block}.w1.weight", f"{block}.w3.weight"]


def spec_of(root: Path, base: str, *experts: str) -> RunSpec:
    described: dict[str, Any] = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(root / base)},
        "base": {"weights": str(root / base)},
        "experts": {name: {"weights": str(root / name)} for name in experts},
        "merge": {"method": "average"},
    }
    return load_spec(described)


def rewrite_fused(folder: Path) -> None:
    """The same weights as memory has them."""
    state = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for file in folder.glob("model*"):
        file.unlink()
    save_file({key: value.clone() for key, value in state.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.shows("reloads", files="hf-decoder")
@pytest.mark.parametrize(
    "family", mixtures("Mixtral", "Qwen3-MoE", some=["LFM2-MoE", "Llama 4", "Granite MoE", "DeepSeek-V3"])
)
def test_a_merge_has_the_layout_of_its_base_whatever_that_of_its_experts(family: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        saved(MIXTURES[family], tmp_path / name, seed)
    for name in ("base", "two"):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-fused")
        rewrite_fused(tmp_path / f"{name}-fused")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "base", max_shard_size="8KB")
    logits = {}
    for base in ("base", "base-fused"):
        spec, out = spec_of(tmp_path, base, "one", "two-fused"), tmp_path / f"of-{base}"
        merge_experts(spec, "task_arithmetic", {"scaling": 0.4}, out, JobContext())
        assert weights_in(out).keys() == weights_in(tmp_path / base).keys()
        for file in (tmp_path / base).glob("*.safetensors"):
            assert load_file(file).keys() == load_file(out / file.name).keys()
        merged, info = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        logits[base] = merged(input_ids=torch.arange(4, 16)[None]).logits
    # The same weights elsewhere in memory: some machines round their products otherwise.
    torch.testing.assert_close(*logits.values())
    experts = [tmp_path / "one", tmp_path / "two"]
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]  # no expert changes one
    assert_every_tensor(tmp_path / "base", experts, tmp_path / "of-base", scaling=0.4, shared=len(buffers))


def test_adapters_on_one_experts_modules_fit_files_that_have_them_apart(tmp_path: Path) -> None:
    """As peft saved them with transformers 4."""
    saved(MIXTURES["Mixtral"], tmp_path / "base", 0)
    (tmp_path / "one").mkdir()
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 16, generator=generator), torch.randn(24, 2, generator=generator)
    path = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w3.lora_"
    weights = {f"{path}A.weight": down, f"{path}B.weight": up}
    save_file(weights, tmp_path / "one" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["w3"]}
    (tmp_path / "one" / "adapter_config.json").write_text(json.dumps(settings))
    models = open_models(spec_of(tmp_path, "base", "one")).sources
    wanted = {key: models["base"].read(key) for key in models["base"].headers}
    wanted["model.layers.1.mlp.experts.gate_up_proj"][2, 24:] += 3.0 * (up @ down)
    for key, value in wanted.items():
        torch.testing.assert_close(models["expert:one"].read(key), value)


def in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss as it is published: experts in blocks of 32 numbers of 4 bits, with a scale each."""
    packed = dict(weights)
    for key in (key for key in weights if key.endswith(("gate_up_proj", "down_proj"))):
        count, width, out = packed.pop(key).shape
        blocks = torch.arange(count * out * width // 2) % 256
        packed[f"{key}_blocks"] = blocks.to(torch.uint8).reshape(count, out, width // 32, 16)
        packed[f"{key}_scales"] = torch.full((count, out, width // 32), 120, dtype=torch.uint8)
    return packed


def in_fp8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As DeepSeek and MiniMax publish theirs, in blocks of 8 x 8 numbers."""
    scaled = dict(weights)
    for key in (key for key, value in weights.items() if "layers" in key and value.dim() == 2):
        if "gate.weight" not in key:
            scaled[f"{key}_scale_inv"] = torch.full([-(-size // 8) for size in scaled[key].shape], 0.5)
            scaled[key] = (scaled[key] * 2).to(torch.float8_e4m3fn)
    return scaled


WIDE = {"hidden_size": 32, "intermediate_size": 32}
QUANTISED: dict[str, Any] = {
    "mxfp4": (
        MIXTURES["gpt-oss"],
        WIDE,
        in_mxfp4,
        {"modules_to_not_convert": ["self_attn", "router", "embed", "head"]},
    ),
    "fp8": (MIXTURES["Mixtral"], {}, in_fp8, {"weight_block_size": [8, 8], "activation_scheme": "dynamic"}),
}


@pytest.mark.parametrize("method", few(QUANTISED, ["fp8"]))
def test_quantised_experts_are_refused_with_a_remedy_that_works(method: str, tmp_path: Path) -> None:
    config, sizes, pack, settings = QUANTISED[method]
    config = copy.deepcopy(config)
    config.update(sizes)
    saved(config, tmp_path / "base", 0)
    saved(config, tmp_path / "one", 1)
    file, stated = tmp_path / "one" / "model.safetensors", tmp_path / "one" / "config.json"
    save_file(pack(load_file(file)), file, {"format": "pt"})
    quantised = {"quantization_config": {"quant_method": method} | settings}
    stated.write_text(json.dumps(json.loads(stated.read_text()) | quantised))
    with pytest.raises(IncompatibleModelsError, match=rf"one holds quantised weights \({method}\)") as refused:
        open_models(spec_of(tmp_path, "base", "one"))
    named = re.search(r"quantization_config=(\w+)\(dequantize=True\)", refused.value.hint)
    assert named is not None
    wide = getattr(transformers, named[1])(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", quantization_config=wide)
    model.save_pretrained(tmp_path / "wide")
    expert = open_models(spec_of(tmp_path, "base", "wide")).sources["expert:wide"]
    assert all(torch.equal(expert.read(key), value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_count_of_experts_that_differs_is_refused_before_anything_is_written(fused: bool, tmp_path: Path) -> None:
    saved(MIXTURES["Mixtral"], tmp_path / "base", 0)
    other = copy.deepcopy(MIXTURES["Mixtral"])
    other.num_local_experts = 3
    saved(other, tmp_path / "one", 1)
    if fused:
        rewrite_fused(tmp_path / "one")
    with pytest.raises(IncompatibleModelsError, match=r"gate.weight' has shape \[3, 16\], expected \[4, 16\]"):
        merge_experts(spec_of(tmp_path, "base", "one"), "average", {}, tmp_path / "out", JobContext())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "joint"),
    [
        (("a.0.w1.b", "a.0.w3.b", "a.1.w1.b", "a.1.w3.b"), "a.*.{w1,w3}.b"),
        (("a.0.b", "a.1.b"), "a.*.b"),
        (("a.x.b", "a.y.b", "a.z.b"), "a.{x,y,z}.b"),
        (("a.0.w1.b", "a.1.w1.b", "a.0.w3.b", "a.1.w3.b"), ""),  # not in the order of memory
        (("a.0.b", "a.2.b"), "a.{0,2}.b"),
        (("a.0.b", "a.1"), ""),
    ],
)
def test_a_joint_name_is_that_of_its_parts_in_their_order(names: tuple[str, ...], joint: str) -> None:
    assert concat_pattern(names) == joint
    if joint:
        assert expand_concat_pattern(joint, 2) == [*names]
