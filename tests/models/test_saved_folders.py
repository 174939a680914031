"""Saved folders are whole: the original library reads images and prompts from them as it did from the base's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource, content_digest
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.heads import zero_shot_head
from driftlens.models.saving import PatchedSource, save_model
from driftlens.utils.errors import NumericsError
from tests.zoo import encoders
from tests.zoo.decoders import CONFIGS, saved
from tests.zoo.saved_families import FAMILIES, Family, bert, save, spelling_tokenizer, trained
from tests.zoo.small import flan_t5
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.towers import HF_TEXT, HF_VISION, hf_folder, open_clip_folder
from tests.zoo.walking import chain_states

CLASSES = ("cat", "dog", "tree", "sea", "map")


def version_4(folder: Path) -> Path:
    """As OpenAI's repository: vocabulary and merges by themselves, preprocessor_config.json."""
    return hf_folder(folder)


def version_5(folder: Path) -> Path:
    """As transformers 5 saves model and processor: tokenizer.json, and of images processor_config.json."""
    import transformers

    hf_folder(folder)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16, image_mean=[0.1, 0.2, 0.3])
    for name in ("vocab.json", "merges.txt", "preprocessor_config.json"):
        (folder / name).unlink()
    transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)
    assert not (folder / "preprocessor_config.json").exists()
    return folder


def moved(architecture: Architecture, base: StateSource) -> StateSource:
    """The base with every weight of its image tower moved."""
    tower = architecture.align(base)
    return PatchedSource(tower, {key: 1.3 * tower.read(key) for key in tower.headers})


def pictures(count: int = 6) -> list[Image.Image]:
    """Stripes and noise of the tower's size, so that nothing is resized and libraries agree."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 64, (count, 16, 16, 3), generator=generator)
    stripes = 191 * torch.rand(count, 16, 1, 3, generator=generator).round().long()
    return [Image.fromarray(image.numpy()) for image in (noise + stripes).to(torch.uint8)]


def own_features(architecture: Architecture, model: StateSource, samples: Sequence[Any]) -> Tensor:
    module = architecture.skeleton
    module.load_state_dict({key: model.read(key) for key in architecture.keys}, assign=True)
    assert architecture.preprocess is not None
    return chain_states(architecture.chain, module, architecture.preprocess(samples))[-1]["hidden"]


def used(usage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the Python of a card computes, run in its folder beside a picture."""
    pictures()[0].save(folder / "image.png")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.chdir(folder)
        names: dict[str, Any] = {}
        exec(usage, names)
    return names


def wrapped(folder: Path, wrapper: str) -> StateSource:
    plain = open_checkpoint(folder)
    return InMemorySource("base", {wrapper + key: plain.read(key) for key in plain.headers})


@pytest.mark.parametrize(("style", "wrapper"), [(version_4, "module."), (version_5, "")])
@torch.no_grad()
def test_a_whole_clip_classifies_in_its_library_as_here(
    style: Callable[[Path], Path],
    wrapper: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import CLIPModel, CLIPProcessor, CLIPVisionModelWithProjection

    folder, out = style(tmp_path / "base"), tmp_path / "out"
    architecture, base = load_architecture("hf-clip", str(folder)), wrapped(folder, wrapper)
    model = moved(architecture, base)
    save_model(architecture, base, model, out, card=lambda usage: usage)

    features = own_features(architecture, model, pictures())
    head = zero_shot_head(architecture.text_tower(base), CLASSES, ["a photo of a {}."])
    scores = head.scores(features)

    library, processor = CLIPModel.from_pretrained(out), CLIPProcessor.from_pretrained(out)
    prompts = [f"a photo of a {name}." for name in CLASSES]
    found = library(**processor(text=prompts, images=pictures(), padding=True, return_tensors="pt"))
    torch.testing.assert_close(found.image_embeds, F.normalize(features), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_embeds, head.embeddings, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.logits_per_image, scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.logits_per_image.argmax(dim=1), scores.argmax(dim=1))

    computed = used((out / "README.md").read_text(), out, monkeypatch)
    torch.testing.assert_close(computed["features"], F.normalize(features[:1]), rtol=0, atol=1e-5)
    assert architecture.preprocess is not None
    inputs, again = architecture.preprocess(pictures()), load_architecture("hf-clip", str(out))
    alone = CLIPVisionModelWithProjection.from_pretrained(out)(inputs).image_embeds
    torch.testing.assert_close(alone, features, rtol=0, atol=1e-5)
    assert again.preprocess is not None and torch.equal(again.preprocess(pictures()), inputs)
    assert again.chain.settings == architecture.chain.settings and again.notices == ()


def test_the_tokenizer_of_the_base_comes_along_where_the_architecture_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The architecture's own folder says how images are prepared, whatever lies beside the base's weights."""
    base_folder, bare = version_5(tmp_path / "base"), tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base_folder / "config.json").read_bytes())
    images = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16}
    (bare / "preprocessor_config.json").write_text(json.dumps(images | {"image_mean": [0.9, 0.8, 0.7]}))
    architecture, base = load_architecture("hf-clip", str(bare)), open_checkpoint(base_folder)
    with caplog.at_level(logging.WARNING, "driftlens"):
        save_model(architecture, base, moved(architecture, base), tmp_path / "out")
    assert caplog.text == ""
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base_folder / "tokenizer.json").read_bytes()
    from transformers import CLIPProcessor

    assert list(CLIPProcessor.from_pretrained(tmp_path / "out").image_processor.image_mean) == [0.9, 0.8, 0.7]

    (base_folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING, "driftlens"):
        save_model(architecture, base, moved(architecture, base), tmp_path / "mute", card=str)
    assert "no tokenizer files" in caplog.text


def test_code_never_comes_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, out = version_5(tmp_path / "base"), tmp_path / "out"
    for name in ("modeling_clip.py", "tokenizer.py", "chat_template.py", "run.sh", "weights.pkl"):
        (folder / name).write_text("raise SystemExit")
    for name in ("generation_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        content = json.loads((folder / name).read_text())
        inner = content.get("image_processor", content)
        inner["auto_map"] = {"AutoModel": "modeling_clip.Model"}
        (folder / name).write_text(json.dumps(content))
    architecture, base = load_architecture("hf-clip", str(folder)), open_checkpoint(folder)
    with caplog.at_level(logging.WARNING, "driftlens"):
        save_model(architecture, base, moved(architecture, base), out)
    assert {path.suffix for path in out.iterdir()} == {".json", ".safetensors", ".jinja"}
    for path in out.glob("*.json"):
        assert "auto_map" not in path.read_text(), path.name
        known = json.loads((folder / path.name).read_text()) if (folder / path.name).exists() else {}
        assert known.keys() - {"auto_map"} <= json.loads(path.read_text()).keys(), path.name
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        assert f"{name} names custom code" in caplog.text


@torch.no_grad()
def test_a_whole_clip_classifies_in_open_clip_as_here(tmp_path: Path) -> None:
    import open_clip

    folder, out = open_clip_folder(tmp_path / "base"), tmp_path / "out"
    architecture, base = load_architecture("open-clip", str(folder)), wrapped(folder, "module.")
    model = moved(architecture, base)
    save_model(architecture, base, model, out)
    again = load_architecture("open-clip", str(out))
    assert again.chain.settings == architecture.chain.settings and again.notices == ()
    head = zero_shot_head(architecture.text_tower(base), CLASSES, ["a photo of a {}."])
    scores = head.scores(own_features(architecture, model, pictures()))
    library, prepare = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    prompts = open_clip.get_tokenizer(f"local-dir:{out}")([f"a photo of a {name}." for name in CLASSES])
    texts = library.eval().encode_text(prompts, normalize=True)
    images = library.encode_image(torch.stack([prepare(image) for image in pictures()]), normalize=True)
    found = library.logit_scale.exp() * images @ texts.T
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(dim=1), scores.argmax(dim=1))


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_a_base_in_shards_is_saved_in_shards(index: str, tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    folder, out = tmp_path / "base", tmp_path / "out"
    config = CLIPConfig(text_config=HF_TEXT, vision_config=HF_VISION, projection_dim=8)
    CLIPModel(config).save_pretrained(folder, max_shard_size="40KB")
    if index.startswith("pytorch"):
        as_pickles(folder)
    architecture, base = load_architecture("hf-clip", str(folder)), open_checkpoint(folder)
    model = moved(architecture, base)
    save_model(architecture, base, model, out)
    before, after = (
        json.loads((place / name).read_text())["weight_map"]
        for place, name in ((folder, index), (out, "model.safetensors.index.json"))
    )
    assert len(set(after.values())) == len(list(out.glob("*.safetensors"))) > 2
    groups = [{frozenset(key for key in at if at[key] == file) for file in at.values()} for at in (before, after)]
    assert groups[0] == groups[1]
    loaded, info = CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert content_digest(architecture.align(open_checkpoint(out))) == content_digest(model)
    assert torch.equal(loaded.state_dict()["text_projection.weight"], base.read("text_projection.weight"))

    save_model(architecture, base, model, tmp_path / "one.safetensors")
    assert open_checkpoint(tmp_path / "one.safetensors").headers.keys() == base.headers.keys()
    key = architecture.chain.parameter_keys()[-1]
    broken = PatchedSource(model, {key: torch.full(model.headers[key].shape, float("nan"))})
    with pytest.raises(NumericsError, match="NaN"):
        save_model(architecture, base, broken, tmp_path / "broken")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "out", "one.safetensors"}


def as_pickles(folder: Path) -> None:
    """The shards of a folder as older versions of the library wrote them."""
    from safetensors.torch import load_file

    listed = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        torch.save(load_file(path), folder / f"pytorch_{path.stem}.bin")
        path.unlink()
    listed["weight_map"] = {
        key: f"pytorch_{name.removesuffix('.safetensors')}.bin" for key, name in listed["weight_map"].items()
    }
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(listed))


def bert_folder(folder: Path) -> tuple[str, Any]:
    model = trained(Family("hf-auto", bert), 3, 1)
    model.save_pretrained(folder)
    spelling_tokenizer().save_pretrained(folder)
    return "hf-auto", model


def family_folder(name: str) -> Callable[[Path], tuple[str, Any]]:
    def prepare(folder: Path) -> tuple[str, Any]:
        model = trained(FAMILIES[name], 3, 1)
        save(FAMILIES[name], model, folder)
        return FAMILIES[name].loader, model

    return prepare


def decoder_folder(name: str) -> Callable[[Path], tuple[str, Any]]:
    def prepare(folder: Path) -> tuple[str, Any]:
        saved(CONFIGS[name], folder)
        return "hf-decoder", AutoModelForCausalLM.from_pretrained(folder)

    return prepare


def t5_folder(folder: Path) -> tuple[str, Any]:
    model = flan_t5()
    model.save_pretrained(folder)
    word_tokenizer("encoder-decoder").save_pretrained(folder)
    return "hf-t5", model


def encoder_folder(name: str) -> Callable[[Path], tuple[str, Any]]:
    return lambda folder: (
        "hf-encoder",
        AutoModelForSequenceClassification.from_pretrained(encoders.save(encoders.encoder(name), folder)),
    )


@pytest.mark.parametrize("prepare", [family_folder("ViT"), family_folder("timm ViT"), bert_folder])
@torch.no_grad()
def test_the_card_of_a_classifier_computes_what_the_tasks_heads_read(
    prepare: Callable[[Path], tuple[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, out = tmp_path / "base", tmp_path / "out"
    loader, _ = prepare(folder)
    (folder / "LICENSE").write_text("ours")
    architecture, base = load_architecture(loader, str(folder)), open_checkpoint(folder)
    model = moved(architecture, base)
    save_model(architecture, base, model, out, card=lambda usage: usage)
    computed = used((out / "README.md").read_text(), out, monkeypatch)["features"]
    samples = [("a sentence", "")] if prepare is bert_folder else pictures()[:1]
    expected = own_features(architecture, model, samples)
    if expected.dim() > computed.dim():  # no task brings a head that says which token it reads
        expected = expected.mean(dim=1) if prepare is bert_folder else expected[:, 0]
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
    assert (out / "LICENSE").read_text() == "ours"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tied:UserWarning")
@pytest.mark.parametrize(
    ("prepare", "targets", "whole"),
    [
        (decoder_folder("Llama"), ["q_proj", "v_proj", "down_proj"], None),
        (decoder_folder("Llama, untied"), "all-linear", None),
        (t5_folder, ["q", "v", "wo"], None),
        (encoder_folder("BERT"), ["query", "value"], ["classifier"]),
        (encoder_folder("RoBERTa"), ["query", "value"], ["classifier"]),
        (encoder_folder("DistilBERT"), ["q_lin", "lin1"], ["pre_classifier", "classifier"]),
    ],
)
def test_adapters_of_language_models_are_what_peft_merges(
    prepare: Callable[[Path], tuple[str, Any]],
    targets: Any,
    whole: list[str] | None,
    tmp_path: Path,
) -> None:
    """And the heads that were trained beside them."""
    peft = pytest.importorskip("peft")
    loader, model = prepare(tmp_path / "base")
    found = load_architecture(loader, str(tmp_path / "base"))
    base = found.align(stored := open_checkpoint(tmp_path / "base"))
    kind = "SEQ_CLS" if whole else "CAUSAL_LM" if loader == "hf-decoder" else "SEQ_2_SEQ_LM"
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=whole, task_type=kind)
    adapted = peft.get_peft_model(model, config)
    for seed, (name, value) in enumerate(adapted.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            value.data = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)) / 10
    adapted.save_pretrained(tmp_path / "lora")
    opened = open_checkpoint(tmp_path / "lora", base=found.lora_base(stored, str(tmp_path / "lora")))
    expert, merged = found.align(opened, fallback=base), adapted.merge_and_unload().state_dict()
    changed = {key for key in base.headers if not torch.equal(expert.read(key), base.read(key))}
    assert changed
    for key in base.headers:
        torch.testing.assert_close(expert.read(key), merged[key], rtol=1e-6, atol=1e-6)
    if whole:
        keys = found.classifier_keys(opened)
        assert found.own_head is not None and keys is not None
        for name, key in zip(found.own_head.names, keys, strict=True):
            assert torch.equal(opened.read(key), merged[name]), name
