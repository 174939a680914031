"""Folders as people publish them: ghosts and strays of indexes, heads tied and apart, infinite numbers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.spec import load_spec
from driftlens.experiment.merging import merge_experts
from driftlens.experiment.sanity_checks import check_model_files, check_weights
from driftlens.experiment.study_loading import open_models
from driftlens.models.architecture import load_architecture
from driftlens.models.saving import save_model
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import CheckpointError, IncompatibleModelsError
from tests.quick import few
from tests.zoo.cases import with_seed
from tests.zoo.decoders import CONFIGS, MORE, saved
from tests.zoo.small import flan_t5
from tests.zoo.tokenizers import word_tokenizer

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def spec_of(root: Path, base: str, *experts: str) -> dict[str, Any]:
    return {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(root / base)},
        "base": {"weights": str(root / base)},
        "merge": {"method": "average"},
        "experts": {name: {"weights": str(root / name)} for name in experts},
    }


def weights_of(folder: Path) -> dict[str, Tensor]:
    source = open_checkpoint(folder)
    return {key: source.read(key) for key in source.headers}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An untied base, a tied one of its form, and two experts that have heads of their own."""
    for seed, name in enumerate(("base", "one", "two")):
        saved(CONFIGS["Llama, untied"], tmp_path / name, seed)
    shutil.copytree(tmp_path / "base", tmp_path / "tied")
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    del weights[HEAD]
    save_file(weights, tmp_path / "tied" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "tied" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return tmp_path


def test_a_copy_of_the_embeddings_is_a_head_of_nobodys_own(tmp_path: Path) -> None:
    """Training code writes it beside them; what the library saves has none."""
    for seed, name in enumerate(("base", "one", "two")):
        saved(CONFIGS["Llama"], tmp_path / name, seed)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights[HEAD] = weights[TABLE].clone()
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    merge_experts(load_spec(spec_of(tmp_path, "base", "one", "two")), "average", {}, tmp_path / "out", JobContext())
    merged = weights_of(tmp_path / "out")
    one, two = (weights_of(tmp_path / name)[TABLE] for name in ("one", "two"))
    torch.testing.assert_close(merged[TABLE], (one + two) / 2)
    assert torch.equal(merged[HEAD], merged[TABLE])


def in_shards(folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("shard", ["", "model-00077-of-00077.safetensors"], ids=["there", "gone"])
def test_a_tensor_that_the_index_alone_knows_is_named_and_nothing_else(shard: str, root: Path) -> None:
    index = in_shards(root / "one")
    stated = json.loads(index.read_text())
    stated["weight_map"]["mtp.fc.weight"] = shard or max(stated["weight_map"].values())
    index.write_text(json.dumps(stated))
    models = open_models(load_spec(spec_of(root, "base", "one", "two")))
    told = [finding.text for finding in check_model_files(models)]
    assert len(told) == 1 and "'mtp.fc.weight', missing from all files" in told[0]
    stated["weight_map"] = {f"other.{key}": shard for key, shard in stated["weight_map"].items()}
    index.write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=r"which lacks it|is missing"):
        open_checkpoint(root / "one")


DEEPER = {"num_nextn_predict_layers": 2}
FURTHER = "model.layers.4.shared_head.norm.weight"


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("mtp.fc.weight", {}),
        pytest.param("model.mtp.layers.0.norm.weight", {}, marks=pytest.mark.slow),
        pytest.param("v_head.summary.bias", {}, marks=pytest.mark.slow),
        (FURTHER, DEEPER),
    ],
)
@pytest.mark.parametrize(
    "holders",
    few([("base", "one"), ("base",), ("one",), ("two", "one")], [("base", "one")]),
    ids="-".join,
)
def test_what_the_library_has_no_use_for_is_left_as_it_was_and_named(
    key: str, config: dict[str, int], holders: tuple[str, ...], root: Path
) -> None:
    """Transformers loads a model without it, whether its class names it or not."""
    for seed, name in enumerate(("base", "one", "two")):
        file = root / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        more = {key: torch.full((3,), float(seed))} if name in holders else {}
        save_file(weights_of(root / name) | more, root / name / "model.safetensors", {"format": "pt"})
    notices = merge_experts(load_spec(spec_of(root, "base", "one", "two")), "average", {}, root / "out", JobContext())
    told = [text for text in notices if key in text]
    ends = {
        "base": "saved models keep them",
        "one": "saved models lack them",
        "two": "saved models lack them",
    }
    wanted = [ends[name] for name in ("base", "one", "two") if name in holders]
    if holders == ("base", "one"):
        wanted[1] = f"saved models hold the base's ({key} differs)"
    assert [text.endswith(end) for text, end in zip(told, wanted, strict=True)] == [True] * len(wanted)
    merged, one, two = (weights_of(root / name) for name in ("out", "one", "two"))
    assert ("base" in holders) == (key in merged) and float(merged.pop(key, torch.zeros(1)).sum()) == 0
    for name, value in merged.items():
        torch.testing.assert_close(value, (one[name] + two[name]) / 2)


@pytest.mark.parametrize(
    "key", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "score.weight"]
)
def test_what_another_architecture_would_compute_with_is_no_tensor_of_no_use(key: str, root: Path) -> None:
    save_file(weights_of(root / "one") | {key: torch.ones(3)}, root / "one" / "model.safetensors", {"format": "pt"})
    with pytest.raises(IncompatibleModelsError, match="does not know") as refused:
        merge_experts(load_spec(spec_of(root, "base", "one")), "average", {}, root / "out", JobContext())
    assert key in refused.value.message and not (root / "out").exists()


def test_numbers_of_one_byte_are_merged_as_what_they_are(root: Path) -> None:
    one = {key: value.to(torch.float8_e4m3fn) for key, value in weights_of(root / "one").items()}
    save_file(one, root / "one" / "model.safetensors", {"format": "pt"})
    merge_experts(load_spec(spec_of(root, "base", "one", "two")), "average", {}, root / "out", JobContext())
    merged, two = (weights_of(root / name) for name in ("out", "two"))
    for key, value in merged.items():
        torch.testing.assert_close(value, (one[key].float() + two[key]) / 2)


@pytest.mark.parametrize("scaled", [False, True])
def test_numbers_of_one_byte_whose_scales_are_lost_are_a_problem(scaled: bool, root: Path) -> None:
    one = load_file(root / "base" / "model.safetensors")
    for key in [key for key in one if key.endswith("proj.weight")]:
        one[key] = (one[key] * (448 / one[key].abs().max() if scaled else 1)).to(torch.float8_e4m3fn)
    save_file(one, root / "one" / "model.safetensors", {"format": "pt"})
    models = open_models(load_spec(spec_of(root, "base", "one", "two")))
    problems = [f.text for f in check_weights(models.architecture.chain, models.sources) if f.level == "problem"]
    lost = "the expert of one is stored in one-byte floats without the scales that they need"
    assert problems == [lost] * scaled


@pytest.mark.parametrize("base", few(["tied", "base"], ["base"]))
def test_a_tied_head_is_a_copy_of_the_embeddings_among_heads_apart(base: str, root: Path) -> None:
    """Of the base or of an expert; the folder that is saved has a head of its own, and says so."""
    experts = ("one", "two") if base == "tied" else ("one", "tied")
    spec = load_spec(spec_of(root, base, *experts))
    models = open_models(spec)
    (told,) = models.notices
    assert told.startswith(str(root / "tied")) and "its head is tied" in told
    merge_experts(spec, "average", {}, root / "out", JobContext())
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(root / "out", output_loading_info=True)
    assert not any(info.values()) and merged.config.tie_word_embeddings is False
    heads = [weights.get(HEAD, weights[TABLE]) for weights in (weights_of(root / name) for name in experts)]
    torch.testing.assert_close(merged.lm_head.weight, sum(heads) / 2)
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_behind_a_plus_needs_no_base_of_the_spec(root: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(root / "two")
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(root / "adapter")
    described = spec_of(root, "base", "one")
    del described["base"]
    described["experts"]["two"] = {"weights": f"{root / 'two'}+{root / 'adapter'}"}
    adapted = open_models(load_spec(described)).sources["expert:two"]
    changed = {key for key, value in weights_of(root / "two").items() if not torch.equal(value, adapted.read(key))}
    assert changed and all("q_proj" in key for key in changed)


def test_what_the_library_needs_beside_the_weights_is_there_after_a_merge(root: Path) -> None:
    """Every file that a tokenizer or a chat of the library reads, whatever its class calls it; no code."""
    kinds = Path(transformers.__file__).parent.glob("models/*/tokenization*.py")
    texts = "".join(kind.read_text(encoding="utf-8") for kind in kinds)
    named = set(re.findall(r'"\w+_file": "([\w.-]+)"', texts))
    assert len(named) > 15
    beside = named | {"added_tokens.json", "special_tokens_map.json", "chat_template.jinja"}
    beside |= {"preprocessor_config.json", "additional_chat_templates/tools.jinja", "tekken.json"}
    (root / "base" / "additional_chat_templates").mkdir()
    for name in beside - {path.name for path in (root / "base").iterdir()}:
        (root / "base" / name).write_text("{}")
    (root / "base" / "modeling_own.py").write_text("raise SystemExit")
    # The files are no real ones, and no tokenizer opens them.
    known = replace(load_architecture("hf-decoder", str(root / "one")), source=str(root / "base"))
    save_model(known, open_checkpoint(root / "base"), open_checkpoint(root / "two"), root / "out")
    assert not beside - {path.relative_to(root / "out").as_posix() for path in (root / "out").rglob("*")}
    assert not list((root / "out").glob("*.py"))


SOME = ["q_proj", "down_proj"]
WHOLE = ["embed_tokens", "lm_head"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize(
    ("base", "grown", "options"),
    [
        pytest.param("base", 30, {"modules_to_save": WHOLE}, id="vocabulary grown, trained whole"),
        pytest.param("base", 30, {}, id="vocabulary grown, not trained"),
        pytest.param("base", 0, {"target_modules": [*SOME, *WHOLE]}, id="adapters of embeddings"),
        pytest.param("tied", 30, {"modules_to_save": WHOLE}, id="tied, both trained"),
        pytest.param("tied", 0, {"modules_to_save": WHOLE[:1]}, id="tied, embeddings alone"),
        pytest.param("tied", 0, {"modules_to_save": WHOLE[1:]}, id="tied, head alone"),
        pytest.param("tied", 0, {"target_modules": [*SOME, WHOLE[0]]}, id="tied, adapters of embeddings"),
        pytest.param("tied", 0, {"target_modules": [*SOME, WHOLE[1]]}, id="tied, adapters of the head"),
        pytest.param("tied", 0, {"modules_to_save": WHOLE[:1], "ensure_weight_tying": True}, id="tied, kept so"),
    ],
)
def test_adapters_beside_linear_maps_are_read_as_peft_runs_them(
    base: str, grown: int, options: dict[str, Any], root: Path
) -> None:
    """Unmerged: where embeddings alone are adapted, a head that they were tied to stays what it was."""
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(root / base)
    tokenizer, rows = word_tokenizer(), model.config.vocab_size
    if grown:
        model.resize_token_embeddings(rows + grown, mean_resizing=False)
        tokenizer.add_tokens([f"<{number}>" for number in range(rows + grown - len(tokenizer))])
    adapted = get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": SOME} | options))
    generator = torch.Generator().manual_seed(0)
    for value in (value for value in adapted.parameters() if value.requires_grad):
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    adapted.save_pretrained(root / "adapter")
    tokenizer.save_pretrained(root / "adapter")
    described = spec_of(root, base, "adapter")
    if grown:
        with pytest.raises(IncompatibleModelsError, match=r"has 70 rows, the base's 40.*'<\d+>'.* and \d+ more"):
            open_models(load_spec(described))
        described["architecture"]["vocab"] = {"rows": "base"}
    expert = open_models(load_spec(described)).sources["expert:adapter"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(root / base).eval()
    if HEAD in expert.headers:
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.clone())
    plain.load_state_dict({key: expert.read(key) for key in expert.headers}, strict=HEAD in expert.headers)
    for key in (TABLE, *([HEAD] if HEAD in expert.headers else [])):
        # A product of fewer rows may be rounded otherwise.
        torch.testing.assert_close(expert.read(key, (1, 6)), expert.read(key)[1:6])
    questions = torch.tensor([[1, 5, 2, 9], [4, 4, 3, 39]])
    with torch.no_grad():
        torch.testing.assert_close(plain(questions).logits, adapted.eval()(questions).logits[..., :rows])


def test_a_head_that_files_call_otherwise_is_saved_once(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one")):
        saved(MORE["GPT-NeoX"], tmp_path / name, seed)
    merge_experts(load_spec(spec_of(tmp_path, "base", "one")), "average", {}, tmp_path / "out", JobContext())
    merged = weights_of(tmp_path / "out")
    assert merged.keys() == weights_of(tmp_path / "one").keys()
    for key, value in weights_of(tmp_path / "one").items():
        torch.testing.assert_close(merged[key], value)


TOKENS = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 64}
BLOCKS = {"num_hidden_layers": 2, "intermediate_size": 24, "pad_token_id": 0}
SWIGLU = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "use_swiglu_ffn": True}
SWIGLU |= {"image_size": 16, "patch_size": 8}
FUSED = {
    "NomicBert": ("hf-encoder", TOKENS | BLOCKS),
    "Gte": ("hf-encoder", TOKENS | BLOCKS),
    "JinaEmbeddingsV3": ("hf-encoder", TOKENS | BLOCKS),
    "Dinov2": ("hf-vit", SWIGLU),
}
"""Families whose files fuse what the library has apart in memory."""


def fused(name: str, folder: Path, seed: int, **shards: Any) -> Any:
    """A model of one of these families, as its library saves it."""
    config = getattr(transformers, f"{name}Config")(**FUSED[name][1])
    model = with_seed(lambda: getattr(transformers, f"{name}Model")(config))().eval()
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    model.save_pretrained(folder, **shards)
    word_tokenizer("encoder").save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "4KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("name", few(FUSED, ["NomicBert", "Dinov2"]))
def test_what_files_fuse_and_the_library_has_apart_is_merged_and_saved_as_it_was(
    name: str, shards: dict[str, Any], tmp_path: Path
) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this transformers has no such model")
    fused(name, tmp_path / "base", 0, **shards)
    models = {seed: fused(name, tmp_path / f"expert-{seed}", seed) for seed in (1, 2)}
    stored = weights_of(tmp_path / "base")
    assert len(stored) < len(models[1].state_dict())
    # Another has the names of the model in memory, as training code writes them.
    save_file(dict(models[2].state_dict()), tmp_path / "expert-2" / "model.safetensors", {"format": "pt"})
    described = spec_of(tmp_path, "base", "expert-1", "expert-2")
    described["architecture"]["loader"] = FUSED[name][0]
    merge_experts(load_spec(described), "average", {}, tmp_path / "out", JobContext())
    merged, info = type(models[1]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and weights_of(tmp_path / "out").keys() == stored.keys()
    assert bool(list((tmp_path / "out").glob("*.index.json"))) == bool(shards)
    first, second = (model.state_dict() for model in models.values())
    for key, value in merged.state_dict().items():
        if "pooler" not in key and value.is_floating_point():  # which belongs to a head
            torch.testing.assert_close(value, (first[key] + second[key]) / 2)


_TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@pytest.mark.parametrize("names", [_TABLES[2:], _TABLES, _TABLES[:1]], ids=["decoder", "all", "shared"])
def test_a_table_of_t5_under_any_of_its_names_is_a_part_of_the_model(names: tuple[str, ...], tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "one")):
        model = flan_t5()
        with torch.no_grad():
            model.shared.weight += 0.1 * torch.randn(model.shared.weight.shape, generator=torch.manual_seed(seed))
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = load_file(file)
        table = weights.pop(_TABLES[0])
        save_file(weights | {key: table.clone() for key in names}, file, {"format": "pt"})
        word_tokenizer("encoder-decoder").save_pretrained(tmp_path / name)
    spec = spec_of(tmp_path, "base", "one")
    spec["architecture"]["loader"] = "hf-t5"
    told = [finding.text for finding in check_model_files(open_models(load_spec(spec)))]
    assert not [text for text in told if "embed_tokens" in text or "shared" in text]


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.text.", "")],
)
def test_a_decoder_may_be_named_as_part_of_a_model_of_images(body: str, head: str, root: Path) -> None:
    plain = weights_of(root / "one")
    named = {body + key.removeprefix("model.") if key != HEAD else head + key: x for key, x in plain.items()}
    tower = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "vision_tower.patch.weight": torch.ones(2)}
    save_file(named | tower, root / "one" / "model.safetensors", {"format": "pt"})
    spec = load_spec(spec_of(root, "base", "one"))
    if "language_model" not in body:
        with pytest.raises(IncompatibleModelsError, match="expected tensors"):
            open_models(spec)
        return
    models = open_models(spec)
    source = models.sources["expert:one"]
    assert source.headers.keys() == plain.keys()
    assert all(torch.equal(source.read(key), value) for key, value in plain.items())
    (told,) = [finding.text for finding in check_model_files(models) if "does not use" in finding.text]
    assert all(repr(key) in told for key in tower)
