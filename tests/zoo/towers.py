"""Small CLIP towers and whole CLIPs with random weights in float64, as each library builds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.small import scrambled

VISION = {
    "image_size": 16,
    "patch_size": 4,
    "width": 32,
    "layers": 3,
    "heads": 4,
    "mlp_ratio": 2.0,
    "output_dim": 8,
}
HF_VISION = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "projection_dim": 8,
}
HF_TEXT = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
OPEN_CLIP_CONFIG: dict[str, Any] = {
    "embed_dim": 8,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "patch_size": 4, "width": 32, "layers": 3, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def open_clip_tower(**options: Any) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return scrambled(lambda: VisionTransformer(**{**VISION, **options})).double()


def open_clip_whole() -> nn.Module:
    import open_clip

    return scrambled(lambda: open_clip.CLIP(**OPEN_CLIP_CONFIG)).double()


def hf_tower(name: str = "CLIPVisionModelWithProjection", **options: Any) -> nn.Module:
    import transformers

    config = transformers.CLIPVisionConfig(**{**HF_VISION, **options})
    return scrambled(lambda: getattr(transformers, name)(config)).double()


def hf_whole(name: str = "CLIPModel") -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(text_config=HF_TEXT, vision_config=HF_VISION, projection_dim=8)
    return scrambled(lambda: getattr(transformers, name)(config)).double()


def pixels(height: int = 16, width: int = 16, n: int = 2) -> Tensor:
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tiny_tokenizer_files(folder: Path) -> int:
    """Write a CLIP tokenizer that knows lower-case letters and `at`; returns its number of tokens."""
    letters = [letter + end for end in ("", "</w>") for letter in "abcdefghijklmnopqrstuvwxyz."]
    vocabulary = [*letters, "at</w>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\na t</w>\n")
    return len(vocabulary)


def hf_folder(folder: Path) -> Path:
    """A whole CLIP of transformers with tokenizer, saved as its library saves it."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    vocab = tiny_tokenizer_files(folder)
    text = {**HF_TEXT, "vocab_size": vocab, "bos_token_id": vocab - 2, "eos_token_id": vocab - 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=HF_VISION, projection_dim=8)
    scrambled(lambda: transformers.CLIPModel(config)).save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder)
    return folder


def open_clip_folder(folder: Path) -> Path:
    """A whole CLIP of open_clip in a folder, as on the Hub."""
    import open_clip
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    preprocessing = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear"}
    config = {"model_cfg": OPEN_CLIP_CONFIG, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    module = scrambled(lambda: open_clip.CLIP(**OPEN_CLIP_CONFIG))
    save_file(module.state_dict(), folder / "open_clip_model.safetensors")
    return folder


def under_transformers_names(visual: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's image tower as `CLIPVisionModelWithProjection` names and stores it."""
    renamed = {
        "visual_projection.weight": visual["proj"].T,
        "vision_model.embeddings.class_embedding": visual["class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": visual["conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": visual["positional_embedding"],
    }
    for part in ("weight", "bias"):
        renamed[f"vision_model.pre_layrnorm.{part}"] = visual[f"ln_pre.{part}"]
        renamed[f"vision_model.post_layernorm.{part}"] = visual[f"ln_post.{part}"]
    num_blocks = len({key.split(".")[2] for key in visual if key.startswith("transformer.resblocks.")})
    for index in range(num_blocks):
        source, target = f"transformer.resblocks.{index}", f"vision_model.encoder.layers.{index}"
        for part in ("weight", "bias"):
            fused = visual[f"{source}.attn.in_proj_{part}"]
            for site, tensor in zip("qkv", fused.chunk(3), strict=True):
                renamed[f"{target}.self_attn.{site}_proj.{part}"] = tensor
            for ours, theirs in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                renamed[f"{target}.{ours}.{part}"] = visual[f"{source}.{theirs}.{part}"]
    return renamed
