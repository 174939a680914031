"""Convert samples to the inputs of a model, images and texts, by the settings in its own files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from driftlens.checkpoints.loading import (
    fetch_config_folder,
    image_processor_config,
    load_tokenizer,
    read_config,
)
from driftlens.models.texts import UNLIMITED, Form, ImageTextProcessor, ImageTextSample, TextProcessor
from driftlens.utils.errors import DataError, IncompatibleModelsError, SpecError

if TYPE_CHECKING:
    from PIL.Image import Image

# Model types that number positions from the padding token's id + 1, so that their tables have fewer usable positions.
_OFFSET = ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")
# Another model's processor would not do: sizes of images and patches and the image token differ.
_PROCESSOR = "Put the base's processor_config.json, preprocessor_config.json and tokenizer next to its config.json."
_EXAMPLES = ("a word", "and a few more")
# Names, after `max_`, of the number of a decoder's positions in configurations; the first that is set counts.
_POSITIONS = ("target_positions", "position_embeddings")
# NaFlex processors keep the sizes of images, so their batches have a mask of patches.
PATCHES = "pixel_attention_mask"
_FILLERS = ("pad_token", "eos_token", "sep_token")


@dataclass(frozen=True)
class Preprocess:
    """A map from samples to a model's raw inputs.

    Images (PIL images of any mode, uint8 arrays [h, w, 3] or [h, w]) become pixels [n, 3, h, w], float32, normalized.

    `backend` names the code: backends differ by up to 0.015 per normalized pixel, so runs record it. `settings` are
    those in the model's files, and `texts` the reader of texts (None for images).
    """

    backend: str
    transform: Callable[[Sequence[Any]], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notice: str = ""
    texts: TextProcessor | None = None

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the raw inputs of a batch."""
        return self.transform(samples)

    def example(self) -> Any:
        """Return the raw inputs of two samples, for a trial pass."""
        # Two samples, because a batch of one hides errors with the batch axis.
        pictures = [np.zeros((64, 64, 3), dtype=np.uint8)] * 2
        if isinstance(self.texts, ImageTextProcessor):
            return self([ImageTextSample(text, images=(partial(_to_rgb_image, pictures[0]),)) for text in _EXAMPLES])
        return self(pictures if self.texts is None else [(text, "") for text in _EXAMPLES])


def hf_clip_preprocess(config: Mapping[str, Any] | None, image_size: tuple[int, int], source: str) -> Preprocess:
    """Return the preprocessing of a CLIP of transformers, with PIL.

    Args:
        config: the `preprocessor_config.json`; None uses CLIP's defaults, with a notice.
        image_size: height and width in pixels.
        source: the model's source, for messages.
    """
    import transformers

    default = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": min(image_size)},
        "crop_size": {"height": image_size[0], "width": image_size[1]},
    }
    stated = dict(default if config is None else config)
    kind = str(stated.get("image_processor_type") or stated.get("feature_extractor_type") or "CLIP")
    if not kind.startswith("CLIP"):
        raise IncompatibleModelsError(
            f"{source}: preprocessor_config.json is for {kind}, expected CLIPImageProcessor",
            hint="Use the preprocessor_config.json of the base CLIP.",
        )
    # PIL, because torchvision resizes to slightly different pixels. Before transformers 5, the plain class uses PIL.
    processor_class = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    notice = _default_preprocessing_notice(source, "preprocessor_config.json") if config is None else ""
    return _hf_processor_preprocess(processor_class.from_dict(stated), stated, notice)


def _hf_processor_preprocess(processor: Any, settings: Mapping[str, Any], notice: str) -> Preprocess:
    """Return preprocessing by an image processor of transformers."""

    def process_images(images: Sequence[Any]) -> Any:
        output = processor(images=[_to_rgb_image(image) for image in images], return_tensors="pt")
        # Processors of images of different sizes return patches, their mask and their layout.
        return dict(output) if PATCHES in output else output["pixel_values"]

    return Preprocess(f"transformers {type(processor).__name__}", process_images, settings, notice)


def hf_image_preprocess(source: str, config: Any, offline: bool) -> Preprocess:
    """Return the preprocessing of an image model of transformers, by its own processor with PIL.

    Args:
        source: a folder or Hub id. Without a `preprocessor_config.json`, the family's defaults are used, with a notice.
        config: the model's configuration, whose `image_size` the defaults need.
        offline: True to search only caches.
    """
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    is_new = int(transformers.__version__.split(".")[0]) >= 5
    plain: dict[str, Any] = {"backend": "pil"} if is_new else {"use_fast": False}
    notice = ""
    if image_processor_config(source, offline=offline) is not None:
        processor = transformers.AutoImageProcessor.from_pretrained(
            fetch_config_folder(source, offline=offline),
            local_files_only=True,
            trust_remote_code=False,
            **plain,
        )
    else:
        kinds = IMAGE_PROCESSOR_MAPPING.get(type(config), None) or ()
        kind = kinds.get("pil") if isinstance(kinds, dict) else next(filter(None, kinds), None)
        if kind is None:
            raise IncompatibleModelsError(
                f"{source} has no preprocessor_config.json, and transformers has no default",
                hint="Put the base's preprocessor_config.json next to its config.json.",
            )
        size = getattr(config, "image_size", 224)
        edge = size if isinstance(size, int) else min(size)
        # Processors accept a size in one of two forms; their default shows which.
        by_edge = "shortest_edge" in dict(kind().size)
        processor = kind(size={"shortest_edge": edge} if by_edge else {"height": edge, "width": edge})
        notice = f"{source} has no preprocessor_config.json: using the family's default preprocessing."
    return _hf_processor_preprocess(processor, processor.to_dict(), notice)


def fix_patch_order(preprocess: Preprocess, patch_size: int) -> Preprocess:
    """Keep a masked autoencoder's patches in image order, by ascending `noise` next to the pixels."""

    def pixels_and_patch_order(images: Sequence[Any]) -> Any:
        pixels = preprocess(images)
        count = pixels.shape[-2] // patch_size * (pixels.shape[-1] // patch_size)
        return {"pixel_values": pixels, "noise": torch.arange(count).repeat(len(pixels), 1)}

    return replace(preprocess, transform=pixels_and_patch_order)


def open_clip_preprocess(config: Mapping[str, Any] | None, image_size: tuple[int, int], source: str) -> Preprocess:
    """Return the preprocessing of a CLIP of open_clip.

    Args:
        config: its `preprocess_cfg`; None uses CLIP's defaults, with a notice.
        image_size: height and width in pixels.
        source: the model's source, for messages.
    """
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict
    from torchvision.transforms import Normalize, ToTensor

    stated = merge_preprocess_dict(PreprocessCfg(), dict(config or {}))
    stated["size"] = image_size
    transform = image_transform_v2(PreprocessCfg(**stated), is_train=False)
    notice = _default_preprocessing_notice(source, "preprocess_cfg") if config is None else ""
    *shape, to_tensor, normalise = transform.transforms
    assert isinstance(to_tensor, ToTensor) and isinstance(normalise, Normalize)

    def pixels_of_images(images: Sequence[Any]) -> Tensor:
        # Bit-identical to `to_tensor` and `normalise`, but for all images at once: ten times as fast for small ones.
        shaped = [functools.reduce(lambda image, step: step(image), shape, _to_rgb_image(image)) for image in images]
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in shaped])).permute(0, 3, 1, 2)
        return normalise(pixels.contiguous().to(torch.get_default_dtype()).div(255))

    return Preprocess("open_clip torchvision-PIL", pixels_of_images, stated, notice)


def image_preprocess(
    backend: str, transform: Callable[[Any], Tensor], settings: Mapping[str, Any] | None = None
) -> Preprocess:
    """Return the preprocessing by one image transform, as in torchvision and timm.

    Args:
        backend: name of the code.
        transform: PIL image in RGB -> tensor [3, h, w].
        settings: the settings of `transform`, for the manifest.
    """

    def stack_images(images: Sequence[Any]) -> Any:
        return torch.stack([torch.as_tensor(transform(_to_rgb_image(image))) for image in images])

    return Preprocess(backend, stack_images, settings or {})


def hf_text_preprocess(source: str, config: Any, offline: bool, form: Form) -> Preprocess:
    """Return the preprocessing of texts by the tokenizer next to a model's configuration."""
    code = (read_config(source, "tokenizer_config.json", offline=offline) or {}).get("auto_map")
    generation = read_config(source, "generation_config.json", offline=offline) or {}
    tokenizer = load_tokenizer(source, offline=offline)
    stated = read_config(source, "sentence_bert_config.json", offline=offline) or {}
    # sentence-transformers overrides the tokenizer's own limit.
    if tokenizer is not None and stated.get("max_seq_length"):
        tokenizer.model_max_length = stated["max_seq_length"]
    lowers = bool(stated.get("do_lower_case"))
    return text_preprocess(tokenizer, config, generation, form, source, code=code, lowers=lowers)


def hf_image_text_preprocess(source: str, config: Any, offline: bool) -> Preprocess:
    """Return the preprocessing of texts with images by the processor next to a model's configuration."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    texts = hf_text_preprocess(source, config, offline, "decoder")
    assert texts.texts is not None
    processor = AutoProcessor.from_pretrained(
        fetch_config_folder(source, offline=offline), local_files_only=True, trust_remote_code=False
    )
    if not hasattr(processor, "image_token") or getattr(processor, "image_processor", None) is None:
        raise IncompatibleModelsError(
            f"{source}: its processor is a {type(processor).__name__}; expected one for images and texts",
            hint=_PROCESSOR,
        )
    with_images = replace(texts.texts, takes_images=True, processor=processor)
    reader = ImageTextProcessor(**vars(with_images))
    # Rows are padded on the right, whatever the tokenizer's setting.
    processor.tokenizer.padding_side = "right"
    settings = {**texts.settings, "images": processor.image_processor.to_dict()}
    usual, name = PROCESSOR_MAPPING_NAMES.get(config.model_type), type(processor).__name__
    notice = f"the processor is a {name}; expected {usual} for {config.model_type} models"
    notice = "" if usual in (None, name) else notice
    return Preprocess(f"transformers {name}", reader, settings, notice, reader)


def image_text_example(preprocess: Preprocess, config: Any, source: str) -> Any:
    """Return the processor's output for an example with images; raise if it has no image token."""
    token, example = getattr(config, "image_token_id", None), preprocess.example()
    if token is not None and not (example["input_ids"] == token).any():
        raise IncompatibleModelsError(
            f"{source}: its processor writes no image token; the model expects {token}",
            hint=_PROCESSOR,
        )
    return example


def text_preprocess(
    tokenizer: Any,
    config: Any,
    generation: Mapping[str, Any],
    form: Form,
    source: str,
    *,
    code: Any = None,
    lowers: bool = False,
) -> Preprocess:
    """Return the preprocessing of texts by a tokenizer, which may get a pad token.

    Args:
        tokenizer: the tokenizer, or None, which is refused.
        config: the model's configuration.
        generation: the model's generation settings, which override the configuration.
        form: encoder, decoder or encoder-decoder.
        source: the model's source, for messages.
        code: code of the tokenizer's own, which is never run, for messages.
        lowers: True to read texts in lower case.
    """
    size = config.get_text_config().vocab_size
    filler = next((token for name in _FILLERS if (token := getattr(tokenizer, name, None)) is not None), None)
    # Without files, transformers 5 returns a tokenizer of special tokens alone instead of raising.
    if (
        tokenizer is None
        or not len(tokenizer("a few words")["input_ids"])
        or not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, "▁"}
        or len(tokenizer) > size
        or filler is None
    ):
        about_code = f" (its custom tokenizer code, {code}, is never run)" if code else ""
        raise SpecError(
            f"{source} has no tokenizer with a pad or end token that fits its {size} tokens" + about_code,
            hint="Put the base's tokenizer files next to its config.json.",
        )
    # Many decoders have no pad token. Any token will do, as padding is masked.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = filler
    sizes = (getattr(config.get_text_config(), f"max_{name}", None) for name in _POSITIONS)
    limit = next(filter(None, sizes), UNLIMITED)
    if config.model_type in _OFFSET:
        limit -= 1 + (config.pad_token_id or 0)
    # Generation settings override the configuration, as in the library's own `generate`.
    start = generation.get("decoder_start_token_id", getattr(config, "decoder_start_token_id", None))
    start = generation.get("bos_token_id", getattr(config, "bos_token_id", None)) if start is None else start
    if form == "encoder-decoder" and start is None:
        raise SpecError(
            f"{source} has no decoder start token",
            hint="Set decoder_start_token_id in its config.json (0 for T5).",
        )
    stated = tokenizer.model_max_length
    # Zero, a negative number or NaN would cut every text to nothing.
    if not stated >= 1:
        raise SpecError(f"{source}: model_max_length of its tokenizer is {stated!r}; expected 1 or more")
    ends = generation.get("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    named = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    reader = TextProcessor(
        tokenizer,
        form,
        int(min(stated, limit)),
        limit,
        start if form == "encoder-decoder" else None,
        _answer_opening_tokens(tokenizer, generation, start) if form == "encoder-decoder" else (),
        tuple(dict.fromkeys(token for token in named if token is not None)),
        lowers=lowers,
    )
    settings = {
        "tokenizer": reader.digest,
        "max_length": reader.max_length,
        "too_long": reader.truncation_rule,
        "padding": "right",
        "packing": "none",
    }
    return Preprocess(f"transformers {type(tokenizer).__name__}", reader, settings, texts=reader)


def _answer_opening_tokens(tokenizer: Any, generation: Mapping[str, Any], start: int | None) -> tuple[int, ...]:
    """Return the tokens between a decoder's start token and its answer: a forced one, or the tokenizer's."""
    if (forced := generation.get("forced_bos_token_id")) is not None:
        return (forced,)
    bare, whole = (tokenizer(text_target="a", add_special_tokens=special)["input_ids"] for special in (False, True))
    # The start token is added by the model, also where the tokenizer writes it.
    count = next((place for place in range(len(whole)) if whole[place : place + len(bare)] == bare), 0)
    return tuple(token for token in whole[:count] if token != start)


def _default_preprocessing_notice(source: str, part: str) -> str:
    return f"{source} has no {part}: using CLIP's default preprocessing."


def _to_rgb_image(image: Image | np.ndarray[Any, Any]) -> Image:
    from PIL import Image as images

    if isinstance(image, images.Image):
        return image.convert("RGB")
    array = np.asarray(image)
    # Pillow would misread channels before space, and would cut floats in [0, 1] to black.
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
        raise DataError(
            f"an image is {array.dtype} {list(array.shape)}; expected uint8 [height, width, 3] or [height, width]",
            hint="Convert it to uint8, channels last.",
        )
    return images.fromarray(array).convert("RGB")
