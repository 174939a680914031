"""Encoders from files against their library: features, masks, and the heads that their experts bring."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from driftlens.base.errors import DataError, IncompatibleModelsError, NumericsError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.diagnostics.output import score_gains
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.chain import State, pooled
from driftlens.models.own_heads import OwnHead, behind_core
from tests.zoo.encoders import PARAMS, TEXTS, encoder, logits, save
from tests.zoo.walking import chain_states

NAMES = ("x", "y", "z")


def opened(name: str, folder: pathlib.Path) -> tuple[Architecture, Any]:
    """The architecture that one model's files describe, and another model, in float64, whose files lie beside them."""
    save(encoder(name, seed=1), folder / "base")
    save(encoder(name, seed=2), folder / "expert")
    loader = "hf-auto" if name == "ModernBERT" else "hf-encoder"
    return load_architecture(loader, str(folder / "base")), encoder(name, seed=2).double()


def states(architecture: Architecture, folder: pathlib.Path, texts: tuple[str, ...]) -> list[State]:
    """What the expert's weights make of texts, layer by layer, in float64."""
    assert architecture.preprocess is not None
    source = architecture.align(open_checkpoint(folder / "expert"))
    weights = {key: source.read(key).double() for key in source.headers}
    return chain_states(architecture.chain, weights, architecture.preprocess([(text, "") for text in texts]))


def own_head(architecture: Architecture, folder: pathlib.Path) -> OwnHead:
    stored = open_checkpoint(folder / "expert")
    keys = architecture.classifier_keys(stored)
    assert set(architecture.align(stored).headers) == set(architecture.keys)
    assert architecture.own_head is not None and keys is not None
    return architecture.own_head.head(stored, keys, NAMES)


@pytest.mark.shows("drift", files="hf-encoder")
@pytest.mark.parametrize("name", PARAMS)
def test_features_are_those_of_the_library_at_every_boundary(name: str, tmp_path: pathlib.Path) -> None:
    """Of a model the architecture was not read from, no weight of which it has seen."""
    architecture, model = opened(name, tmp_path)
    assert architecture.preprocess is not None and all(
        value.is_meta for value in architecture.skeleton.parameters()
    )
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
def test_the_head_of_an_expert_is_all_that_its_library_runs_behind_the_tokens(
    name: str, tmp_path: pathlib.Path
) -> None:
    architecture, model = opened(name, tmp_path)
    assert architecture.preprocess is not None and architecture.own_head is not None
    head, pool = own_head(architecture, tmp_path), architecture.own_head.pool
    assert pool == ("mean" if name == "ModernBERT" else "cls")
    inputs = architecture.preprocess([(text, "") for text in TEXTS])
    tokens = states(architecture, tmp_path, TEXTS)[-1]["hidden"]
    features = pooled(tokens, pool, inputs["attention_mask"])
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


def test_positions_that_every_block_of_deberta_reads_belong_to_the_first(tmp_path: pathlib.Path) -> None:
    architecture, _ = opened("DeBERTa-v3", tmp_path)
    chain, key = architecture.chain, "deberta.encoder.rel_embeddings.weight"
    assert all(key in layer.parameters for layer in chain.blocks)
    assert [layer.index for layer in chain.layers if key in chain.owned(layer)] == [2]
    sites = {site.name: site for site in chain.blocks[0].sites}
    assert not any("query_proj" in name or "key_proj" in name for name in sites)
    assert sites["attention.self.value_proj"].input == "attention.self.value_proj"
    assert "nothing else" in chain.blocks[0].no_sites["attention.self.query_proj.weight"][1]


def test_heads_that_don_t_fit_are_refused(tmp_path: pathlib.Path) -> None:
    architecture, _ = opened("RoBERTa", tmp_path)
    stored = open_checkpoint(tmp_path / "expert")
    keys = architecture.classifier_keys(stored)
    assert architecture.own_head is not None and keys is not None
    with pytest.raises(DataError, match="gives 3 scores, but there are 2"):
        architecture.own_head.head(stored, keys, NAMES[:2])
    with pytest.raises(IncompatibleModelsError, match="another than the base's"):
        architecture.own_head.head(stored, keys[::-1], NAMES)
    with pytest.raises(DataError, match="reads 16 features"):
        own_head(architecture, tmp_path).scores(torch.zeros(2, 3))
    model = encoder("RoBERTa", seed=2)
    model.classifier.dense.bias.data[3] = torch.nan
    with pytest.raises(NumericsError, match=r"'classifier.dense.bias' holds 1 NaN"):
        architecture.own_head.head(open_checkpoint(save(model, tmp_path / "nan")), keys, NAMES)
    model = encoder("RoBERTa").roberta  # a core alone holds no classifier
    assert architecture.classifier_keys(open_checkpoint(save(model, tmp_path / "core"))) is None


def test_a_classifier_trained_on_a_core_alone_finds_its_pooler_there(tmp_path: pathlib.Path) -> None:
    """As adapters of a classifier leave it: the base's weights under the base's names, the classifier under its own."""
    architecture, _ = opened("BERT", tmp_path)
    whole = encoder("BERT", seed=2)
    state = whole.bert.state_dict() | {
        f"classifier.{key}": x for key, x in whole.classifier.state_dict().items()
    }
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
    assert behind_core(whole, {key: key for key in whole.state_dict()}) is None
    assert whole.core is core
