"""Causal language models by structure: what can't be taken apart as its library runs it is refused by name."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from driftlens.base.errors import IncompatibleModelsError
from driftlens.models.architecture import load_architecture
from driftlens.models.families.causal import causal_chain
from tests.refusing import refusing
from tests.zoo.cases import perturbed
from tests.zoo.decoders import CONFIGS, MORE, TINY, of
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.walking import chain_states, largest_difference

GEMMA_3N = {
    **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 0},
    **{"laurel_rank": 4, "activation_sparsity_pattern": None, "num_hidden_layers": 4},
}
REFUSED = {
    "computed from weights": of(
        *("cpmant", "num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings"),
        **{"dim_head": 4, "dim_ff": 24},
    ),
    "not what one module makes": of(
        "gemma3n_text", **GEMMA_3N, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "runs one block after the other|not what one module makes": of("nanochat", "head_dim"),
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
    with refusing(IncompatibleModelsError, config.model_type, match=reason, hint="ive modules", code=4):
        load_architecture(loader, str(tmp_path))


class Scaled(transformers.GPT2LMHeadModel):
    """What the head reads is no module's output."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
        features = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(2 * features))


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
    [(Scaled, "what its head reads"), (Normed, "one by one"), (ByPlace, "one by one")],
)
def test_a_head_that_does_more_than_is_followed_is_refused(kind: Any, told: str) -> None:
    model = kind(CONFIGS["GPT-2"]).eval()
    with refusing(IncompatibleModelsError, kind.__name__, told, hint="ive modules"):
        causal_chain(model, BATCH)


@pytest.mark.parametrize(("name", "slope"), [("GPT-2", 1.0), ("Granite", 0.5), ("Gemma 2", 1.0)])
def test_what_is_done_behind_the_head_stretches_scores_by_so_much(name: str, slope: float) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    _, lm = causal_chain(model, BATCH)
    assert lm.slope == slope and (lm.behind is None) == (name == "GPT-2")


def test_an_encoder_that_may_answer_is_no_causal_model(tmp_path: Path) -> None:
    """Its tokens read those behind them; and no loader writes a folder with the base's head."""
    config = {"model_type": "bert", "architectures": ["BertLMHeadModel"], "vocab_size": 40, **TINY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for loader in ("hf-decoder", "hf-auto"):
        with refusing(IncompatibleModelsError, "a bert model (BertLMHeadModel)", code=4):
            load_architecture(loader, str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "first"),
    [("model.embed_tokens_per_layer.weight", 2), ("model.layers.1.self_attn.k_proj.weight", 3)],
    ids=["embeddings per layer", "keys of an earlier block"],
)
def test_what_waits_beside_features_is_each_models_own(changed: str, first: int) -> None:
    """A model that differs in this alone drifts from the first block that reads it on, as its library says."""
    config = (CONFIGS | MORE)["Gemma 4"]
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
