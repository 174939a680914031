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

from driftlens.base.access import Context
from driftlens.base.errors import CheckpointError, IncompatibleModelsError
from driftlens.checkpoints.loading import open_checkpoint, with_floats
from driftlens.jobs.study.merging import merge_experts
from driftlens.jobs.study.opening import open_models
from driftlens.jobs.study.suspicion import companions
from driftlens.models.architecture import load_architecture
from driftlens.models.saving import save_model
from driftlens.spec import load_spec
from tests.zoo.decoders import CONFIGS, TINY, saved
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


def in_shards(folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder / "model.safetensors.index.json"


def test_a_tensor_that_the_index_alone_knows_is_named_and_nothing_else(root: Path) -> None:
    index = in_shards(root / "one")
    stated = json.loads(index.read_text())
    stated["weight_map"]["mtp.fc.weight"] = max(stated["weight_map"].values())
    index.write_text(json.dumps(stated))
    models = open_models(load_spec(spec_of(root, "base", "one", "two")))
    told = [finding.text for finding in companions(models)]
    assert len(told) == 1 and "'mtp.fc.weight', which no file holds" in told[0]
    stated["weight_map"] = {f"other.{key}": shard for key, shard in stated["weight_map"].items()}
    index.write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match="but it is not"):
        open_checkpoint(root / "one")


def test_a_tensor_that_is_needed_and_in_no_file_is_missed(root: Path) -> None:
    index = in_shards(root / "one")
    shard = index.parent / json.loads(index.read_text())["weight_map"][TABLE]
    kept = {key: value for key, value in load_file(shard).items() if key != TABLE}
    save_file(kept or {"x": torch.zeros(1)}, shard, {"format": "pt"})
    with pytest.raises(IncompatibleModelsError, match="embed_tokens"):
        merge_experts(load_spec(spec_of(root, "base", "one", "two")), "average", {}, root / "out", Context())
    assert not (root / "out").exists()


def test_of_a_file_and_shards_the_file_is_read_and_both_are_named(root: Path) -> None:
    in_shards(root / "one")
    shutil.copy(root / "two" / "model.safetensors", root / "one" / "model.safetensors")
    models = open_models(load_spec(spec_of(root, "base", "one")))
    (told,) = [finding.text for finding in companions(models)]
    assert "model.safetensors.index.json; model.safetensors is read" in told
    assert torch.equal(models.sources["expert:one"].read(TABLE), weights_of(root / "two")[TABLE])


@pytest.mark.parametrize("base", ["tied", "base"])
def test_a_tied_head_is_a_copy_of_the_embeddings_among_heads_apart(base: str, root: Path) -> None:
    """Of the base or of an expert; the folder that is saved has a head of its own, and says so."""
    experts = ("one", "two") if base == "tied" else ("one", "tied")
    spec = load_spec(spec_of(root, base, *experts))
    models = open_models(spec)
    (told,) = models.notices
    assert told.startswith(str(root / "tied")) and "its head is its embeddings" in told
    merge_experts(spec, "average", {}, root / "out", Context())
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(root / "out", output_loading_info=True)
    assert not any(info.values()) and merged.config.tie_word_embeddings is False
    heads = [weights.get(HEAD, weights[TABLE]) for weights in (weights_of(root / name) for name in experts)]
    torch.testing.assert_close(merged.lm_head.weight, sum(heads) / 2)
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)


def test_a_file_without_a_head_and_without_a_configuration_is_refused(root: Path) -> None:
    described = spec_of(root, "base", "one")
    described["experts"]["one"]["weights"] = str(root / "tied" / "model.safetensors")
    with pytest.raises(IncompatibleModelsError, match="says that its head is its embeddings"):
        open_models(load_spec(described))


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
    changed = {
        key for key, value in weights_of(root / "two").items() if not torch.equal(value, adapted.read(key))
    }
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


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize(
    ("base", "grown", "options"),
    [
        pytest.param("base", 30, {"modules_to_save": WHOLE}, id="vocabulary grown, trained whole"),
        pytest.param("base", 30, {}, id="vocabulary grown, not trained"),
        pytest.param("base", 0, {"target_modules": [*SOME, *WHOLE]}, id="adapters of embeddings"),
        pytest.param("base", 0, {"trainable_token_indices": [5, 2]}, id="rows"),
        pytest.param("tied", 0, {"trainable_token_indices": {"embed_tokens": [5, 2]}}, id="tied, rows"),
        pytest.param("tied", 30, {"modules_to_save": WHOLE}, id="tied, both trained"),
        pytest.param("tied", 0, {"modules_to_save": WHOLE[:1]}, id="tied, embeddings alone"),
        pytest.param("tied", 0, {"modules_to_save": WHOLE[1:]}, id="tied, head alone"),
        pytest.param("tied", 0, {"target_modules": [*SOME, WHOLE[0]]}, id="tied, adapters of embeddings"),
        pytest.param("tied", 0, {"target_modules": [*SOME, WHOLE[1]]}, id="tied, adapters of the head"),
        pytest.param(
            "tied", 0, {"modules_to_save": WHOLE[:1], "ensure_weight_tying": True}, id="tied, kept so"
        ),
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
        with pytest.raises(
            IncompatibleModelsError, match=r"has 70 rows, the base's 40.*'<\d+>'.* and \d+ more"
        ):
            open_models(load_spec(described))
        described["architecture"]["vocab"] = {"rows": "base"}
    expert = open_models(load_spec(described)).sources["expert:adapter"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(root / base).eval()
    if HEAD in expert.headers:
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.clone())
    plain.load_state_dict({key: expert.read(key) for key in expert.headers}, strict=HEAD in expert.headers)
    for key in (TABLE, *([HEAD] if HEAD in expert.headers else [])):
        assert torch.equal(expert.read(key, (1, 6)), expert.read(key)[1:6])
    questions = torch.tensor([[1, 5, 2, 9], [4, 4, 3, 39]])
    with torch.no_grad():
        torch.testing.assert_close(plain(questions).logits, adapted.eval()(questions).logits[..., :rows])


@pytest.mark.parametrize("tag", ["Infinity", "-Infinity"])
def test_infinite_numbers_of_a_configuration_are_numbers(tag: str) -> None:
    assert with_floats({"a": [{"__float__": tag}, 1], "b": {"c": 2}}) == {"a": [float(tag), 1], "b": {"c": 2}}
    assert with_floats({"__float__": "x"}) == {"__float__": "x"}


def test_a_model_whose_configuration_has_an_infinite_number_is_taken_apart(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 4}
    config = transformers.Mamba2Config(**sizes, vocab_size=TINY["vocab_size"], n_groups=1)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    if "__float__" not in json.dumps(stated):  # as transformers before 5.3 wrote it
        stated["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
        (tmp_path / "config.json").write_text(json.dumps(stated))
    known = load_architecture("hf-auto", str(tmp_path))
    assert len(known.chain.layers) == 2 + sizes["num_hidden_layers"]
    assert known.folder is not None and known.folder.configs["config.json"] == stated
