"""Vision-language models, made small by transformers itself, with questions about words or pictures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from tests.quick import paced
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import GEMMA3N, GEMMA4, LINEAR, SLIDING, TINY
from tests.zoo.suite import files_of, spec_of_folders
from tests.zoo.tokenizers import WORDS, word_tokenizer

TASKS = {"a": ("yes", "no"), "b": ("red", "green", "blue")}
IMAGE_TOKEN, _VIDEO, _START, _END = range(26, 30)
"""The token that stands for a piece of an image, and those around it."""
_NAMED = {
    **{"image_token": "<image>", "context_image_token": "<image>", "video_token": "<video>"},
    **dict.fromkeys(("boi_token", "vision_start_token", "start_image_token"), "<start>"),
    **dict.fromkeys(("eoi_token", "vision_end_token", "end_image_token"), "<end>"),
    "image_break_token": "<break>",
    **dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<break>"),
}
"""What processors call these tokens."""
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %} question : {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %} answer :"
)
_TOWER: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
_QWEN_IDS = {"video_token_id": _VIDEO, "vision_start_token_id": _START, "vision_end_token_id": _END}
_QWEN_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "depth": 3},
    **{"patch_size": 4, "spatial_merge_size": 2},
}


def _of(kind: str, tower: Any, text: Any, **settings: Any) -> Any:
    ids = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
    return transformers.AutoConfig.for_model(kind, vision_config=tower, text_config=text, **ids | settings)


def _text(kind: str, *without: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": kind, **{key: size for key, size in TINY.items() if key not in without}, **settings}


def _idefics(kind: str) -> Any:
    tower = {"model_type": f"{kind}_vision", **_TOWER}
    return _of(kind, tower, _text("llama"), scale_factor=2, pad_token_id=0, tie_word_embeddings=False)


VLMS = {
    "LLaVA": lambda: _of(
        "llava", {"model_type": "clip_vision_model", **_TOWER}, _text("llama"), tie_word_embeddings=False
    ),
    "Gemma 3 with images": lambda: _of(
        "gemma3",
        {"model_type": "siglip_vision_model", **_TOWER},
        _text("gemma3_text", **SLIDING),
        **{"boi_token_index": _START, "eoi_token_index": _END, "mm_tokens_per_image": 4},
    ),
    "Gemma 3n with images": lambda: _of(
        "gemma3n",
        {"architecture": "mobilenetv3_small_050", "hidden_size": 288, "vocab_size": 4, "vocab_offset": 32},
        _text("gemma3n_text", **GEMMA3N),
        audio_config={
            **{"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2},
            **{"sscp_conv_channel_size": (8, 4), "vocab_size": 4, "vocab_offset": 36},
        },
        **{"boi_token_id": _START, "eoi_token_id": _END, "vision_soft_tokens_per_image": 1},
    ),
    "Gemma 4 with images": lambda: _of(
        "gemma4",
        {
            **_TOWER | {"model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2},
            **{
                "num_hidden_layers": 1,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
                "standardize": True,
                "patch_size": 2,
            },
        },
        _text(
            *("gemma4_text", "max_position_embeddings"),
            **GEMMA4 | {"max_position_embeddings": 512, "num_kv_shared_layers": 2},
            use_bidirectional_attention="vision",
        ),
        **{"boi_token_id": _START, "eoi_token_id": _END, "video_token_id": _VIDEO, "audio_token_id": None},
    ),
    "Qwen2.5-VL": lambda: _of(
        "qwen2_5_vl",
        _QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        _text("qwen2_5_vl_text", "head_dim", rope_parameters=_MROPE),
        **_QWEN_IDS,
    ),
    "Qwen3-VL": lambda: _of(
        "qwen3_vl",
        _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        _text("qwen3_vl_text", rope_parameters=_MROPE),
        **_QWEN_IDS,
    ),
    "Qwen3-VL MoE": lambda: _of(
        "qwen3_vl_moe",
        _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        _text(
            "qwen3_vl_moe_text",
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            **{"mlp_only_layers": [], "rope_parameters": _MROPE},
        ),
        **_QWEN_IDS,
    ),
    "Qwen3.5 with images": lambda: _of(
        "qwen3_5",
        _QWEN_TOWER | {"num_position_embeddings": 16},
        _text("qwen3_5_text", **LINEAR, rope_parameters=_MROPE | {"partial_rotary_factor": 1.0}),
        **_QWEN_IDS,
    ),
    "InternVL 3": lambda: _of(
        "internvl",
        {"model_type": "internvl_vision", **_TOWER},
        _text("qwen2", "head_dim"),
        downsample_ratio=0.5,
    ),
    "Mistral 3": lambda: _of(
        "mistral3", {"model_type": "pixtral", "head_dim": 8, **_TOWER}, _text("mistral"), spatial_merge_size=2
    ),
    "SmolVLM": lambda: _idefics("smolvlm"),
    "Idefics 3": lambda: _idefics("idefics3"),
}
"""A configuration of each family."""


def vlms(*fast: str, only: Iterable[str] | None = None, some: Collection[str] | None = None) -> list[Any]:
    """Parameters of tests that show what works with each: all but `fast` ones slow, all but `some` `make every`'s."""
    names = VLMS if only is None else only
    return [pytest.param(name, id=name, marks=[pytest.mark.family(name), *paced(name, fast, some)]) for name in names]


def _qwen(kind: str) -> Any:
    images = transformers.Qwen2VLImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=256)
    videos = getattr(transformers, f"{kind.replace('2_5_', '2')}VideoProcessor")(patch_size=4, merge_size=2)
    return getattr(transformers, f"{kind}Processor")(
        images, _tokenizer(), videos, chat_template=_asking("<start><image><end>")
    )


def _tokenizer() -> Any:
    return word_tokenizer(extra_special_tokens=_NAMED)


def _asking(mark: str = "<image>") -> str:
    return _TEMPLATE.replace("MARK", mark)


_SQUARE = {"height": 8, "width": 8}
_SOFT = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}
PROCESSORS = {
    "LLaVA": lambda: transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=_SQUARE),
        _tokenizer(),
        **{"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        chat_template=_asking(),
    ),
    "Gemma 3 with images": lambda: transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size=_SQUARE),
        _tokenizer(),
        chat_template=_asking("<start>"),
        image_seq_length=4,
    ),
    "Gemma 4 with images": lambda: transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(**_SOFT, do_resize=False),
        _tokenizer(),
        transformers.Gemma4VideoProcessor(**_SOFT),
        chat_template=_asking(),
    ),
    "Qwen2.5-VL": lambda: _qwen("Qwen2_5_VL"),
    **dict.fromkeys(("Qwen3-VL", "Qwen3-VL MoE", "Qwen3.5 with images"), lambda: _qwen("Qwen3VL")),
    "InternVL 3": lambda: transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(size=_SQUARE),
        _tokenizer(),
        transformers.InternVLVideoProcessor(size=_SQUARE),
        chat_template=_asking(),
        image_seq_length=1,
    ),
    "Mistral 3": lambda: transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": 16}, patch_size={"height": 4, "width": 4}),
        _tokenizer(),
        **{"patch_size": 4, "spatial_merge_size": 2, "image_token": "<image>"},
        **{"image_break_token": "<break>", "image_end_token": "<end>"},
        chat_template=_asking(),
    ),
    "Idefics 3": lambda: transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 8}),
        _tokenizer(),
        chat_template=_asking(),
        image_seq_len=1,
    ),
    "SmolVLM": lambda: transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 8}),
        _tokenizer(),
        transformers.SmolVLMVideoProcessor(),
        chat_template=_asking(),
        image_seq_len=1,
    ),
}
"""A processor of each family but Gemma 3n, refused with images."""


def model_of(name: str) -> Any:
    """A model of a family with random weights."""
    return with_seed(lambda: transformers.AutoModelForImageTextToText.from_config(VLMS[name]()))()


def in_double(model: Any) -> Any:
    """A model as it is compared: in eval mode and float64, of which the library's fused experts know nothing."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval().double()


def saved_vlms(name: str, folder: Path) -> None:
    """A base and an expert for each task, near it."""
    base = perturbed(model_of(name), 0, 0.2)
    for at, part in enumerate(("base", *TASKS)):
        model = perturbed(base, at, 0.1) if at else base
        model.save_pretrained(folder / part)
        (PROCESSORS[name]() if name in PROCESSORS else _tokenizer()).save_pretrained(folder / part)


def picture_spec(folder: Path, *, several: bool = False, **more: Any) -> dict[str, Any]:
    """A spec of the models in a folder and questions about pictures of several shapes, whose files are written.

    With `several` each question is about the picture of the row before it, too, but the first one.
    """
    spec = text_spec(folder, **more)
    generator = np.random.default_rng(0)
    for task in TASKS:
        for split in ("train", "test"):
            file = folder / f"{task}-{split}.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()][:8]
            for at, row in enumerate(rows):
                row["picture"] = f"{task}-{split}-{at}.png"
                size = (12, (8, 24, 16)[at % 3], 3)
                pixels = generator.integers(0, 256, size=size, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / row["picture"])
            if several:
                files = [row["picture"] for row in rows]
                rows = [row | {"picture": files[max(at - 1, 0) : at + 1]} for at, row in enumerate(rows)]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec["data"][task] |= {"image": "picture", "chat": True}
    spec["data"]["defaults"] |= {"n": 8, "n_diagnosis": 4}
    return spec


def text_spec(folder: Path, **more: Any) -> dict[str, Any]:
    """A spec of the models in a folder and questions in words, whose files are written."""
    for first, (task, answers) in enumerate(TASKS.items()):
        questions = [" ".join(some) for some in itertools.permutations(WORDS[5 * first : 5 * first + 5], 3)]
        rows = [{"input": text, "target": answers[at % len(answers)]} for at, text in enumerate(questions)]
        for split, part in (("train", rows[::2]), ("test", rows[1::2])):
            (folder / f"{task}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = {task: files_of(folder, task, classes=True) for task in TASKS}
    data["defaults"] = {"n": 12, "n_diagnosis": 6, "batch_size": 4}
    experts = {task: folder / task for task in TASKS}
    return spec_of_folders("hf-vlm", folder / "base", experts, data, compute={"dtype": "float64"}) | more
