"""Folders of sentence-transformers: opened, pooled as they say, and saved whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint, read_pooling, sentence_modules
from driftlens.config.spec import load_spec
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import iter_final_features
from driftlens.experiment.merging import merge_experts
from driftlens.experiment.study_loading import analysis_settings, open_models
from driftlens.models.architecture import load_architecture
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import CheckpointError, DriftLensError, IncompatibleModelsError, SpecError
from tests.quick import few, paced
from tests.refusing import refusing
from tests.zoo.encoders import TEXTS
from tests.zoo.sentences import EMBEDDERS, embedder, sentences
from tests.zoo.suite import spec_of_folders


def spec_of(root: Path, *experts: str, loader: str = "hf-encoder", **more: Any) -> Any:
    data = root / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"input": text}) for text in TEXTS * 3))
    entry = {"kind": "jsonl", "calibration": str(data), "test": str(data), "n": 6, "n_diagnosis": 6}
    spec = spec_of_folders(
        loader, root / "base", {name: root / name for name in experts}, dict.fromkeys(experts, entry)
    )
    return load_spec(spec | {"merge": {"method": "average"}} | more)


@pytest.mark.parametrize("inside", few(["", "0_Transformer"], ["0_Transformer"]))
def test_a_folder_of_sentences_is_opened_and_saved_whole(inside: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        sentences(tmp_path / name, seed, inside=inside)
    spec = spec_of(tmp_path, "one", "two")
    known = load_architecture("hf-encoder", str(tmp_path / "base"))
    assert analysis_settings(spec, known.chain).pool == "cls"
    assert known.preprocess is not None and known.preprocess.settings["max_length"] == 7
    assert all(word in known.notices[0] for word in ("by cls, then by Dense, Normalize", "'query: '"))
    merge_experts(spec, "average", {}, tmp_path / "out", JobContext())
    merged = load_file(tmp_path / "out" / "model.safetensors")
    sources = [open_checkpoint(tmp_path / name) for name in ("one", "two")]
    key = "encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(merged[key], sum(source.read(key) for source in sources) / 2)
    assert [module.place for module in sentence_modules(tmp_path / "out")] == [
        "",
        "1_Pooling",
        "2_Dense",
        "3_Normalize",
    ]
    names = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    for name in (*names, "config_sentence_transformers.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes(), name
    for name in ("sentence_bert_config.json", "tokenizer.json", "config.json"):
        assert (tmp_path / "out" / name).is_file(), name
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "SentenceTransformer" in card.text
    assert card.data.library_name == "sentence-transformers"
    # What was saved is such a folder again.
    assert load_architecture("hf-encoder", str(tmp_path / "out")).chain.modality.pool == "cls"


EACH_FAMILY = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.family(f"{name}, in sentence-transformers"),
                *paced(name, ["BERT", "Qwen3-Embedding", "EmbeddingGemma"], some=["MPNet"]),
            ],
        )
        for name in EMBEDDERS
    ],
)

LONG = [*TEXTS, "red green blue is it"]
"""Of different lengths, so that shorter ones are padded."""


def embeddings(root: Path, texts: list[str], loader: str = "hf-auto", **of_reader: Any) -> Tensor:
    """What the walk gives for a padded batch of texts, which has to be what ordinary forward passes give."""
    known = load_architecture(loader, str(root))
    assert known.preprocess is not None and known.preprocess.texts is not None
    reader = replace(known.preprocess.texts, **of_reader)
    source = known.align(open_checkpoint(root))
    pool = ModelPool(known.chain, known.skeleton, {"base": source}, device=torch.device("cpu"), dtype=torch.float64)
    batch = Batch(0, len(texts), reader([(text, "") for text in texts]))
    [(_, features)] = iter_final_features(pool, "base", [batch])
    closing = pool.library_states("base", batch.inputs)[-1]["hidden"]
    torch.testing.assert_close(features, closing, rtol=1e-9, atol=1e-11)
    return features


def tokens_of(root: Path, model: Any, text: str) -> Tensor:
    """Features [t, d] of the tokens of one text alone, by transformers."""
    ids = load_architecture("hf-auto", str(root)).preprocess.texts.question_tokens([text])[0]  # type: ignore[union-attr]
    with torch.no_grad():
        features: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return features


def read(root: Path, pooled: Tensor) -> Tensor:
    """What Dense and Normalize make of a vector."""
    weight = load_file(root / "2_Dense" / "model.safetensors")["linear.weight"].double()
    return F.normalize(weight @ pooled, dim=0)


def by_places(tokens: Tensor) -> Tensor:
    places = torch.arange(1, len(tokens) + 1).double()
    return (places @ tokens) / places.sum()


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "cls": lambda x: x[0],
    "max": lambda x: x.amax(0),
    "lasttoken": lambda x: x[-1],
    "weightedmean": by_places,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
}
"""Every pool of sentence-transformers, of the tokens of one text that nothing pads."""


@pytest.mark.parametrize(
    "stated",
    [
        *(pytest.param({"pooling_mode": mode}, id=mode, marks=paced(mode, ["weightedmean"])) for mode in POOLS),
        pytest.param({"pooling_mode": ["mean_sqrt_len_tokens", "cls"]}, id="two in an order of their own"),
        pytest.param(
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            id="two before version 6",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_final_feature_is_the_embedding_however_its_batch_is_padded(
    stated: dict[str, Any], tmp_path: Path
) -> None:
    root = sentences(tmp_path / "base", 0, pooling=stated, dense=1.5)
    modes = read_pooling(root).modes
    for text, embedding in zip(LONG, embeddings(root, LONG), strict=True):
        tokens = tokens_of(root, embedder("BERT", 0).double(), text)
        expected = read(root, torch.cat([POOLS[mode](tokens) for mode in modes]))
        torch.testing.assert_close(embedding, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.shows("drift", files="hf-auto", heads="its embedding")
@EACH_FAMILY
def test_a_familys_embeddings_are_those_of_its_library(family: str, tmp_path: Path) -> None:
    root = sentences(tmp_path / "base", 0, family=family, pooling={"pooling_mode": "lasttoken"})
    found = embeddings(root, LONG)
    expected = [read(root, tokens_of(root, embedder(family, 0).double(), text)[-1]) for text in LONG]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.shows("drift", "sites", "reloads", files="hf-auto", heads="its embedding")
@EACH_FAMILY
def test_what_is_repaired_of_a_family_gives_the_embeddings_that_were_measured(family: str, tmp_path: Path) -> None:
    """From sentences alone; by what the library of the transformer makes of the repaired folder."""
    for seed, name in enumerate(("base", "one", "two")):
        sentences(tmp_path / name, seed, family=family, pooling={"pooling_mode": "lasttoken"})
    spec = spec_of(tmp_path, "one", "two", loader="hf-auto", metrics={"jacobian": False})
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved", progress="none")
    run = dl.open_run(tmp_path / "run")
    library = type(embedder(family, 0)).from_pretrained(tmp_path / "saved").double().eval()
    texts = [(TEXTS * 3)[int(line) - 1] for line in run.sample_ids("one", "diagnosis")]
    expected = [read(tmp_path / "saved", tokens_of(tmp_path / "saved", library, text)[-1]) for text in texts]
    found = torch.from_numpy(run.features("one", "calibrated:featcal", "final").astype(np.float64))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=2e-3)  # stored in float16
    merged = torch.from_numpy(run.features("one", "merged", "final").astype(np.float64))
    assert (found - merged).norm() > 0.05 * merged.norm()


def test_a_prompt_stands_before_texts_and_may_be_left_out_of_the_pool(tmp_path: Path) -> None:
    settings = {"prompts": {"q": "yes"}, "default_prompt_name": "q"}
    stated = {"pooling_mode": "mean", "include_prompt": False}
    root = sentences(tmp_path / "base", 0, pooling=stated, settings=settings)
    (found,) = embeddings(root, [" red"])
    tokens = tokens_of(root, embedder("BERT", 0).double(), " red")  # begin, the prompt, red, end
    torch.testing.assert_close(found, read(root, tokens[-2:].mean(0)), rtol=1e-7, atol=1e-9)
    (whole,) = embeddings(root, [" red"], pools_lead=True)
    torch.testing.assert_close(whole, read(root, tokens.mean(0)), rtol=1e-7, atol=1e-9)
    (bare,) = embeddings(root, ["yes red"], lead="")  # as of a task with a prompt of its own
    torch.testing.assert_close(bare, whole)
    (lowered,) = embeddings(root, [" RED"], lowers=True)
    torch.testing.assert_close(lowered, found)


def test_an_expert_that_makes_other_embeddings_of_its_tokens_is_refused(tmp_path: Path) -> None:
    sentences(tmp_path / "base", 0)
    sentences(tmp_path / "one", 1, dense=2.0)
    with refusing(IncompatibleModelsError, "2_Dense", "differ from the base's", hint="Freeze"):
        open_models(spec_of(tmp_path, "one"))
    sentences(tmp_path / "two", 1, pooling={"pooling_mode": "mean"})
    with refusing(IncompatibleModelsError, "by mean, the base by cls", hint="without modules.json"):
        open_models(spec_of(tmp_path, "two"))
    (tmp_path / "one" / "modules.json").unlink()
    assert not open_models(spec_of(tmp_path, "one")).notices
    chain = load_architecture("hf-encoder", str(tmp_path / "base")).chain
    spec = spec_of(tmp_path, "one")
    other = spec.model_copy(update={"layers": spec.layers.model_copy(update={"pool": "mean"})})
    with refusing(SpecError, "layers.pool is 'mean'", "by cls", hint="Remove", code=2):
        analysis_settings(other, chain)
    # What families of images call so in their settings is none of a folder's.
    assert analysis_settings(other, replace(chain, settings={"pooling": "cls"})).pool == "mean"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param("1_Pooling/config.json", {"pooling_mode": "middle"}, "'middle'", id="pool"),
        pytest.param("2_Dense/config.json", {"activation_function": "os.system"}, "'os.system'", id="code"),
        pytest.param("2_Dense/config.json", {"module_input_name": "x"}, "an entry other than", id="input"),
    ],
)
def test_modules_that_contradict_each_other_are_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    root = sentences(tmp_path / "base", 0, changes={name: change})
    with refusing(IncompatibleModelsError, words):
        load_architecture("hf-encoder", str(root))


@pytest.mark.parametrize(
    ("place", "entry", "error", "words"),
    [
        pytest.param(
            0,
            {"type": "models.WordEmbeddings"},
            IncompatibleModelsError,
            "WordEmbeddings",
            id="no transformer",
        ),
        pytest.param(2, {"type": "custom_st.Mixer"}, IncompatibleModelsError, "Mixer", id="code of its own"),
        pytest.param(2, {"path": "../elsewhere"}, CheckpointError, "an outside folder", id="another folder"),
    ],
)
def test_modules_that_cant_be_followed_are_refused_by_name(
    place: int, entry: dict[str, str], error: type[DriftLensError], words: str, tmp_path: Path
) -> None:
    root = sentences(tmp_path / "base", 0)
    stated = json.loads((root / "modules.json").read_text())
    stated[place] |= entry
    (root / "modules.json").write_text(json.dumps(stated))
    with refusing(error, words):
        load_architecture("hf-encoder", str(root))
    (root / "modules.json").write_text("{}")  # some other library's
    assert load_architecture("hf-encoder", str(root)).chain.modality.pool == "mean"
