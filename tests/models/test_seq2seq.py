"""Encoder-decoders: features, scores and answers are their library's, whatever the padding; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import iter_final_features
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.heads import LmHead
from driftlens.models.texts import generate, log_likelihoods
from driftlens.utils.errors import IncompatibleModelsError
from tests.zoo.cases import perturbed
from tests.zoo.seq2seq import families, model, save, small_config
from tests.zoo.walking import chain_states, largest_difference

ASKED = [("is it red ?", "yes"), ("green", ""), ("is it blue or is it green ?", "no it is blue")]


def with_pool(name: str, folder: Path) -> tuple[Architecture, ModelPool]:
    """What the files of one model describe, and a pool of it."""
    known = load_architecture("hf-seq2seq", str(save(model(name), folder)), untied=name == "mT5")
    source = known.align(open_checkpoint(folder))
    models = {"expert:a": source, "merged": source}
    return known, ModelPool(known.chain, known.skeleton, models, device=torch.device("cpu"), dtype=torch.float64)


@pytest.mark.shows("drift", files="hf-seq2seq", heads="each model's own")
@pytest.mark.parametrize("name", families("BART"))
def test_features_scores_and_answers_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    known, pool = with_pool(name, tmp_path)
    assert all(parameter.is_meta for parameter in known.skeleton.parameters())
    assert known.preprocess is not None and known.preprocess.texts is not None and known.lm is not None
    # Its norms, softmax and rotary tables are float32 whatever the dtype, and round by how many rows there are.
    apart = 1e-5 if name == "T5Gemma" else 1e-9
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)
    loaded.eval().requires_grad_(False)
    inputs, reader = known.preprocess(ASKED), known.preprocess.texts
    [(_, final)] = iter_final_features(pool, "merged", [Batch(0, 3, inputs)])
    mask = inputs["decoder_attention_mask"].bool()
    assert not final[~mask].any()
    head = LmHead(tuple(map(str, range(40))), pool.source("merged"), known.lm)
    for row, text in enumerate(ASKED):  # alone, and so without padding
        alone = known.preprocess([text])
        with torch.no_grad():
            wanted = loaded(**alone, output_hidden_states=True)
        states = pool.library_states("merged", alone)
        own = [state["hidden"] for state in states if "encoder" not in state]
        assert own and torch.equal(own[-1], wanted.decoder_hidden_states[-1])
        for features, library in (
            (final[row][mask[row]], wanted.decoder_hidden_states[-1][0]),
            (head.scores(final[row][mask[row]]), wanted.logits[0]),
        ):
            assert (features - library).norm() <= apart * library.norm()
        assert largest_difference(chain_states(known.chain, loaded, alone), states) <= 1e-9
    few = LmHead(("a", "b"), pool.source("merged"), known.lm, tokens=(7, 5))
    torch.testing.assert_close(few.scores(final[:, 0]), head.scores(final[:, 0])[:, [7, 5]])
    questions = [text for text, _ in ASKED]
    with pool.load_module("merged") as whole:
        answers = generate(whole, reader, questions, 5)
        likely, _ = log_likelihoods(whole, reader, questions, [["yes", "no it is blue"]] * 3)
    assert answers == generate(loaded, reader, questions, 5)
    assert bool(reader.opening) == (name == "BART")
    tokens = [*reader.answer_tokens("no it is blue"), reader.end_token]
    with torch.no_grad():
        scores = loaded(**reader([(questions[0], "no it is blue")])).logits[0, -len(tokens) :]
    wanted = scores.log_softmax(dim=-1)[range(len(tokens)), tokens].sum()
    assert likely[0, 1] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.shows("live", "attribution")
@pytest.mark.parametrize("name", families("BART", "mT5"))
def test_padding_batches_and_order_change_no_feature(name: str) -> None:
    module = model(name).double()
    chain = chain_of_module(module)
    numbers = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    for before in ("", "decoder_"):
        inputs[f"{before}input_ids"] = torch.randint(4, 40, (3, 5), generator=numbers)
        inputs[f"{before}attention_mask"] = (torch.arange(5) < torch.tensor([[3], [5], [4]])).long()
    wide = {name: torch.nn.functional.pad(value, (0, 4), value=0) for name, value in inputs.items()}
    wide["input_ids"][:, 5:] = 7  # whatever stands under a mask
    states, padded = chain_states(chain, module, inputs), chain_states(chain, module, wide)
    cut = [{name: leaf[:, :5] for name, leaf in state.items()} for state in padded]
    assert largest_difference(cut, states) < 1e-6
    assert all(float(leaf[:, 5:].abs().max()) == 0 for state in padded for leaf in state.values())
    turned = chain_states(chain, module, {name: value[[2, 0, 1]] for name, value in inputs.items()})
    back = [{name: leaf[[1, 2, 0]] for name, leaf in state.items()} for state in turned]
    assert largest_difference(back, states) < 1e-6
    alone = chain_states(chain, module, {name: value[1:2] for name, value in inputs.items()})
    assert largest_difference(alone, [{k: leaf[1:2] for k, leaf in state.items()} for state in states]) < 1e-6
    # Keys and values of cross-attention read the encoder's tokens, and it is their own model's encoder that they read.
    sites = [site for layer in chain.blocks for site in layer.sites if site.stream == "encoder"]
    assert len(sites) == 4 and all(site.kind == "linear" for site in sites)
    other = perturbed(module, 1)
    assert largest_difference(chain_states(chain, other, inputs), chain.library_states(other, inputs)) < 1e-9


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("longt5", "compute_bias"),
        ("switch_transformers", "mixture"),
    ],
)
def test_what_cant_be_followed_is_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    save(transformers.AutoModelForSeq2SeqLM.from_config(small_config(kind)), tmp_path)
    with pytest.raises(IncompatibleModelsError) as refusal:
        load_architecture("hf-seq2seq", str(tmp_path))
    assert words in refusal.value.message and refusal.value.hint
