"""Adapters of a whole change: what peft and DriftLens load from them is the model, and what can't be one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource
from driftlens.linalg.ridge import low_rank_factors
from driftlens.models.adapters import check_adapter, write_adapter
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.utils.errors import CheckpointError, RunError, SpecError
from tests.refusing import refusing
from tests.zoo import encoders, seq2seq
from tests.zoo.decoders import CONFIGS, MIXTURES, saved
from tests.zoo.saved_families import FAMILIES, save, trained
from tests.zoo.towers import hf_folder, open_clip_folder

# peft 0.21 asks transformers 5 for an attribute that this has renamed.
# It also warns of merging a T5 whose configuration says that its head is tied, as every T5's does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings=True.:UserWarning"),
]
EVERYTHING = 1 << 20


def decoder(folder: Path, name: str = "Llama") -> Path:
    saved((CONFIGS | MIXTURES)[name], folder)
    return folder


def image_classifier(folder: Path, name: str = "ViT") -> Path:
    folder.mkdir()
    return save(FAMILIES[name], trained(FAMILIES[name], 3, 1), folder)


def bert(folder: Path) -> Path:
    folder.mkdir()
    encoders.save(encoders.encoder("BERT"), folder)
    return folder


def t5(folder: Path) -> Path:
    folder.mkdir()
    seq2seq.save(seq2seq.model("T5"), folder)
    return folder


BASES: dict[str, tuple[str, str, Callable[[Path], Path]]] = {
    "tied head": ("hf-decoder", "AutoModelForCausalLM", decoder),
    "head of its own": ("hf-decoder", "AutoModelForCausalLM", lambda folder: decoder(folder, "Llama, untied")),
    "Conv1D": ("hf-decoder", "AutoModelForCausalLM", lambda folder: decoder(folder, "GPT-2")),
    "tied tables": ("hf-seq2seq", "AutoModelForSeq2SeqLM", t5),
    "core of a classifier": ("hf-encoder", "AutoModel", bert),
    "bare parameters": ("hf-vit", "AutoModelForImageClassification", image_classifier),
    "a tower": ("hf-clip", "CLIPModel", hf_folder),
}


def moved(base: StateSource, scale: float = 0.1) -> StateSource:
    """The base with noise on every tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {key: base.read(key) for key in base.headers}
    return InMemorySource(
        "model",
        {key: value + scale * torch.randn(value.shape, generator=generator) for key, value in tensors.items()},
    )


def written(architecture: Architecture, base: Path, out: Path, rank: int = EVERYTHING) -> tuple[StateSource, Any]:
    """The moved model, whose adapters are in `out`, and what is recorded of them."""
    start = architecture.align(open_checkpoint(base))
    model = moved(start)
    check_adapter(architecture, start, model, out)
    out.mkdir()
    return model, write_adapter(architecture, start, model, out, rank, str(base))


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "kind", "build"), BASES.values(), ids=BASES)
def test_at_full_rank_peft_and_driftlens_read_the_model(
    loader: str, kind: str, build: Callable[[Path], Path], tmp_path: Path
) -> None:
    import transformers
    from peft import PeftConfig, PeftModel

    base, out = build(tmp_path / "base"), tmp_path / "adapter"
    architecture = load_architecture(loader, str(base))
    model, record = written(architecture, base, out)
    assert record["kept"] == pytest.approx(1) and {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert PeftConfig.from_pretrained(out).base_model_name_or_path == str(base)
    library = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(library, out).merge_and_unload().state_dict()
    plain = {key.removeprefix("bert."): key for key in architecture.chain.parameter_keys()}
    names = merged if loader == "hf-encoder" else plain.values()
    read = LoraSource(architecture.align(open_checkpoint(base)), out)
    LoraSource(architecture.lora_base(open_checkpoint(base), str(out)), out).require_complete(architecture.skeleton)
    compared = 0
    for name in names:
        key = plain.get(name, name)
        if key not in model.headers:
            continue
        for source in (read.read(key), merged[name]):
            torch.testing.assert_close(source, model.read(key), rtol=0, atol=1e-6)
        for copy in architecture.chain.tied.get(key, ()):
            torch.testing.assert_close(merged[copy], model.read(key), rtol=0, atol=1e-6)
        compared += 1
    assert compared >= len(architecture.chain.parameter_keys())


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_the_change_is_cut_at_the_rank_and_small_modules_at_their_own(name: str, tmp_path: Path) -> None:
    """By numpy's SVD of every weight; keys and values of this Llama have 8 rows."""
    rank = 10
    base, out = decoder(tmp_path / "base", name), tmp_path / "adapter"
    architecture = load_architecture("hf-decoder", str(base))
    model, record = written(architecture, base, out, rank)
    start = architecture.align(open_checkpoint(base))
    read, config = LoraSource(start, out), json.loads((out / "adapter_config.json").read_text())
    kept = change = 0.0
    for path in config["target_modules"]:
        key = f"{path}.weight"
        step = (model.read(key).double() - start.read(key).double()).numpy()
        left, sizes, right = np.linalg.svd(step, full_matrices=False)
        best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        np.testing.assert_allclose(read.read(key).double() - start.read(key).double(), best, atol=1e-6)
        assert config["rank_pattern"].get(path, rank) == config["alpha_pattern"].get(path, rank)
        assert config["rank_pattern"].get(path, rank) == min(rank, *step.shape)
        kept, change = kept + float((sizes[:rank] ** 2).sum()), change + float((sizes**2).sum())
    assert len(config["target_modules"]) == record["low_rank"] and config["lora_alpha"] == config["r"] == rank
    assert bool(config["rank_pattern"]) == (name == "Llama")
    assert record["kept"] == pytest.approx(kept / change, abs=1e-6) and 0.5 < record["kept"] < 0.999
    assert record["bytes"] == (out / "adapter_model.safetensors").stat().st_size


def test_only_what_changed_is_saved(tmp_path: Path) -> None:
    base, out = decoder(tmp_path / "base"), tmp_path / "adapter"
    architecture = load_architecture("hf-decoder", str(base))
    start = architecture.align(open_checkpoint(base))
    key = "model.layers.1.mlp.up_proj.weight"
    tensors = {name: start.read(name) for name in start.headers}
    out.mkdir()
    # In bfloat16, as with --out-dtype: rounding alone changes nothing.
    changed = {name: value.bfloat16() for name, value in (tensors | {key: 2 * tensors[key]}).items()}
    write_adapter(architecture, start, InMemorySource("model", changed), out, 4, "org/base@main")
    names = load_file(out / "adapter_model.safetensors")
    assert {name.partition(".lora_")[0] for name in names} == {"base_model.model.model.layers.1.mlp.up_proj"}
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", "main")
    assert config["modules_to_save"] is None and config["bias"] == "none" and not config["ensure_weight_tying"]


REFUSED: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "packed attention": ("open-clip", open_clip_folder, "class_embedding"),
    "experts in one tensor": ("hf-decoder", lambda folder: decoder(folder, "Mixtral"), "experts"),
    "scales of a block": ("hf-auto", lambda folder: image_classifier(folder, "ConvNeXt"), "layer_scale"),
    "no linear modules": ("hf-auto", lambda folder: image_classifier(folder, "ResNet"), "no linear module"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "build", "words"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_an_adapter_is_refused_before_anything_is_written(
    loader: str, build: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    base = build(tmp_path / "base")
    blocks = (
        FAMILIES[family].blocks
        if (family := {"layer_scale": "ConvNeXt", "no linear module": "ResNet"}.get(words))
        else None
    )
    architecture = load_architecture(loader, str(base), blocks=blocks)
    with refusing(SpecError, words, hint="--save-weights"):
        written(architecture, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wrong_place_or_base_is_refused(tmp_path: Path) -> None:
    base, out = decoder(tmp_path / "base"), tmp_path / "adapter"
    architecture = load_architecture("hf-decoder", str(base))
    start = architecture.align(open_checkpoint(base))
    with refusing(SpecError, "the run has none"):
        check_adapter(architecture, None, moved(start), out)
    with refusing(SpecError, "as a folder"):
        check_adapter(architecture, start, moved(start), tmp_path / "adapter.safetensors")
    written(architecture, base, out, 2)
    with refusing(RunError, "exists already"):
        check_adapter(architecture, start, moved(start), out)
    # Of another width, so that no weight fits.
    other = load_architecture("hf-decoder", str(decoder(tmp_path / "other", "GPT-2")))
    with refusing(CheckpointError, "nor a weight", hint=str(base)):
        LoraSource(other.align(open_checkpoint(tmp_path / "other")), out)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_factors_of_full_rank_are_exact_and_others_the_best(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()
    sizes = torch.linalg.svdvals(matrix)
    for rank in range(1, min(shape) + 1):
        up, down = low_rank_factors(matrix, rank)
        assert up.shape == (shape[0], rank) and down.shape == (rank, shape[1])
        error = (matrix - up @ down).square().sum()
        torch.testing.assert_close(error, sizes[rank:].square().sum(), rtol=1e-9, atol=1e-20)
