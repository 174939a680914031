"""Experts that are adapters, run: their features are those of base and adapters as peft runs them, unmerged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from driftlens.config.spec import RunSpec, load_spec
from driftlens.experiment.sanity_checks import check_model_files
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import OpenModels, build_study, open_models
from driftlens.utils.errors import CheckpointError
from tests.refusing import refusing
from tests.zoo.decoders import CONFIGS, saved

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning"),
]
GPT2 = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40, n_positions=32)
LLAMA = CONFIGS["Llama, untied"]
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (LLAMA, {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}),
    "rslora": (
        LLAMA,
        {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]},
    ),
    "patterns": (
        LLAMA,
        {
            **{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]},
            **{"rank_pattern": {"o_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 9}},
        },
    ),
    "modules_to_save": (
        LLAMA,
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["gate_proj", "norm"]},
    ),
    "gemma_tied": (CONFIGS["Gemma 3"], {"r": 2, "lora_alpha": 8, "target_modules": ["k_proj", "down_proj"]}),
    "dora": (LLAMA, {"r": 2, "lora_alpha": 6, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "fan_in_fan_out": (GPT2, {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


def adapted(base: Path, folder: Path, options: dict[str, Any]) -> Any:
    """The base in float32 with random adapters, small beside its numbers' steps; saved by peft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
            elif "modules_to_save" in name:
                parameter.data += 0.01 * torch.randn(parameter.shape)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def with_adapters(config: Any, options: dict[str, Any], folder: Path, stored: torch.dtype = torch.float32) -> Any:
    """See `adapted`; base and adapters lie in a folder."""
    saved(config, folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base").to(stored)
    model.save_pretrained(folder / "base")
    return adapted(folder / "base", folder / "expert", options)


def models_of_adapters(config: Any, folder: Path, expert: str = "") -> tuple[RunSpec, OpenModels]:
    """The opened base and that expert."""
    loader = "hf-auto" if config is GPT2 else "hf-decoder"
    described: dict[str, Any] = {"version": 1, "merge": {"method": "average"}}
    described["architecture"] = {"loader": loader, "source": str(folder / "base")}
    described |= {"base": {"weights": str(folder / "base")}}
    spec = load_spec(described | {"experts": {"a": {"weights": expert or str(folder / "expert")}}})
    return spec, open_models(spec)


def study_of_adapters(config: Any, folder: Path) -> Study:
    """A study of that expert, without samples."""
    return build_study(*models_of_adapters(config, folder), {}, {})


def state_base(folder: Path, base: Path) -> None:
    """Name the base of adapters."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))


def adapter_notices(models: OpenModels) -> list[str]:
    return [finding.text for finding in check_model_files(models) if "adapters" in finding.text]


@pytest.mark.slow
def test_adapters_that_were_trained_on_adapters_are_added_to_their_sum(tmp_path: Path) -> None:
    """Or to a base that contains these, where it is given."""
    options = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
    merged = with_adapters(LLAMA, options, tmp_path).merge_and_unload()
    (tmp_path / "expert").rename(tmp_path / "lower")
    merged.save_pretrained(tmp_path / "merged")
    expected = adapted(tmp_path / "merged", tmp_path / "expert", options).merge_and_unload().state_dict()
    state_base(tmp_path / "expert", tmp_path / "lower")
    places = {"": "are added first", f"{tmp_path}/base+{tmp_path}/expert": "are added first"}
    for place, notice in (places | {f"{tmp_path}/merged+{tmp_path}/expert": "and the base is"}).items():
        _, models = models_of_adapters(LLAMA, tmp_path, place)
        assert [notice in text for text in adapter_notices(models)] == [True]
        for key, header in models.sources["expert:a"].headers.items():
            assert header.dtype == torch.float32
            torch.testing.assert_close(models.sources["expert:a"].read(key), expected[key])
    state_base(tmp_path / "lower", tmp_path / "expert")
    with refusing(CheckpointError, match="name each other as their base", hint="base_model_name_or_path"):
        models_of_adapters(LLAMA, tmp_path)


def test_adapters_on_a_whole_model_bring_no_notice(tmp_path: Path) -> None:
    with_adapters(LLAMA, {"r": 2, "target_modules": ["q_proj"]}, tmp_path)
    assert adapter_notices(models_of_adapters(LLAMA, tmp_path)[1]) == []


TOKENS = torch.randint(4, 40, (2, 7), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("config", "options"), OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.slow
@torch.no_grad()
def test_features_of_an_expert_are_those_that_peft_computes(
    config: Any, options: dict[str, Any], stored: torch.dtype, tmp_path: Path
) -> None:
    oracle = with_adapters(config, options, tmp_path, stored)
    study = study_of_adapters(config, tmp_path)
    expected = oracle.base_model.model(**INPUTS, output_hidden_states=True).hidden_states[-1]
    with oracle.disable_adapter():
        plain = oracle.base_model.model(**INPUTS, output_hidden_states=True).hidden_states[-1]
    states = study.pool.library_states("expert:a", INPUTS)[-1]
    found = states[study.pool.chain.layers[-1].stream]
    assert float((found - expected).norm() / (expected - plain).norm()) < 1e-4
