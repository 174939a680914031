"""Causal language models by structure: what can't be split into layers as its library runs it is refused by name."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import driftlens as dl
from driftlens.models.architecture import load_architecture
from driftlens.models.architectures.language import causal_chain
from driftlens.models.tracing import block_runner
from driftlens.models.tracing.block_runner import LAYER_INPUT, set_state_arguments, split_streams
from driftlens.utils.errors import IncompatibleModelsError, NumericsError
from tests.refusing import refusing
from tests.zoo.cases import perturbed
from tests.zoo.decoders import CONFIGS, MORE, TINY, of
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.walking import chain_states, largest_difference, walk, weights

REFUSED = {
    "computed from weights": of(
        *("cpmant", "num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings"),
        **{"dim_head": 4, "dim_ff": 24},
    ),
    "can't be used": of("jetmoe", "head_dim", "intermediate_size", kv_channels=4, num_local_experts=4),
}
BATCH = {
    "input_ids": torch.tensor([[2, 5, 6, 7], [2, 8, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}


@pytest.mark.parametrize("loader", ["hf-decoder", "hf-auto"])
@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_run_as_features_from_block_to_block_is_refused_by_name(
    reason: str, loader: str, tmp_path: Path
) -> None:
    config = REFUSED[reason]
    config.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with refusing(IncompatibleModelsError, match=reason, hint="ive modules", code=4):
        load_architecture(loader, str(tmp_path))


class Normed(transformers.GPT2LMHeadModel):
    """Scores depend on one another, so that few of them can't be had alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
        features = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(features).log_softmax(dim=-1))


class ByPlace(transformers.GPT2LMHeadModel):
    """Scores depend on where a token stands."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
        features = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        scores = self.lm_head(features)
        return transformers.modeling_outputs.CausalLMOutput(logits=scores * scores.shape[1])


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Normed, "not an elementwise function"), (ByPlace, "not an elementwise function")],
)
def test_a_head_that_does_more_than_is_followed_is_refused(kind: Any, told: str) -> None:
    model = kind(CONFIGS["GPT-2"]).eval()
    with refusing(IncompatibleModelsError, kind.__name__, told, hint="ive modules"):
        causal_chain(model, BATCH)


@pytest.mark.parametrize(("name", "slope"), [("GPT-2", 1.0), ("Granite", 0.5), ("Gemma 2", 1.0)])
def test_what_is_done_behind_the_head_stretches_scores_by_so_much(name: str, slope: float) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    _, lm = causal_chain(model, BATCH)
    assert lm.slope == slope and (lm.after_head is None) == (name == "GPT-2")


def test_an_encoder_that_may_answer_is_no_causal_model(tmp_path: Path) -> None:
    """Its tokens read those behind them; and no loader writes a folder with the base's head."""
    config = {"model_type": "bert", "architectures": ["BertLMHeadModel"], "vocab_size": 40, **TINY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for loader in ("hf-decoder", "hf-auto"):
        with refusing(IncompatibleModelsError, "a bert model (BertLMHeadModel)", code=4):
            load_architecture(loader, str(tmp_path))


@pytest.mark.parametrize("name", ["Gemma 3n", "Gemma 4"])
@pytest.mark.parametrize(
    ("changed", "first"),
    [("model.embed_tokens_per_layer.weight", 2), ("model.layers.1.self_attn.k_proj.weight", 3)],
    ids=["embeddings per layer", "keys of an earlier block"],
)
def test_what_waits_beside_features_is_each_models_own(changed: str, first: int, name: str) -> None:
    """A model that differs in this alone drifts from the first block that reads it on, as its library says."""
    config = (CONFIGS | MORE)[name]
    base = perturbed(transformers.AutoModelForCausalLM.from_config(config), 0, 0.2).double().eval()
    other = deepcopy(base)
    other.get_parameter(changed).data *= -1
    chain, _ = causal_chain(base, BATCH)
    states = {model: chain_states(chain, model, BATCH) for model in (base, other)}
    for model, made in states.items():
        assert largest_difference(made, chain.library_states(model, BATCH)) < 1e-12
    assert all(not leaf[1, ..., 3, :].any() for state in states[base] for leaf in state.values())
    equal = [torch.equal(*(states[model][at]["hidden"] for model in states)) for at in range(6)]
    assert equal.index(False) == first - 1


def test_streams_at_padding_have_no_derivative() -> None:
    """Where all are zeros, their norm, by which the head scales them, has an infinite one."""
    model = transformers.AutoModelForCausalLM.from_config((CONFIGS | MORE)["Gemma 3n"]).double().eval()
    chain, _ = causal_chain(model, BATCH)
    states, (_, side) = walk(chain, model, BATCH), chain.start(BATCH)
    state = {name: leaf.requires_grad_() for name, leaf in states[-2].items()}
    left = chain.layers[-1].call(weights(chain, model)[-1], state, side)
    left["hidden"].square().sum().backward()
    gradient = state["hidden"].grad
    assert gradient is not None and gradient.isfinite().all() and not gradient[1, 3].any()


def without_embeddings(state: Any) -> Any:
    """A state in which embeddings per layer are zeros."""
    return {name: 0 * leaf if name.startswith(LAYER_INPUT) else leaf for name, leaf in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (
            "set_state_arguments",
            lambda *call: set_state_arguments(*call[:2], without_embeddings(call[2]), *call[3:]),
        ),
        ("split_streams", lambda hidden, count: split_streams(hidden, count).flip(0)),
    ],
    ids=["embeddings per layer dropped", "streams in another order"],
)
def test_what_gemma_3n_would_lose_is_found(
    part: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a run stops where its features are not those of ordinary forward passes."""
    base = transformers.AutoModelForCausalLM.from_config((CONFIGS | MORE)["Gemma 3n"]).double().eval()
    models = perturbed(base, 1, 0.2), perturbed(base, 2, 0.2)
    analyze = partial(dl.analyze, merged=models[0], experts={"a": models[1]}, data={"a": [BATCH]}, progress="none")
    assert analyze(out=tmp_path / "run").layers()["closure_error"].max() < 1e-9
    monkeypatch.setattr(block_runner, part, fault)
    with pytest.raises(NumericsError, match="forward pass"):
        analyze(out=tmp_path / "planted")
