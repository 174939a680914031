"""Folders of sentence-transformers: opened, pooled as they say, and saved whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftlens.base.access import Context
from driftlens.base.errors import CheckpointError, DriftLensError, IncompatibleModelsError
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.sentences import modules_of, pooling_of
from driftlens.jobs.study.merging import merge_experts
from driftlens.jobs.study.opening import open_models, settings_of
from driftlens.models.architecture import load_architecture
from driftlens.spec import load_spec
from tests.refusing import refusing
from tests.zoo.encoders import TEXTS, encoder, save
from tests.zoo.suite import spec_of_folders

KINDS = ("Transformer", "Pooling", "Dense", "Normalize")


def sentences(
    root: Path,
    seed: int,
    *,
    inside: str = "",
    pooling: dict[str, Any] | None = None,
    dense: float = 1.0,
) -> Path:
    """A tiny BERT as sentence-transformers lays it out, its transformer in the root or in a folder `inside`."""
    model = encoder("BERT", seed=seed)
    save(model.bert, root / inside)
    width, places = model.config.hidden_size, [inside, "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [
        {"idx": at, "name": str(at), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, place) in enumerate(zip(KINDS, places, strict=True))
    ]
    for place in places[1:3]:
        (root / place).mkdir()
    weights = {"linear.weight": dense * torch.eye(width), "linear.bias": torch.zeros(width)}
    save_file(weights, root / "2_Dense" / "model.safetensors", {"format": "pt"})
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    contents = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": width}
        | (pooling or {"pooling_mode_cls_token": True}),
        "2_Dense/config.json": {"in_features": width, "out_features": width, "bias": True} | activation,
        "config_sentence_transformers.json": {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
        f"{inside or '.'}/sentence_bert_config.json": {"max_seq_length": 7, "do_lower_case": False},
    }
    for name, content in contents.items():
        (root / name).write_text(json.dumps(content))
    return root


def spec_of(root: Path, *experts: str) -> Any:
    data = root / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"input": text}) for text in TEXTS * 3))
    entry = {"kind": "jsonl", "calibration": str(data), "test": str(data)}
    spec = spec_of_folders(
        "hf-encoder", root / "base", {name: root / name for name in experts}, dict.fromkeys(experts, entry)
    )
    return load_spec(spec | {"merge": {"method": "average"}})


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_a_folder_of_sentences_is_opened_and_saved_whole(inside: str, tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        sentences(tmp_path / name, seed, inside=inside)
    spec = spec_of(tmp_path, "one", "two")
    known = load_architecture("hf-encoder", str(tmp_path / "base"))
    assert settings_of(spec, known.chain).pool == "cls"
    assert known.preprocess is not None and known.preprocess.settings["max_length"] == 7
    assert all(word in known.notices[0] for word in ("by cls", "2_Dense, 3_Normalize", "'query: '"))
    merge_experts(spec, "average", {}, tmp_path / "out", Context())
    merged = load_file(tmp_path / "out" / "model.safetensors")
    sources = [open_checkpoint(tmp_path / name) for name in ("one", "two")]
    key = "encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(merged[key], sum(source.read(key) for source in sources) / 2)
    assert [module.place for module in modules_of(tmp_path / "out")] == [
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
    assert "SentenceTransformer" in (tmp_path / "out" / "README.md").read_text()
    # What was saved is such a folder again.
    assert load_architecture("hf-encoder", str(tmp_path / "out")).chain.modality.pool == "cls"


@pytest.mark.parametrize(
    ("stated", "mode", "pool"),
    [
        pytest.param({"pooling_mode_mean_tokens": True}, "mean", "mean", id="before version 6"),
        pytest.param({"pooling_mode": "lasttoken"}, "lasttoken", "last", id="since version 6"),
        pytest.param({"pooling_mode_max_tokens": True}, "max", "mean", id="no linear map"),
        pytest.param(
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "cls and mean",
            "mean",
            id="two",
        ),
    ],
)
def test_features_are_pooled_as_the_folder_says(
    stated: dict[str, Any], mode: str, pool: str, tmp_path: Path
) -> None:
    sentences(tmp_path / "base", 0, pooling=stated)
    known = load_architecture("hf-encoder", str(tmp_path / "base"))
    assert (pooling_of(tmp_path / "base"), known.chain.modality.pool) == (mode, pool)
    assert f"by {mode}" in known.notices[0]
    assert ("no linear map" in known.notices[0]) == (mode not in ("mean", "lasttoken"))


def test_an_expert_with_other_weights_behind_its_transformer_is_refused(tmp_path: Path) -> None:
    sentences(tmp_path / "base", 0)
    sentences(tmp_path / "one", 1, dense=2.0)
    with refusing(IncompatibleModelsError, "2_Dense", "other weights than the base's", hint="frozen"):
        open_models(spec_of(tmp_path, "one"))
    sentences(tmp_path / "two", 1, pooling={"pooling_mode": "mean"})
    (told,) = open_models(spec_of(tmp_path, "two")).notices
    assert "pools the tokens of a text by mean, the base by cls" in told
    (tmp_path / "one" / "modules.json").unlink()
    assert not open_models(spec_of(tmp_path, "one")).notices


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
        pytest.param(2, {"path": "../elsewhere"}, CheckpointError, "outside its own", id="another folder"),
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


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_the_library_reads_sentences_from_what_is_saved(inside: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer

    sentences(tmp_path / "base", 0, inside=inside)
    sentences(tmp_path / "one", 1, inside=inside)
    merge_experts(spec_of(tmp_path, "one"), "average", {}, tmp_path / "out", Context())
    read, expected = (
        SentenceTransformer(str(tmp_path / name), device="cpu").encode(list(TEXTS)) for name in ("out", "one")
    )
    torch.testing.assert_close(torch.tensor(read), torch.tensor(expected))
