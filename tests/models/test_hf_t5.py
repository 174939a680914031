"""T5 from files of every form, its streams whatever the padding, and back into folders that transformers loads."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from driftlens.base.errors import DataError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sources import StateSource, TensorsSource
from driftlens.engine.pool import ModelPool
from driftlens.models.architecture import Architecture, architecture_of, load_architecture
from driftlens.models.families.hf_t5 import HfT5
from driftlens.models.saving import save_model
from tests.zoo.cases import perturbed, samples
from tests.zoo.hand_made import two_texts
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.walking import chain_states, largest_difference

T5 = pytest.mark.family("T5 (transformers)")
QUESTIONS = [("is it red ?", "yes"), ("green", ""), ("is it blue or is it green ?", "no it is blue")]


def flan() -> nn.Module:
    return HfT5().tiny()


def version_1() -> nn.Module:
    """Of one embedding for everything, ReLU instead of gates."""
    config = HfT5().tiny().config.to_dict() | {"feed_forward_proj": "relu", "scale_decoder_outputs": True}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config.from_dict(config)).eval()
    assert model.lm_head.weight is model.shared.weight
    return model


def folder(module: nn.Module, path: pathlib.Path, dtype: torch.dtype = torch.float32) -> pathlib.Path:
    module.to(dtype).save_pretrained(path)
    word_tokenizer("encoder-decoder").save_pretrained(path)
    return path


def with_copies(path: pathlib.Path) -> pathlib.Path:
    """The embeddings under all their names, as older versions wrote them."""
    file = path / "model.safetensors"
    weights = load_file(file)
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    weights |= {name: weights["shared.weight"].clone() for name in names if name not in weights}
    save_file(weights, file, {"format": "pt"})
    return path


def pool_of(architecture: Architecture, dtype: torch.dtype, **models: StateSource) -> ModelPool:
    return ModelPool(
        architecture.chain, architecture.skeleton, models, device=torch.device("cpu"), dtype=dtype
    )


def walked(pool: ModelPool, model: str, inputs: Any) -> list[dict[str, Tensor]]:
    source = pool.source(model)
    return chain_states(pool.chain, {key: source.read(key).to(pool.dtype) for key in source.headers}, inputs)


@T5
@pytest.mark.shows("drift", files="hf-t5")
@pytest.mark.parametrize(
    ("build", "change", "dtype"),
    [(flan, None, torch.float16), (version_1, None, torch.float32), (version_1, with_copies, torch.float32)],
    ids=["flan in float16", "v1.0", "v1.0 with copies"],
)
def test_files_of_every_form_give_the_librarys_features(
    build: Callable[[], nn.Module],
    change: Callable[[pathlib.Path], object] | None,
    dtype: torch.dtype,
    tmp_path: pathlib.Path,
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
    module = HfT5().tiny().double()
    chain = architecture_of(module).chain
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
    module = HfT5().tiny().double()
    chain = architecture_of(module).chain
    inputs = two_texts(torch.Generator().manual_seed(0), 3)
    other = perturbed(module, 1)
    for stack in ("encoder", "decoder"):
        for part in (module, other):
            part.get_submodule(
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
            ).weight.data *= 3
    for model in (module, other):
        library = chain.library_states(model, inputs)
        assert largest_difference(chain_states(chain, model, inputs), library) < 1e-12
    last = chain.blocks[-1]
    assert any("relative_attention_bias" in name for name in last.parameters)
    assert not any("relative_attention_bias" in name for name in chain.owned(last))


@T5
@pytest.mark.shows(reloads="yes")
@pytest.mark.parametrize("is_flan", [True, False], ids=["flan", "v1.0 with copies"])
def test_a_saved_folder_reloads_with_every_weight_that_was_merged(
    is_flan: bool, tmp_path: pathlib.Path
) -> None:
    """The scores' weights too, which belong to no layer, and every copy of the embeddings."""
    place = folder(flan() if is_flan else version_1(), tmp_path / "base")
    if not is_flan:
        with_copies(place)
    architecture = load_architecture("hf-t5", str(place))
    base = open_checkpoint(place)
    aligned = architecture.align(base)
    merged = TensorsSource("merged", {key: aligned.read(key) * 1.25 for key in aligned.headers})
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


def test_a_batch_without_tokens_or_with_unknown_ones_is_refused() -> None:
    chain = architecture_of(HfT5().tiny()).chain
    with pytest.raises(DataError, match="without input_ids"):
        chain.start({"ids": torch.ones(2, 3)})
    with pytest.raises(DataError, match="the model knows 40"):
        chain.start({"input_ids": torch.tensor([[1, 40]])})
