"""Decoder-only language models from files: features, answers and greedy texts are those of their own library."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import forward
from driftlens.models.architecture import Architecture, architecture_of, load_architecture
from driftlens.models.heads import LmHead
from driftlens.models.language.generation import generate
from driftlens.models.language.texts import Text
from tests.zoo.decoders import CONFIGS, saved

TEXTS = [Text("is it red"), Text("question : is it blue or green ?"), Text("no")]


def opened(folder: pathlib.Path) -> tuple[Architecture, ModelPool]:
    found = load_architecture("hf-decoder", str(folder))
    source = found.align(open_checkpoint(str(folder)))
    pool = ModelPool(
        found.chain,
        found.skeleton,
        {"expert:a": source, "merged": source},
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    return found, pool


@pytest.mark.parametrize("name", CONFIGS)
def test_features_scores_and_answers_are_those_of_the_library(name: str, tmp_path: pathlib.Path) -> None:
    saved(CONFIGS[name], tmp_path)
    # Gemma's norms are computed in float32 whatever the model's dtype, and round by how many rows there are.
    apart = {"rtol": 1e-5, "atol": 1e-5} if "Gemma" in name else {"rtol": 1e-9, "atol": 1e-9}
    found, pool = opened(tmp_path)
    assert all(parameter.is_meta for parameter in found.skeleton.parameters())
    assert found.preprocess is not None and found.preprocess.texts is not None
    inputs = found.preprocess(TEXTS)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    loaded.eval().requires_grad_(False)
    mask = inputs["attention_mask"].bool()
    [(_, final)] = forward(pool, "merged", [Batch(0, 3, inputs)])
    assert not final[~mask].any()
    logits = []
    for row, text in enumerate(TEXTS):
        # Alone, and so without padding: what the model makes of padding reaches no token.
        alone = found.preprocess([text])
        with torch.no_grad():
            wanted = loaded(**alone, output_hidden_states=True)
        logits.append(wanted.logits[0, -1])
        for layer, state in enumerate(pool.library_states("merged", alone)[:-2]):
            torch.testing.assert_close(state["hidden"], wanted.hidden_states[layer], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(final[row][mask[row]], wanted.hidden_states[-1][0], **apart)
    # The head at the last token of each question.
    last = mask.sum(dim=1) - 1
    rows = torch.arange(3)
    assert found.lm is not None
    head = LmHead(tuple(map(str, range(40))), pool.source("merged"), found.lm)
    torch.testing.assert_close(head.scores(final[rows, last]), torch.stack(logits), **apart)
    assert head.gain_bound(final[rows, last], final[rows, last])[0] == pytest.approx(
        float(torch.linalg.matrix_norm(loaded.get_output_embeddings().weight, ord=2)), rel=1e-9
    )
    few = LmHead(("a", "b"), pool.source("merged"), found.lm, tokens=(7, 5))
    same = head.scores(final[rows, last])[:, [7, 5]]
    torch.testing.assert_close(few.scores(final[rows, last]), same, rtol=1e-12, atol=1e-12)
    # One sample alone, and all in another order.
    for order in ([1], [2, 0, 1]):
        batch = Batch(0, len(order), found.preprocess([TEXTS[at] for at in order]))
        [(_, others)] = forward(pool, "merged", [batch], pooling="last")
        torch.testing.assert_close(others, final[rows, last][order], **apart)
    # Generating wants the whole model, which is gone again afterwards.
    with pool.loaded("merged") as whole:
        answers = generate(whole, found.preprocess.texts, [text.input for text in TEXTS], 5)
    assert answers == generate(loaded, found.preprocess.texts, [text.input for text in TEXTS], 5)
    assert all(parameter.is_meta for parameter in found.skeleton.parameters())


def test_all_linear_modules_of_a_block_are_sites_that_share_inputs(tmp_path: pathlib.Path) -> None:
    saved(CONFIGS["Qwen3"], tmp_path)
    found, _ = opened(tmp_path)
    stem, block, *_ = found.chain.layers
    assert (stem.path, found.chain.layers[-1].path) == ("model.embed_tokens", "model.norm")
    assert list(stem.parameters) == ["model.embed_tokens.weight"]
    inputs = {site.name: site.input for site in block.sites if site.kind == "linear"}
    assert inputs == {
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.q_proj",
        "self_attn.v_proj": "self_attn.q_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.gate_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
    norms = {site.name: site.kind for site in block.sites if site.kind != "linear"}
    assert set(norms.values()) == {"rms_norm"} and "input_layernorm" in norms
    assert block.is_residual


@pytest.mark.parametrize(("kind", "pool"), [("llama", "last"), ("bert", "mean")])
def test_live_models_of_texts_pool_as_their_families_do(kind: str, pool: str) -> None:
    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    module = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    modality = architecture_of(module).chain.modality
    assert (modality.name, modality.pool) == ("text", pool)
