"""Experts in files, apart or fused: memory's tensors are made of either, and files get back what was theirs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.alignment import Spellings, Stored, joint_name, names_of
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import StateSource
from driftlens.models.architecture import weightless
from driftlens.models.families.hf_auto import built, file_names, spellings
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import of

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


def layout_of(config: Any) -> tuple[Spellings, list[str]]:
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    skeleton = weightless(partial(built, kind, config), "it")
    return Spellings(spellings(file_names(skeleton), skeleton)), [*skeleton.state_dict()]


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
        save_file(
            {key.removeprefix("model."): value for key, value in held.items()}, folder / "model.safetensors"
        )
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
    source = known.refitted(open_checkpoint(tmp_path))
    aligned = known.align(source, keys, None)
    assert [*aligned.headers] == keys and (len(stored) > len(keys)) == (layout != "fused")
    for key, value in loaded.items():
        assert torch.equal(aligned.read(key), value), key
        assert (aligned.headers[key].shape, aligned.headers[key].dtype) == (value.shape, value.dtype)
        if len(value) > 2:
            assert torch.equal(aligned.read(key, (1, 3)), value[1:3]), key
    back = Stored(source)
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


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("experts.1.w3.", "lacks 'model.layers.0.block_sparse_moe.experts.1.w3.weight', though it holds 5"),
        ("experts.0.", "lacks 'model.layers.0.block_sparse_moe.experts."),
    ],
)
def test_an_expert_that_is_missing_is_named(lost: str, said: str, tmp_path: Path) -> None:
    write(CONFIGS["Mixtral"], tmp_path, "apart")
    stored = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in stored.items() if f"layers.0.block_sparse_moe.{lost}" not in key}
    save_file(left, tmp_path / "model.safetensors")
    known, keys = layout_of(CONFIGS["Mixtral"])
    with pytest.raises(IncompatibleModelsError, match=said):
        known.align(open_checkpoint(tmp_path), keys, None)


def test_an_expert_of_another_size_is_named(tmp_path: Path) -> None:
    write(CONFIGS["Mixtral"], tmp_path, "apart")
    stored = load_file(tmp_path / "model.safetensors")
    key = "model.layers.2.block_sparse_moe.experts.1.w1.weight"
    save_file({**stored, key: torch.zeros(5, 16)}, tmp_path / "model.safetensors")
    known, keys = layout_of(CONFIGS["Mixtral"])
    with pytest.raises(IncompatibleModelsError, match=f"'{key}' has shape \\[5, 16\\]"):
        known.align(open_checkpoint(tmp_path), keys, None)


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
    assert joint_name(names) == joint
    if joint:
        assert names_of(joint, 2) == [*names]
