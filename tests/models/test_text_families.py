"""Decoders, encoders and T5 from files: features, heads and answers are their library's, whatever the padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource
from driftlens.data.samples import Batch
from driftlens.diagnostics.drift_columns import score_gains
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import iter_final_features
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.architectures.module_list import chain_of_module
from driftlens.models.chain import State, pool_features
from driftlens.models.heads import LmHead
from driftlens.models.readouts import ExpertHead, split_head
from driftlens.models.saving import save_model
from driftlens.models.texts import TextSample, generate
from driftlens.utils.errors import DataError, NumericsError
from tests.zoo.cases import perturbed, samples
from tests.zoo.decoders import CONFIGS, FLOAT32, families, in_float64, saved
from tests.zoo.encoders import PARAMS, TEXTS, encoder, logits, save
from tests.zoo.hand_made import two_texts
from tests.zoo.small import flan_t5
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.walking import chain_states, largest_difference

ASKED = [TextSample("is it red"), TextSample("question : is it blue or green ?"), TextSample("no")]


def with_pool(folder: Path) -> tuple[Architecture, ModelPool]:
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


@pytest.mark.shows("drift", files="hf-decoder", heads="each model's own")
@pytest.mark.parametrize("config", families("Llama", "Qwen3", "Gemma 2", "Gemma 3", "OLMo 2", "GPT-2"))
def test_features_scores_and_answers_are_those_of_the_library(config: Any, tmp_path: Path) -> None:
    saved(config, tmp_path)
    apart = {"rtol": 1e-5, "atol": 1e-5} if config.model_type in FLOAT32 else {"rtol": 1e-9, "atol": 1e-9}
    found, pool = with_pool(tmp_path)
    assert all(parameter.is_meta for parameter in found.skeleton.parameters())
    assert found.preprocess is not None and found.preprocess.texts is not None
    inputs = found.preprocess(ASKED)
    loaded = in_float64(tmp_path)
    mask = inputs["attention_mask"].bool()
    [(_, final)] = iter_final_features(pool, "merged", [Batch(0, 3, inputs)])
    assert not final[~mask].any()
    logits, read = [], list[Tensor]()
    loaded.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0]))
    for row, text in enumerate(ASKED):
        # Alone, and so without padding: what the model makes of padding reaches no token.
        alone = found.preprocess([text])
        with torch.no_grad():
            wanted = loaded(**alone, output_hidden_states=True)
        logits.append(wanted.logits[0, -1])
        # Mamba's list of hidden states has no features before the first block.
        states = [] if "mamba" in config.model_type else pool.library_states("merged", alone)[:-2]
        for layer, state in enumerate(states):
            hidden = wanted.hidden_states[layer]
            if hidden.dim() > 3:  # AltUp's streams
                hidden = torch.cat(list(hidden), dim=-1)
            torch.testing.assert_close(state["hidden"], hidden, **apart)
        torch.testing.assert_close(final[row][mask[row]], read[-1][0], **apart)
    # The head at the last token of each question, in a batch with padding that no window is short of.
    whole = found.preprocess([TextSample("is it red"), TextSample("is it blue red"), TextSample("is it")])
    [(_, features)] = iter_final_features(pool, "merged", [Batch(0, 3, whole)], pooling="last")
    with torch.no_grad():
        scores = loaded(**whole).logits[range(3), whole["attention_mask"].sum(dim=1) - 1].double()
    assert found.lm is not None
    made = LmHead(tuple(map(str, range(40))), pool.source("merged"), found.lm).scores(features)
    # Routers of Hunyuan and of AltUp compute in float32, whose last bits are those of a batch.
    rounds = config.model_type in ("gemma3n_text", "hunyuan_v1_moe")
    assert (made - scores).norm() <= (1e-6 if rounds else 1e-9) * scores.norm()
    last = mask.sum(dim=1) - 1
    rows = torch.arange(3)
    assert found.lm is not None
    head = LmHead(tuple(map(str, range(40))), pool.source("merged"), found.lm)
    torch.testing.assert_close(head.scores(final[rows, last]), torch.stack(logits), **apart)
    assert head.gain_bound(final[rows, last], final[rows, last])[0] == pytest.approx(
        float(torch.linalg.matrix_norm(loaded.get_output_embeddings().weight, ord=2)) * found.lm.slope,
        rel=1e-9,
    )
    few = LmHead(("a", "b"), pool.source("merged"), found.lm, tokens=(7, 5))
    same = head.scores(final[rows, last])[:, [7, 5]]
    torch.testing.assert_close(few.scores(final[rows, last]), same, rtol=1e-12, atol=1e-12)
    # One sample alone, and all in another order.
    for order in ([1], [2, 0, 1]):
        batch = Batch(0, len(order), found.preprocess([ASKED[at] for at in order]))
        [(_, others)] = iter_final_features(pool, "merged", [batch], pooling="last")
        torch.testing.assert_close(others, final[rows, last][order], **apart)
    # Generating wants the whole model, which is gone again afterwards.
    with pool.load_module("merged") as whole:
        answers = generate(whole, found.preprocess.texts, [text.input for text in ASKED], 5)
    assert answers == generate(loaded, found.preprocess.texts, [text.input for text in ASKED], 5)
    assert all(parameter.is_meta for parameter in found.skeleton.parameters())


def test_all_linear_modules_of_a_block_are_sites_that_share_inputs(tmp_path: Path) -> None:
    saved(CONFIGS["Qwen3"], tmp_path)
    found, _ = with_pool(tmp_path)
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
    modality = chain_of_module(module, {"input_ids": torch.ones(2, 3, dtype=torch.long)}).modality
    assert (modality.name, modality.pool) == ("text", pool)


NAMES = ("x", "y", "z")


def opened(name: str, folder: Path) -> tuple[Architecture, Any]:
    """The architecture that one model's files describe, and another model, in float64, whose files lie beside them."""
    save(encoder(name, seed=1), folder / "base")
    save(encoder(name, seed=2), folder / "expert")
    loader = "hf-auto" if name == "ModernBERT" else "hf-encoder"
    return load_architecture(loader, str(folder / "base")), encoder(name, seed=2).double()


def states(architecture: Architecture, folder: Path, texts: tuple[str, ...]) -> list[State]:
    """What the expert's weights make of texts, layer by layer, in float64."""
    assert architecture.preprocess is not None
    source = architecture.align(open_checkpoint(folder / "expert"))
    weights = {key: source.read(key).double() for key in source.headers}
    return chain_states(architecture.chain, weights, architecture.preprocess([(text, "") for text in texts]))


def own_head(architecture: Architecture, folder: Path) -> ExpertHead:
    stored = open_checkpoint(folder / "expert")
    keys = architecture.classifier_keys(stored)
    assert set(architecture.align(stored).headers) == set(architecture.keys)
    assert architecture.own_head is not None and keys is not None
    return architecture.own_head.load_head(stored, keys, NAMES)


@pytest.mark.shows("drift", files="hf-encoder")
@pytest.mark.parametrize("name", PARAMS)
def test_features_are_those_of_the_library_at_every_boundary(name: str, tmp_path: Path) -> None:
    """Of a model the architecture was not read from, no weight of which it has seen."""
    architecture, model = opened(name, tmp_path)
    assert architecture.preprocess is not None and all(value.is_meta for value in architecture.skeleton.parameters())
    inputs = architecture.preprocess([(text, "") for text in TEXTS])
    mask = inputs["attention_mask"].bool()
    assert not mask.all()
    with torch.no_grad():
        known = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        wanted = model(**known, output_hidden_states=True).hidden_states
    found = states(architecture, tmp_path, TEXTS)
    assert len(found) == len(wanted) + 1  # what leaves the last block is the final feature, too
    for state, hidden in zip(found, [*wanted, wanted[-1]], strict=True):
        assert (state["hidden"] - hidden)[mask].norm() <= 1e-9 * hidden[mask].norm()
        assert state["hidden"][~mask].abs().max() == 0
    # Alone, and in another order, a text gives what it gives among longer ones.
    for at, text in enumerate(TEXTS):
        alone = states(architecture, tmp_path, (text,))[-1]["hidden"][0]
        assert (found[-1]["hidden"][at, : len(alone)] - alone).abs().max() <= 1e-9
    turned = states(architecture, tmp_path, TEXTS[::-1])[-1]["hidden"].flip(0)
    assert (turned - found[-1]["hidden"]).abs().max() <= 1e-9


@pytest.mark.shows(heads="each expert's own, of several layers")
@pytest.mark.parametrize("name", [*PARAMS, "ModernBERT"])
def test_the_head_of_an_expert_is_all_that_its_library_runs_behind_the_tokens(name: str, tmp_path: Path) -> None:
    architecture, model = opened(name, tmp_path)
    assert architecture.preprocess is not None and architecture.own_head is not None
    head, pool = own_head(architecture, tmp_path), architecture.own_head.pool
    assert pool == ("mean" if name == "ModernBERT" else "cls")
    inputs = architecture.preprocess([(text, "") for text in TEXTS])
    tokens = states(architecture, tmp_path, TEXTS)[-1]["hidden"]
    features = pool_features(tokens, pool, inputs["attention_mask"])
    torch.testing.assert_close(head.scores(features), logits(model, inputs), rtol=1e-9, atol=1e-9)
    held = {key.removeprefix("bert.") for key in architecture.own_head.names}
    assert held and held.isdisjoint(key.removeprefix("bert.") for key in architecture.keys)
    gains = score_gains(head, features, features.flip(0))
    if name == "ModernBERT":  # a norm stretches without bound
        assert head.gain_bound(features, features) is None and bool(gains.certified.isnan().all())
    else:
        assert bool((gains.spectral <= gains.certified).all())
        weights = [value.double() for value in head.weights.values() if value.dim() == 2]
        product = torch.stack([torch.linalg.matrix_norm(weight, ord=2) for weight in weights]).prod()
        assert float(gains.certified[0] / product) == pytest.approx(1.13 if name == "DeBERTa-v3" else 1.0)


def test_positions_that_every_block_of_deberta_reads_belong_to_the_first(tmp_path: Path) -> None:
    architecture, _ = opened("DeBERTa-v3", tmp_path)
    chain, key = architecture.chain, "deberta.encoder.rel_embeddings.weight"
    assert all(key in layer.parameters for layer in chain.blocks)
    assert [layer.index for layer in chain.layers if key in chain.own_parameters(layer)] == [2]
    sites = {site.name: site for site in chain.blocks[0].sites}
    assert not any("query_proj" in name or "key_proj" in name for name in sites)
    assert sites["attention.self.value_proj"].input == "attention.self.value_proj"
    assert "exactly all tokens" in chain.blocks[0].no_sites["attention.self.query_proj.weight"][1]


def test_heads_that_don_t_fit_are_refused(tmp_path: Path) -> None:
    architecture, _ = opened("RoBERTa", tmp_path)
    stored = open_checkpoint(tmp_path / "expert")
    keys = architecture.classifier_keys(stored)
    assert architecture.own_head is not None and keys is not None
    with pytest.raises(DataError, match="has 3 scores, but 2"):
        architecture.own_head.load_head(stored, keys, NAMES[:2])
    model = encoder("RoBERTa", seed=2)
    model.classifier.dense.bias.data[3] = torch.nan
    with pytest.raises(NumericsError, match=r"'classifier.dense.bias' holds 1 NaN"):
        architecture.own_head.load_head(open_checkpoint(save(model, tmp_path / "nan")), keys, NAMES)
    model = encoder("RoBERTa").roberta  # a core alone holds no classifier
    assert architecture.classifier_keys(open_checkpoint(save(model, tmp_path / "core"))) is None


def test_a_classifier_trained_on_a_core_alone_finds_its_pooler_there(tmp_path: Path) -> None:
    """As adapters of a classifier leave it: the base's weights under the base's names, the classifier under its own."""
    architecture, _ = opened("BERT", tmp_path)
    whole = encoder("BERT", seed=2)
    state = whole.bert.state_dict() | {f"classifier.{key}": x for key, x in whole.classifier.state_dict().items()}
    save_file(state, tmp_path / "expert.safetensors")
    keys = architecture.classifier_keys(open_checkpoint(tmp_path / "expert.safetensors"))
    assert keys == ("pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias")


class _Both(nn.Module):
    """A classifier that reads two tokens."""

    base_model_prefix, main_input_name, config = "core", "input_ids", SimpleNamespace(hidden_size=4)

    def __init__(self) -> None:
        super().__init__()
        self.core, self.classifier = nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.core(input_ids)[0]
        read: Tensor = self.classifier(torch.cat([tokens[:, 0], tokens[:, -1]], dim=1))
        return read


def test_a_head_that_reads_more_than_one_vector_is_left_where_it_is() -> None:
    whole = _Both()
    core = whole.core
    assert split_head(whole, {key: key for key in whole.state_dict()}) is None
    assert whole.core is core


T5 = pytest.mark.family("T5 (transformers)")
QUESTIONS = [("is it red ?", "yes"), ("green", ""), ("is it blue or is it green ?", "no it is blue")]


def flan() -> nn.Module:
    return flan_t5()


def version_1() -> nn.Module:
    """Of one embedding for everything, ReLU instead of gates."""
    config = flan_t5().config.to_dict() | {
        "feed_forward_proj": "relu",
        "scale_decoder_outputs": True,
    }
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config.from_dict(config)).eval()
    assert model.lm_head.weight is model.shared.weight
    return model


def folder(module: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    module.to(dtype).save_pretrained(path)
    word_tokenizer("encoder-decoder").save_pretrained(path)
    return path


def with_copies(path: Path) -> Path:
    """The embeddings under all their names, as older versions wrote them."""
    file = path / "model.safetensors"
    weights = load_file(file)
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    weights |= {name: weights["shared.weight"].clone() for name in names if name not in weights}
    save_file(weights, file, {"format": "pt"})
    return path


def pool_of(architecture: Architecture, dtype: torch.dtype, **models: StateSource) -> ModelPool:
    return ModelPool(architecture.chain, architecture.skeleton, models, device=torch.device("cpu"), dtype=dtype)


def walked(pool: ModelPool, model: str, inputs: Any) -> list[dict[str, Tensor]]:
    source = pool.source(model)
    return chain_states(pool.chain, {key: source.read(key).to(pool.dtype) for key in source.headers}, inputs)


@T5
@pytest.mark.shows("drift", files="hf-t5")
@pytest.mark.parametrize(
    ("build", "change", "dtype"),
    [
        pytest.param(flan, None, torch.float16, id="flan in float16"),
        pytest.param(version_1, None, torch.float32, id="v1.0", marks=pytest.mark.slow),
        pytest.param(version_1, with_copies, torch.float32, id="v1.0 with copies", marks=pytest.mark.slow),
    ],
)
def test_files_of_every_form_give_the_librarys_features(
    build: Callable[[], nn.Module],
    change: Callable[[Path], object] | None,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    place = folder(build(), tmp_path / "t5", dtype)
    if change is not None:
        change(place)
    architecture = load_architecture("hf-t5", str(place))
    assert all(parameter.is_meta for parameter in architecture.skeleton.parameters())
    assert architecture.preprocess is not None
    inputs = architecture.preprocess(QUESTIONS)
    pool = pool_of(architecture, torch.float64, base=architecture.align(open_checkpoint(place)))
    mine, theirs = walked(pool, "base", inputs), pool.library_states("base", inputs)
    scale = max(float(leaf.abs().max()) for state in theirs for leaf in state.values())
    assert largest_difference(mine, theirs) <= 1e-9 * scale
    whole = transformers.T5ForConditionalGeneration.from_pretrained(place, dtype=torch.float64)
    with torch.no_grad():
        found = whole(**inputs, output_hidden_states=True)
    seen = inputs["decoder_attention_mask"][..., None]
    torch.testing.assert_close(mine[-1]["hidden"], found.decoder_hidden_states[-1] * seen)
    encoded = found.encoder_last_hidden_state * inputs["attention_mask"][..., None]
    torch.testing.assert_close(mine[-2]["encoder"], encoded)


@T5
@pytest.mark.shows("live", "attribution")
def test_padding_batches_and_order_change_no_feature() -> None:
    module = flan_t5().double()
    chain = chain_of_module(module)
    inputs = two_texts(torch.Generator().manual_seed(0), 3)
    wide = {name: torch.nn.functional.pad(value, (0, 4), value=0) for name, value in inputs.items()}
    wide["input_ids"][:, 5:] = 7  # whatever stands under a mask
    states, padded = chain_states(chain, module, inputs), chain_states(chain, module, wide)
    cut = [{name: leaf[:, :5] for name, leaf in state.items()} for state in padded]
    assert largest_difference(cut, states) < 1e-6
    assert all(float(leaf[:, 5:].abs().max()) == 0 for state in padded for leaf in state.values())
    turned = chain_states(chain, module, {name: value[[2, 0, 1]] for name, value in inputs.items()})
    back = [{name: leaf[[1, 2, 0]] for name, leaf in state.items()} for state in turned]
    assert largest_difference(back, states) < 1e-6
    alone = chain_states(chain, module, samples(inputs, slice(1, 2)))
    mine = [{name: leaf[1:2] for name, leaf in state.items()} for state in states]
    assert largest_difference(alone, mine) < 1e-6


def test_every_block_computes_positions_from_its_own_models_table() -> None:
    """Else e = m + p would lack what the tables add to every block behind the first."""
    module = flan_t5().double()
    chain = chain_of_module(module)
    inputs = two_texts(torch.Generator().manual_seed(0), 3)
    other = perturbed(module, 1)
    for stack in ("encoder", "decoder"):
        for part in (module, other):
            part.get_submodule(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias").weight.data *= 3
    for model in (module, other):
        library = chain.library_states(model, inputs)
        assert largest_difference(chain_states(chain, model, inputs), library) < 1e-12
    last = chain.blocks[-1]
    assert any("relative_attention_bias" in name for name in last.parameters)
    assert not any("relative_attention_bias" in name for name in chain.own_parameters(last))


@T5
@pytest.mark.shows(reloads="yes")
@pytest.mark.parametrize(
    "is_flan",
    [
        pytest.param(True, id="flan", marks=pytest.mark.slow),
        pytest.param(False, id="v1.0 with copies"),
    ],
)
def test_a_saved_folder_reloads_with_every_weight_that_was_merged(is_flan: bool, tmp_path: Path) -> None:
    """The scores' weights too, which belong to no layer, and every copy of the embeddings."""
    place = folder(flan() if is_flan else version_1(), tmp_path / "base")
    if not is_flan:
        with_copies(place)
    architecture = load_architecture("hf-t5", str(place))
    base = open_checkpoint(place)
    aligned = architecture.align(base)
    merged = InMemorySource("merged", {key: aligned.read(key) * 1.25 for key in aligned.headers})
    assert ("lm_head.weight" in merged.headers) == is_flan
    save_model(architecture, base, merged, tmp_path / "out", card=lambda usage: usage)
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert architecture.preprocess is not None
    inputs = architecture.preprocess(QUESTIONS)
    states = walked(pool_of(architecture, torch.float64, merged=merged), "merged", inputs)
    with torch.no_grad():
        found = again(**inputs, output_hidden_states=True)
    seen = inputs["decoder_attention_mask"][..., None]
    torch.testing.assert_close(found.decoder_hidden_states[-1] * seen, states[-1]["hidden"])
    scores = merged.read("lm_head.weight" if is_flan else "shared.weight").double()
    assert torch.equal(again.lm_head.weight, scores)
    answers = again.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=3)
    assert answers.shape[0] == len(QUESTIONS)
