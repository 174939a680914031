"""Vision-language models of transformers: a vision tower, what projects its features, and a decoder that reads them.

Where tasks are texts alone, the decoder is the chain, with the language-model head behind it, as `causal_chain` takes
it apart; tower and projector see nothing then, and no layer has their weights. A plain language model of the same
decoder is an expert, too: it is aligned by its keys, and what it lacks is the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.loading import with_floats
from driftlens.checkpoints.refusals import is_vision_language, wrong_family
from driftlens.checkpoints.sources import Composed, StateSource
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders, weightless
from driftlens.models.families.causal import causal_chain, not_causal
from driftlens.models.families.hf_auto import (
    PADDED,
    built,
    file_names,
    passed_over,
    read_plain_config,
    spellings,
    usage_of_texts,
)
from driftlens.models.families.sequential import block_list
from driftlens.models.families.vlm_chain import sighted_chain, tower_list
from driftlens.models.language.pictures import WordReader
from driftlens.models.preprocessing import (
    Preprocess,
    hf_picture_preprocess,
    hf_text_preprocess,
    processed_example,
)
from driftlens.models.saving import FolderFormat

_BLIND = "all samples are texts: the vision tower saw nothing and stays as merged, as does what projects its features"
_USAGE = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

folder = "."  # this one, or the model's id on the Hub
model, reader = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
inputs = reader(text="a question", return_tensors="pt")
answer = reader.decode(model.generate(**inputs, max_new_tokens=16)[0])
"""


@dataclass(frozen=True)
class DecoderOrWhole(Spellings):
    """Checkpoints of a whole vision-language model, or of a plain language model of the same decoder.

    `decoder` names the tensors that both have, as the plain one calls them, by the skeleton's keys.
    """

    decoder: Mapping[str, str] = field(default_factory=dict)

    def align(
        self, source: StateSource, wanted: Collection[str], fallback: StateSource | None
    ) -> StateSource:
        """See `Layout`; a language model gets what it has not from the base, `fallback`."""
        stored = self.key_map(source.headers, wanted, source.name)
        lacking = [key for key in wanted if key not in self.decoder]
        if any(key in stored for key in lacking):
            return super().align(source, wanted, fallback)
        aligned = super().align(source, self.decoder, fallback)
        if fallback is None:
            raise IncompatibleModelsError(
                f"{source.name} is a language model alone: it lacks {lacking[0]!r} and {len(lacking) - 1} more tensors "
                "of a vision tower; expected a whole vision-language model as base",
                hint="Give the vision-language model as base, and this one as an expert.",
            )
        places = {key: (aligned, key) for key in aligned.headers}
        return Composed(source.name, places | {key: (fallback, key) for key in lacking})


@loaders.register("hf-vlm")
def load_hf_vlm(request: ArchitectureRequest) -> Architecture:
    """The architecture of a vision-language model; its source is a folder or Hub id."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    source = request.source
    stated = read_plain_config(request, "hf-vlm")
    if not is_vision_language(stated):
        raise wrong_family(stated, source, "a vision-language model")
    if request.untied:
        stated = stated | {"tie_word_embeddings": False}
    config = CONFIG_MAPPING[stated["model_type"]].from_dict(with_floats(stated))
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    skeleton = weightless(partial(built, model_class, config), source)
    decoder = decoder_path(skeleton)
    preprocess = _preprocess(request, config)
    blocks, _ = block_list(skeleton.get_submodule(decoder), None)
    chain, lm = causal_chain(skeleton, PADDED, request.blocks or f"{decoder}.{blocks}")
    if preprocess is not None and request.pictured:
        example = processed_example(preprocess, config, source)
        chain = sighted_chain(skeleton, example, tower_list(skeleton), chain)
    names, ignored = file_names(skeleton), passed_over(skeleton)
    plain = plain_names(names, decoder, lm.head)
    return Architecture(
        loader="hf-vlm",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=DecoderOrWhole(
            [*spellings(names, skeleton), plain], ignored=ignored, is_lenient=True, decoder=plain
        ),
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors", {"config.json": stated}, usage=partial(usage_of_texts, _USAGE)
        ),
        lm=lm,
    )


def _preprocess(request: ArchitectureRequest, config: Any) -> Preprocess | None:
    """How samples become inputs; None where nobody reads any."""
    if request.unread:
        return None
    if request.pictured:
        return hf_picture_preprocess(request.source, config, request.access.offline)
    texts = hf_text_preprocess(request.source, config, request.access.offline, "decoder")
    assert texts.texts is not None
    reader = WordReader(**texts.texts.parts)
    notice = " ".join(filter(None, (texts.notice, _BLIND)))
    return replace(texts, transform=reader, texts=reader, notice=notice)


def decoder_path(whole: Any) -> str:
    """The path of a model's decoder, which reads embeddings of texts and features of images alike."""
    decoder = whole.get_decoder()
    path = next((name for name, part in whole.named_modules() if part is decoder), "")
    if not path or whole.get_output_embeddings() is None:
        raise not_causal(whole, "it has no decoder inside with a head behind it")
    return path


def plain_names(keys: Collection[str], decoder: str, head: str) -> dict[str, str]:
    """The tensors of a decoder and its head by their keys -> what a plain language model calls them."""
    before = f"{decoder}."
    names = {key: f"model.{key.removeprefix(before)}" for key in keys if key.startswith(before)}
    ending = head.rpartition(".")[0]
    return names | {
        key: f"lm_head.{key.removeprefix(f'{ending}.')}" for key in keys if key.startswith(f"{ending}.")
    }
