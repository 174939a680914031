"""What people bring to a loader that can't take it: refused from configuration or keys, with the way that works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import driftlens as dl
from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.models.architecture import load_architecture
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DriftLensError, IncompatibleModelsError
from tests.models.live import architecture_of
from tests.refusing import refusing
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.small import small
from tests.zoo.towers import HF_VISION, hf_tower, open_clip_folder, open_clip_tower

MODELS = {
    "llm": ("LlamaForCausalLM", "a llama model (LlamaForCausalLM)", "a language model", "hf-decoder"),
    "mixture": (
        "MixtralForCausalLM",
        "a mixtral model (MixtralForCausalLM), a mixture of 8 experts",
        "a mixture of experts",
        "hf-decoder",
    ),
    "bert": ("BertModel", "a bert model (BertModel)", "an encoder", "hf-encoder"),
    "gpt2": ("GPT2LMHeadModel", "a gpt2 model", "GPT-2", "hf-decoder"),
    "vit": ("ViTForImageClassification", "a vit model", "a ViT", "hf-vit"),
    "dinov2": ("Dinov2Model", "a dinov2 model", "a ViT", "hf-vit"),
    "siglip": ("SiglipVisionModel", "a siglip_vision_model", "SigLIP", "hf-vit"),
}


@pytest.mark.parametrize(("name", "from_config", "from_keys", "loader"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ours", ["hf-clip", "open-clip"])
def test_models_of_transformers_are_sent_to_their_loader(
    tmp_path: Path, name: str, from_config: str, from_keys: str, loader: str, ours: str
) -> None:
    """Also where there is nothing but the configuration: no weight is read for it."""
    with torch.device("meta"):
        model = small(name)
    model.config.architectures = [name]
    model.config.save_pretrained(tmp_path)
    with refusing(IncompatibleModelsError, from_config, str(tmp_path), hint=loader, code=4):
        load_architecture(ours, str(tmp_path), access=Permissions(offline=True))
    tower = architecture_of(hf_tower() if ours == "hf-clip" else open_clip_tower())
    weights = {key: torch.ones(1) for key in model.state_dict()}
    with refusing(IncompatibleModelsError, "expert.safetensors", from_keys, hint=loader):
        tower.align(InMemorySource("expert.safetensors", weights))


MIXTURE = {"model_type": "mixtral", "num_local_experts": 8}
OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}, "architectures": ["Mine"]}
SENT_ON: list[tuple[str, dict[str, Any], str, str]] = [
    ("hf-vit", MIXTURE, "mixture", "hf-decoder"),
    ("hf-vit", {"model_type": "clip"}, "clip", "hf-clip"),
    ("hf-vit", {"model_type": "bert"}, "bert", "hf-encoder"),
    ("hf-vit", {"model_type": "llama"}, "llama", "hf-decoder"),
    (
        "hf-vit",
        {"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]},
        "two classifiers",
        "",
    ),
    ("hf-auto", {"model_type": "clip"}, "expected an encoder", "hf-clip"),
    ("hf-auto", {"model_type": "nothing"}, "nothing", ""),
    ("hf-auto", {"model_type": "vit", "auto_map": {"AutoModel": "x.Y"}}, "auto_map", ""),
    ("hf-auto", {"model_type": "vit", "quantization_config": {"quant_method": "gptq"}}, "gptq", ""),
    ("timm", MIXTURE, "config.json of timm", "hf-decoder"),
    ("timm", {"model_type": "clip"}, "config.json of timm", "hf-clip"),
    ("timm", {"model_type": "bert"}, "config.json of timm", "hf-encoder"),
    ("timm", {"model_type": "vit"}, "config.json of timm", "hf-vit"),
    ("hf-auto", {"model_type": "t5"}, "is a t5 model", "hf-t5"),
    ("hf-t5", {"model_type": "bart", "is_encoder_decoder": True}, "is a bart model", "hf-seq2seq"),
    ("hf-t5", {"model_type": "umt5", "is_encoder_decoder": True}, "is a umt5 model", "hf-seq2seq"),
    ("hf-t5", {"model_type": "bert"}, "is a bert model", "hf-encoder"),
    ("hf-encoder", {"model_type": "electra"}, "is a electra model", "hf-auto"),
    ("hf-encoder", {"model_type": "vit"}, "is a vit model", "hf-vit"),
    ("hf-encoder", {"model_type": "llama"}, "is a llama model", "hf-decoder"),
    ("hf-encoder", {"model_type": "t5"}, "is a t5 model", "hf-t5"),
    ("hf-encoder", {"model_type": "clip"}, "is a clip model", "hf-clip"),
    (
        "hf-encoder",
        {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
        "a bert model",
        "live modules",
    ),
    ("hf-decoder", {"model_type": "t5"}, "a t5 model", ""),
    ("hf-decoder", {"model_type": "gemma3"}, "gemma3", ""),
    ("hf-decoder", {"model_type": "bert"}, "bert", ""),
    ("hf-decoder", {"model_type": "llama", **OWN_CODE}, "mine.Mine", ""),
]


@pytest.mark.parametrize(("loader", "config", "words", "hint"), SENT_ON)
def test_the_other_loaders_send_models_on_too_before_any_weight_is_read(
    tmp_path: Path, loader: str, config: dict[str, Any], words: str, hint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IncompatibleModelsError) as refusal:
        load_architecture(loader, str(tmp_path))
    assert words in str(refusal.value) and hint in refusal.value.hint and refusal.value.hint
    assert refusal.value.exit_code == 4


def timm_folder(folder: Path) -> None:
    import timm
    from timm.models import save_for_hf

    options = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
    save_for_hf(timm.create_model("vit_tiny_patch16_224", **options), folder, safe_serialization=True)


def remote_code(folder: Path, **more: Any) -> None:
    """A folder as those on the Hub that bring their model along."""
    (folder / "modeling_own.py").write_text(f"open({str(folder / 'canary')!r}, 'w')")
    stated = {
        "model_type": "clip_vision_model",
        **HF_VISION,
        "auto_map": {"AutoModel": "modeling_own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps({**stated, **more}))


def quantised(folder: Path) -> None:
    from transformers import BitsAndBytesConfig, CLIPVisionConfig

    settings = BitsAndBytesConfig(load_in_8bit=True).to_dict()
    CLIPVisionConfig(**HF_VISION, quantization_config=settings).save_pretrained(folder)


def gguf(folder: Path) -> None:
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


FOLDERS: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "timm_to_transformers": ("hf-clip", timm_folder, "a timm model (vit_tiny_patch16_224)", "timm"),
    "timm_to_open_clip": ("open-clip", timm_folder, "a timm model (vit_tiny_patch16_224)", "timm"),
    "open_clip_to_transformers": ("hf-clip", open_clip_folder, "an open_clip model", "open-clip"),
    "unknown_architecture": (
        "hf-clip",
        lambda folder: remote_code(folder, architectures=["OwnModel"]),
        "remote code, which is not run (auto_map: modeling_own.OwnModel)",
        "python:module:function",
    ),
    "unknown_type": (
        "hf-clip",
        lambda folder: remote_code(folder, model_type="own"),
        "remote code, which is not run (auto_map: modeling_own.OwnModel)",
        "python:module:function",
    ),
    "gguf_to_transformers": (
        "hf-clip",
        gguf,
        "model-Q4_K_M.gguf: expected a file of type",
        "GgufConfig(dequantize=True)",
    ),
    "gguf_to_open_clip": (
        "open-clip",
        gguf,
        "model-Q4_K_M.gguf: expected a file of type",
        "GgufConfig(dequantize=True)",
    ),
    "quantised": ("hf-clip", quantised, "quantised weights (bitsandbytes)", "dequantize"),
}


@pytest.mark.parametrize(("loader", "prepare", "words", "remedy"), FOLDERS.values(), ids=FOLDERS)
def test_folders_of_other_kinds_are_refused_with_what_works(
    tmp_path: Path, loader: str, prepare: Callable[[Path], object], words: str, remedy: str
) -> None:
    prepare(tmp_path)
    with refusing(DriftLensError, words, hint=remedy, code=4):
        load_architecture(loader, str(tmp_path), access=Permissions(offline=True))
    assert not (tmp_path / "canary").exists()


def test_code_beside_a_model_that_the_library_has_is_not_needed(tmp_path: Path) -> None:
    remote_code(tmp_path, architectures=["CLIPVisionModel"])
    assert load_architecture("hf-clip", str(tmp_path)).adapter == "hf_clip_vit"
    assert not (tmp_path / "canary").exists()


def eva() -> nn.Module:
    from open_clip.timm_model import TimmModel

    return TimmModel("eva02_tiny_patch14_224", embed_dim=8, image_size=224)


def coca() -> nn.Module:
    return open_clip_tower(attentional_pool=True, attn_pooler_heads=4).float()


def resnet() -> nn.Module:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet([3, 1, 1, 1], output_dim=8, heads=4, image_size=32, width=8)


@pytest.mark.slow
@pytest.mark.shows("live", "drift", "sites", reloads="as a state dict")
@pytest.mark.parametrize(
    ("build", "size"),
    [
        pytest.param(eva, 224, id="EVA", marks=[pytest.mark.family("EVA (open_clip)"), pytest.mark.every]),
        pytest.param(coca, 16, id="CoCa", marks=pytest.mark.family("CoCa (open_clip)")),
        pytest.param(resnet, 32, id="ResNet", marks=[pytest.mark.family("ResNet (open_clip)"), pytest.mark.slow]),
    ],
)
def test_the_way_that_refusals_name_works(build: Callable[[], nn.Module], size: int, tmp_path: Path) -> None:
    """As live modules such towers are measured, calibrated and saved: the drift is that of their own forward passes."""
    base = perturbed(with_seed(build)().eval(), 0, 0.05)
    merged, expert = (perturbed(base, seed, 0.05) for seed in (1, 2))
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    given = {"base": base, "merged": merged, "experts": {"task": expert}, "data": {"task": images}}
    run = dl.analyze(**given, out=tmp_path / "run", jacobian=None, progress="none")
    run = run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "out.safetensors")
    assert run.layers()["closure_error"].max() < 1e-4
    calibrated = with_seed(build)().eval()
    calibrated.load_state_dict(load_file(tmp_path / "out.safetensors"))
    drift = run.layers(layer="final").set_index("variant")["drift_l2_mean"]
    with torch.no_grad():
        for variant, module in {"merged": merged, "calibrated:featcal": calibrated}.items():
            apart = (module(images) - expert(images)).norm(dim=1).mean()
            assert drift[variant] == pytest.approx(apart.item(), rel=1e-3)
    assert drift["merged"] != pytest.approx(drift["calibrated:featcal"], rel=1e-3)
