"""Decoder-only language models of transformers: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 and their kin.

The skeleton is the whole model, so that its language-model head is merged and saved with it; the chain ends in the
final norm, whose output at the last token of a question decides the answer's first token. Blocks run as the library's
own, with the masks and rotary tables that the library gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.refusals import running
from driftlens.checkpoints.saving import FolderFormat
from driftlens.models.architecture import (
    Architecture,
    ArchitectureRequest,
    loaders,
    weightless,
)
from driftlens.models.chain import TEXT, LayerChain
from driftlens.models.families.hf_auto import built, file_names, read_plain_config, spellings, usage_of_texts
from driftlens.models.families.sequential import sequential_chain
from driftlens.models.language.vocabularies import HEAD
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.score_maps import LmScores

_USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one, or the model's id on the Hub
model, reader = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = reader("a question", return_tensors="pt")
features = model(**inputs, output_hidden_states=True).hidden_states[-1]
answer = reader.decode(model.generate(**inputs, max_new_tokens=16)[0])
"""
_BUFFERS = (r"rotary_emb\.inv_freq$", r"\.attn\.bias$", r"\.masked_bias$")
"""What old checkpoints hold beside weights."""


@loaders.register("hf-decoder")
def load_hf_decoder(request: ArchitectureRequest) -> Architecture:
    """The architecture of a decoder-only language model."""
    source, offline = request.source, request.access.offline
    stated = read_plain_config(request, "hf-decoder")
    config, model_class = _class_of(stated)
    skeleton = weightless(partial(built, model_class, config), source)
    preprocess = hf_text_preprocess(source, config, offline, "decoder")
    with running(source):
        chain = decoder_chain(skeleton, dict(preprocess.example()))
    ignored = (*(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()), *_BUFFERS)
    names = file_names(skeleton)
    return Architecture(
        loader="hf-decoder",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=Spellings(spellings(names, skeleton), ignored=ignored),
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors", {"config.json": stated}, usage=partial(usage_of_texts, _USAGE)
        ),
        lm=LmScores.of(config, chain.tied),
    )


def decoder_chain(skeleton: Any, example: Any) -> LayerChain:
    """A causal language model taken apart; its final feature leaves the final norm.

    Args:
        skeleton: the library's own module; its parameters may be on meta.
        example: a small batch of its raw inputs.
    """
    core = skeleton.base_model_prefix
    chain = sequential_chain(skeleton, example, blocks=f"{core}.layers", final=f"{core}.norm")
    stem, *rest = chain.layers
    both = (next(iter(stem.parameters)), HEAD)
    is_tied = getattr(skeleton.config.get_text_config(), "tie_word_embeddings", False)
    return replace(
        chain,
        architecture=f"hf_{skeleton.config.model_type}",
        layers=(replace(stem, path=f"{core}.embed_tokens"), *rest),
        tied=dict.fromkeys(both, both) if is_tied else {},
        modality=replace(TEXT, pool="last"),
        settings={**chain.settings, "model": type(skeleton).__name__},
    )


def _class_of(stated: Mapping[str, Any]) -> tuple[Any, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[stated["model_type"]].from_dict(dict(stated))
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
