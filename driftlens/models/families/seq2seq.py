"""Encoder-decoders of transformers, taken apart by what runs in them: no family is known by its name.

Both stacks are one chain, see `seq2seq_stacks`. Scores are made of what leaves it by the language-model head, which
belongs to no layer; what is done to the head's scores is seen by running the library's own forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.loading import with_floats
from driftlens.checkpoints.refusals import LIVE, is_seq2seq, wrong_family
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders, weightless
from driftlens.models.chain import TEXT, LayerChain, adapters
from driftlens.models.families.causal import Behind, slope
from driftlens.models.families.hf_auto import (
    built,
    file_names,
    passed_over,
    read_plain_config,
    usage_of_texts,
)
from driftlens.models.families.seq2seq_stacks import Pair
from driftlens.models.families.vit import scrambled
from driftlens.models.heads import LmScores
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.saving import FolderFormat
from driftlens.models.taking_apart.dissection import own_weights

NAME = "seq2seq"


def seq2seq_chain(whole: Any, example: Mapping[str, Tensor]) -> tuple[LayerChain, LmScores | None]:
    """An encoder-decoder, perhaps with shapes only, taken apart, and what its head, if any, makes of final features.

    Args:
        whole: the library's model.
        example: a batch as its processor makes it.

    Raises:
        IncompatibleModelsError: it can't be taken apart so that this is its library's forward pass.
    """
    if any(name.endswith("experts") for name, _ in whole.named_modules()):
        raise not_seq2seq(whole, "its blocks mix experts")
    parts = Pair(whole, example)
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    return parts.chain(), None if head is None else _Scores(whole, parts, head).traced()


def not_seq2seq(whole: Any, reason: str) -> IncompatibleModelsError:
    """The refusal of an encoder-decoder that can't be taken apart, by the name of its kind."""
    kind = f"a {whole.config.model_type} model ({type(whole).__name__})"
    return IncompatibleModelsError(f"{kind} can't be taken apart as an encoder-decoder: {reason}", hint=LIVE)


@dataclass(eq=False)
class _Scores:
    """What a model does between the finished features of its decoder and its scores, seen without its stacks."""

    whole: Any
    parts: Pair
    head: Any
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def traced(self) -> LmScores:
        """Return the head, its scale and bias, and what else is done; raise where that maps no score on its own."""
        if getattr(type(self.head), "forward", None) is not nn.Linear.forward:
            raise not_seq2seq(self.whole, f"its head is a {type(self.head).__name__}; expected a linear map")
        place = next(path for path, module in self.whole.named_modules() if module is self.head)
        cores = tuple((self.whole.get_submodule(stack.path), stack.answer) for stack in self.parts.stacks)
        behind = Behind(self.whole, cores, self.head, (self.parts.reads, "decoder_input_ids"))
        features, outputs = self._random(self.head.in_features), self._random(self.head.out_features)
        inputs: list[Tensor] = []

        def score(entered: Tensor) -> Tensor:
            inputs.append(entered)
            return outputs

        scores = behind.scores(features, score)
        scale = float((inputs[0] / features).median())
        if not torch.allclose(inputs[0], features * scale, rtol=1e-12, atol=0):
            raise not_seq2seq(
                self.whole, "what its head reads is not what leaves its decoder, times a number"
            )
        bias = "" if self.head.bias is None else f"{place}.bias"
        for key, value in self._outer_weights(place).items():
            shift = self._random(value.numel())[0]
            shifted = behind.scores(features, score, {key: shift.reshape(value.shape)})
            if torch.equal(shifted, scores):
                continue
            if bias or value.numel() != self.head.out_features or not torch.equal(shifted, outputs + shift):
                raise not_seq2seq(self.whole, f"its scores depend on {key!r}, which is no bias of its head")
            bias, scores = key, outputs
        key = self.parts.tied.get(f"{place}.weight", (f"{place}.weight",))[0]
        lm = LmScores(key=key, head=f"{place}.weight", bias=bias, scale=scale)
        if torch.equal(scores, outputs):
            return lm
        for part in (slice(None), slice(1, 4)):
            if not torch.equal(behind(outputs[:, 0, part]), scores[:, 0, part]):
                raise not_seq2seq(self.whole, "its scores are not made of its head's output, one by one")
        return replace(lm, behind=behind, slope=slope(behind, self.head.out_features))

    def _random(self, width: int) -> Tensor:
        return torch.randn(2, 1, width, generator=self.numbers, dtype=torch.float64)

    def _outer_weights(self, place: str) -> dict[str, Tensor]:
        """Weights outside the stacks and the head, which lies at `place`."""
        inside = tuple(f"{path}." for path in (*(stack.path for stack in self.parts.stacks), place))
        return {
            key: value
            for key, value in own_weights(self.whole).items()
            if not key.startswith(inside) and key not in self.parts.tied
        }


class HfSeq2Seq:
    """An encoder-decoder of transformers, taken apart."""

    name = NAME

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` says of itself that it is an encoder and a decoder, both modules of its own."""
        return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False)) and all(
            isinstance(getattr(module, f"get_{stack}", lambda: None)(), nn.Module)
            for stack in ("encoder", "decoder")
        )

    def chain(self, module: nn.Module) -> LayerChain:
        """The model taken apart; keys are those of `module.state_dict()`."""
        return seq2seq_chain(module, _EXAMPLE)[0]

    def tiny(self) -> nn.Module:
        """FLAN-T5's form: 2 + 2 blocks of width 16 over 40 tokens, gated, its `lm_head` apart from the embeddings."""
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=6,
            d_ff=24,
            num_layers=2,
            num_heads=3,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            feed_forward_proj="gated-gelu",
            scale_decoder_outputs=False,
            decoder_start_token_id=0,
        )

        def build() -> nn.Module:
            model: Any = T5ForConditionalGeneration(config)
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
            return cast("nn.Module", model)

        return scrambled(build)


adapters.register(NAME)(HfSeq2Seq())

_EXAMPLE = {
    "input_ids": torch.zeros(2, 3, dtype=torch.long),
    "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "decoder_input_ids": torch.zeros(2, 2, dtype=torch.long),
    "decoder_attention_mask": torch.tensor([[1, 0], [1, 1]]),
}
"""Two rows to look at a model by, one of them padded, where no tokenizer makes any."""


@loaders.register("hf-seq2seq")
def load_hf_seq2seq(request: ArchitectureRequest) -> Architecture:
    """The architecture of an encoder-decoder that answers texts by text; its source is a folder or Hub id."""
    return _loaded(request, "hf-seq2seq")


@loaders.register("hf-t5")
def load_hf_t5(request: ArchitectureRequest) -> Architecture:
    """The architecture of a T5, v1.0 or v1.1 (FLAN); its source is a folder or Hub id."""
    return _loaded(request, "hf-t5")


def _loaded(request: ArchitectureRequest, loader: str) -> Architecture:
    """See `load_hf_seq2seq`; under the name of a loader."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source, offline = request.source, request.access.offline
    stated = read_plain_config(request, loader)
    if not is_seq2seq(stated):
        raise wrong_family(stated, source, "an encoder-decoder that answers by text")
    config = CONFIG_MAPPING[stated["model_type"]].from_dict(with_floats(stated))
    model_class = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    skeleton = weightless(partial(built, model_class, config), source)
    # Of files of any version, T5 keeps here whether its head is its embeddings: in memory it always says so.
    _tie(skeleton, request.untied or getattr(config, "scale_decoder_outputs", True) is False)
    computed = _with_own_tables(skeleton)
    preprocess = hf_text_preprocess(source, config, offline, "encoder-decoder")
    chain, lm = seq2seq_chain(skeleton, _EXAMPLE)
    return Architecture(
        loader=loader,
        source=source,
        skeleton=skeleton,
        chain=replace(chain, modality=replace(TEXT, pool="last")),
        layout=_layout(skeleton, chain, computed),
        preprocess=preprocess,
        folder=FolderFormat(
            "model.safetensors",
            {"config.json": stated},
            usage=partial(usage_of_texts, _USAGE),
        ),
        lm=lm,
    )


def _tie(skeleton: Any, is_apart: bool) -> None:
    """Tie what the library ties, as it does not without weights; with `is_apart` all but the head."""
    head = skeleton.get_output_embeddings()
    skeleton.tie_weights()
    if is_apart:
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


def _with_own_tables(skeleton: Any) -> tuple[str, ...]:
    """Have the library compute what it never saves (Marian's positions), and say what files may hold of it in vain."""
    unsaved = set(getattr(skeleton, "_keys_to_ignore_on_save", None) or ()) & skeleton.state_dict().keys()
    for key in unsaved:
        owner, _, leaf = key.rpartition(".")
        module = skeleton.get_submodule(owner).to_empty(device="cpu")
        skeleton._init_weights(module)
        value = module._parameters.pop(leaf).detach()
        module.register_buffer(leaf, value, persistent=False)
    return tuple(unsaved)


def _layout(skeleton: Any, chain: LayerChain, computed: tuple[str, ...]) -> Spellings:
    """Names in files, which hold what is tied under one name or several."""
    copies = {key: aliases[0] for key, aliases in chain.tied.items() if key != aliases[0]}
    plain = {key: name for key, name in file_names(skeleton).items() if key not in copies}
    names = [plain, *({**plain, same: copy} for copy, same in copies.items())]
    return Spellings(names, (*copies, *computed), passed_over(skeleton), is_lenient=True)


_USAGE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = "."  # this one, or the model's id on the Hub
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(["a prompt"], return_tensors="pt")
answers = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
"""
