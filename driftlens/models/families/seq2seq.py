"""Encoder-decoders of transformers, taken apart by what runs in them: no family is known by its name.

`encoder` [n, t, d] flows through the encoder's blocks and what is behind them, which is a layer of its own; `hidden`
[n, u, d] through the decoder's blocks, each of which reads the finished `encoder`. The head is what is behind the
decoder's blocks, perhaps nothing: scores are made of what leaves it by the language-model head, which belongs to no
layer. Either stack is taken apart as any module is; how both are called, and what is done to the head's scores, is seen
by running the library's own forward pass, hollow where the model has shapes only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from driftlens.base.errors import DataError, DriftLensError, IncompatibleModelsError, SpecError
from driftlens.checkpoints.alignment import Spellings
from driftlens.checkpoints.loading import with_floats
from driftlens.checkpoints.refusals import LIVE, is_seq2seq, running, wrong_family
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders, weightless
from driftlens.models.chain import (
    TENSOR,
    TEXT,
    Layer,
    LayerChain,
    Parameters,
    SideInputs,
    Site,
    Slot,
    State,
    Tap,
    adapters,
)
from driftlens.models.families.causal import Behind, slope
from driftlens.models.families.hf_auto import (
    built,
    file_names,
    read_plain_config,
    usage_of_texts,
)
from driftlens.models.families.sequential import block_list, sequential_chain
from driftlens.models.families.vit import scrambled
from driftlens.models.frames import Inputs, find_features, raw_inputs, result, without_padding
from driftlens.models.heads import LmScores
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.saving import FolderFormat
from driftlens.models.taking_apart.dissection import Dissection, own_weights, run, tied_weights
from driftlens.models.taking_apart.interception import call, observe, run_until
from driftlens.models.taking_apart.sites import BLOCK_ITSELF, site_kind, tapped

NAME = "seq2seq"
_READ = "encoder_hidden_states"
"""What transformers calls the features of the encoder that a decoder is given."""
_MASKS = ("attention_mask", "decoder_attention_mask")


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
    try:
        parts = _Pair(whole, example)
    except DataError:
        raise
    except Exception as error:  # whatever a forward pass raises that is run in other pieces
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        reason = error.message if isinstance(error, DriftLensError) else f"it doesn't run in pieces ({cause})"
        raise not_seq2seq(whole, reason) from error
    chain = parts.chain()
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    return chain, None if head is None else _Scores(whole, parts, head).found()


def not_seq2seq(whole: Any, reason: str) -> IncompatibleModelsError:
    """The refusal of an encoder-decoder that can't be taken apart, by the name of its kind."""
    kind = f"a {whole.config.model_type} model ({type(whole).__name__})"
    return IncompatibleModelsError(f"{kind} can't be taken apart as an encoder-decoder: {reason}", hint=LIVE)


@dataclass(frozen=True, eq=False)
class _Stack:
    """An encoder or a decoder taken apart by itself.

    Attributes:
        name: which of both it is.
        stream: what its features are called.
        path: where it lies in the whole model.
        chain: its stem, blocks and head.
        tail: path in the stack of the one module behind its blocks; "" where there is none.
        answer: the class of what it returns.
    """

    name: str
    stream: str
    path: str
    chain: LayerChain
    tail: str
    answer: Any
    takes: frozenset[str]

    @property
    def left(self) -> str:
        """Path in the whole model of the module that its finished features leave."""
        return f"{self.path}.{self.tail}" if self.tail else f"{self.path}.{self.chain.blocks[-1].path}"

    def side(self, whole: SideInputs) -> SideInputs:
        """Its own of the side inputs of both."""
        before, count = f"{self.name}.", len(self.chain.blocks)
        tensors = {
            name.removeprefix(before): x for name, x in whole.tensors.items() if name.startswith(before)
        }
        frames = whole.frames[:count] if self.name == "encoder" else whole.frames[-count:]
        assert whole.inputs is not None
        return SideInputs(tensors, frames, whole.inputs.values[self.name])


class _Pair:
    """The pieces of an encoder-decoder, as functions of parameters and features; the module stays as it is."""

    def __init__(self, whole: Any, example: Mapping[str, Tensor]) -> None:
        self.whole = whole
        self.reads = str(whole.main_input_name)
        self.tied = tied_weights(whole)
        table = whole.get_input_embeddings()
        self.num_tokens = table.num_embeddings if isinstance(table, nn.Embedding) else None
        self.start_token = getattr(whole.config, "decoder_start_token_id", None) or 0
        batch = self.batch(example)
        self.encoder = self._stack("encoder", "encoder", whole.get_encoder(), batch)
        self.decoder = self._stack("decoder", "hidden", whole.get_decoder(), batch)
        self.stacks = (self.encoder, self.decoder)
        if not any(site.stream for layer in self.decoder.chain.blocks for site in layer.sites):
            raise SpecError("no block of its decoder reads what leaves its encoder")

    def _stack(self, name: str, stream: str, module: nn.Module, batch: dict[str, Tensor]) -> _Stack:
        """One of both, looked at on a batch."""
        path = next((path for path, part in self.whole.named_modules() if path and part is module), "")
        takes = frozenset(inspect.signature(module.forward).parameters)
        given = _taken(self._asked(batch), takes)
        beside: Mapping[str, str] = MappingProxyType({})
        if name == "decoder":
            given, beside = _taken(self._answered(batch, self._placeholder(batch)), takes), {_READ: "encoder"}
        if not path or (name == "decoder" and _READ not in takes):
            raise SpecError(f"its {name} is no module of its own that is called as one")
        listed, blocks = block_list(module, None)
        tail, answer = _behind_blocks(name, Dissection(module, blocks, beside=beside), given)
        chain = sequential_chain(module, given, blocks=listed, final=tail, beside=beside)
        return _Stack(name, stream, path, chain, tail, answer, takes)

    def batch(self, inputs: Any) -> dict[str, Tensor]:
        """A batch as the library takes it: what both stacks read, the decoder's start alone where it has none."""
        given = dict(inputs) if isinstance(inputs, Mapping) else {}
        read, is_text = given.get(self.reads), self.reads == "input_ids"
        if not isinstance(read, Tensor) or read.dim() < 2:
            raise DataError(
                f"a batch is a {type(inputs).__name__} without {self.reads} [n, t]; an encoder-decoder wants a dict "
                "with these",
                hint=f"It reads {self.reads}, attention_mask and decoder_input_ids, as the model's files make them.",
            )
        start = torch.full((len(read), 1), self.start_token, device=read.device)
        features = {self.reads: read, "decoder_input_ids": given.get("decoder_input_ids", start)}
        batch = dict(features)
        for (name, ids), mask in zip(features.items(), _MASKS, strict=True):
            if mask in given or (ids.dim() == 2 and not ids.is_floating_point()):
                batch_mask = given.get(mask)
                batch |= {mask: torch.ones_like(ids) if batch_mask is None else batch_mask.long()}
            if name == "decoder_input_ids" or is_text:
                self._require_known(name, ids)
        return batch

    def _require_known(self, name: str, ids: Tensor) -> None:
        if self.num_tokens is not None and not bool(((ids >= 0) & (ids < self.num_tokens)).all()):
            raise DataError(
                f"{name} has tokens {int(ids.min())} to {int(ids.max())}; the model knows {self.num_tokens}",
                hint="Give what the tokenizer of these models makes of texts; -100 in labels is no token.",
            )

    def _asked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: batch[name] for name in (self.reads, "attention_mask") if name in batch}

    def _answered(self, batch: Mapping[str, Tensor], read: Tensor) -> dict[str, Tensor]:
        """What the decoder is given, which reads `read`."""
        given = {"input_ids": batch["decoder_input_ids"], "attention_mask": batch["decoder_attention_mask"]}
        mask = batch.get("attention_mask")
        beside = {} if mask is None else {"encoder_attention_mask": mask}
        return {**given, _READ: read, **beside}

    def _placeholder(self, batch: Mapping[str, Tensor], side: SideInputs | None = None) -> Tensor:
        """Features as the encoder's, which the decoder's blocks are known to be given by; they take no memory."""
        if side is None:
            _, side = self.encoder.chain.start(_taken(self._asked(batch), self.encoder.takes))
        frame, ids = side.frames[-1], batch["decoder_input_ids"]
        return torch.full((), 0.5, dtype=frame.dtype, device=ids.device).expand(len(ids), *frame.left)

    def start(self, inputs: Any) -> tuple[State, SideInputs]:
        """State at boundary 0, which is empty for texts, and the side inputs of both stacks."""
        batch = self.batch(inputs)
        state, asked = self.encoder.chain.start(_taken(self._asked(batch), self.encoder.takes))
        given = self._answered(batch, self._placeholder(batch, asked))
        _, answered = self.decoder.chain.start(_taken(given, self.decoder.takes))
        tensors: dict[str, Tensor] = {}
        for stack, side in zip(self.stacks, (asked, answered), strict=True):
            tensors |= {f"{stack.name}.{name}": value for name, value in side.tensors.items()}
            if (mask := side.mask("hidden")) is not None:
                tensors[f"{stack.stream}_mask"] = mask
        inputs_of_both = Inputs({"encoder": asked.inputs, "decoder": answered.inputs}, by_keyword=True)
        return state, SideInputs(tensors, (*asked.frames, *answered.frames), inputs_of_both)

    def chain(self) -> LayerChain:
        """Both stacks as one chain, under the whole model's names."""
        names = {
            stack.name: {name: self.key(stack, name) for name in stack.chain.layers[0].parameters}
            for stack in self.stacks
        }
        keys = dict.fromkeys(key for of_stack in names.values() for key in of_stack.values())
        stem = {key: Slot(key) for key in keys}
        path = next(iter(stem)).rpartition(".")[0]
        layers = [
            Layer(1, "stem", path, stem, partial(self._stem, names), stream="encoder", pool="mean"),
            *(self._block(self.encoder, block) for block in self.encoder.chain.blocks),
            *([self._tail(self.encoder)] if self.encoder.tail else []),
            *(self._block(self.decoder, block) for block in self.decoder.chain.blocks),
            self._tail(self.decoder),
        ]
        return LayerChain(
            architecture=f"hf_{self.whole.config.model_type}",
            layers=tuple(replace(layer, index=number) for number, layer in enumerate(layers, 1)),
            start=self.start,
            library_states=self.library_states,
            require_shared=self.require_shared,
            tied=self.tied,
            settings={"model": type(self.whole).__name__},
            modality=replace(TEXT if self.reads == "input_ids" else TENSOR, pool="last"),
            final=self.decoder.left,
        )

    def key(self, stack: _Stack, name: str) -> str:
        """What the whole model calls a weight of a stack; of tied ones all the same."""
        key = f"{stack.path}.{name}"
        return self.tied.get(key, (key,))[0]

    def _stem(
        self,
        names: Mapping[str, Mapping[str, str]],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """What both stacks make of what they read."""
        left: State = {}
        for stack in self.stacks:
            weights = {name: parameters[key] for name, key in names[stack.name].items()}
            entered = state if stack is self.encoder else {}
            left[stack.stream] = stack.chain.layers[0].call(weights, entered, stack.side(side))["hidden"]
        return left

    def _block(self, stack: _Stack, block: Layer) -> Layer:
        """A stack's block in the chain of both. Norms are left alone, as the paper has it for language models."""
        return replace(
            block,
            path=f"{stack.path}.{block.path}",
            parameters={
                name: replace(slot, key=self.key(stack, slot.key)) for name, slot in block.parameters.items()
            },
            call=partial(self._run_block, stack, block),
            sites=tuple(replace(site, only_named=site.kind != "linear") for site in block.sites),
            stream=stack.stream,
            pool="mean" if stack is self.encoder else None,
        )

    def _run_block(
        self,
        stack: _Stack,
        block: Layer,
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        own = stack.side(side)
        if stack is self.decoder:
            own = replace(own, tensors={**own.tensors, f"inputs.{_READ}": state["encoder"]})
        left = block.call(parameters, {"hidden": state[stack.stream]}, own, tap)
        return {**state, stack.stream: left["hidden"]}

    def _tail(self, stack: _Stack) -> Layer:
        """What is behind a stack's blocks: of the encoder a layer between two blocks, of the decoder the head."""
        is_head = stack is self.decoder
        head = stack.chain.layers[-1]
        module = self.whole.get_submodule(stack.left)
        sites: tuple[Site, ...] = ()
        slots = {
            name.removeprefix(f"{stack.tail}."): Slot(self.key(stack, slot.key))
            for name, slot in head.parameters.items()
            if stack.tail
        }
        if stack.tail and (kind := site_kind(module)) is not None:
            eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
            sites = (Site(BLOCK_ITSELF, kind, stack.stream, eps=eps, only_named=True),)
            slots = {f"{BLOCK_ITSELF}.{name}": slot for name, slot in slots.items()}
        return Layer(
            0,
            "head" if is_head else "block",
            stack.left if stack.tail else stack.path,
            slots,
            partial(self._run_tail, stack, module, sites),
            sites,
            stack.stream,
            None if is_head else "mean",
        )

    def _run_tail(
        self,
        stack: _Stack,
        module: nn.Module,
        sites: tuple[Site, ...],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        hidden = state[stack.stream]
        if stack.tail:
            weights = {
                name.removeprefix(f"{BLOCK_ITSELF}." if sites else ""): x for name, x in parameters.items()
            }
            with tapped(module, sites, tap):
                hidden = call(module, weights, (hidden,), {})
            hidden = without_padding(stack.left, hidden, side.mask(stack.stream))
        return {"hidden": hidden} if stack is self.decoder else {**state, stack.stream: hidden}

    def library_states(self, module: nn.Module, inputs: Any) -> list[State]:
        """What enters the first blocks and leaves blocks and tails in one ordinary pass, which makes no scores."""
        batch, finished = self.batch(inputs), list[Tensor]()
        last = module.get_submodule(self.decoder.left)
        blocks = {
            stack.name: {
                block.path: module.get_submodule(f"{stack.path}.{block.path}") for block in stack.chain.blocks
            }
            for stack in self.stacks
        }

        def forward() -> Tensor:
            encoder = module.get_submodule(self.encoder.path)
            hook = encoder.register_forward_hook(lambda *args: finished.append(result(args[-1])))
            try:
                return run_until(last, partial(run, module, raw_inputs(batch)), past=True)
            finally:
                hook.remove()

        encoded = observe(
            blocks["encoder"], lambda: observe(blocks["decoder"], forward, keep=True), keep=True
        )
        decoded = encoded.output
        _, side = self.start(batch)

        def own(stack: _Stack, hidden: Tensor) -> Tensor:
            return without_padding(stack.path, hidden, side.mask(stack.stream))

        read = [own(self.encoder, hidden) for hidden in encoded.features]
        read += [own(self.encoder, finished[0])] if self.encoder.tail else []
        first, *made = (own(self.decoder, hidden) for hidden in decoded.features)
        return [
            *({"encoder": hidden, "hidden": first} for hidden in read),
            *({"encoder": read[-1], "hidden": hidden} for hidden in made),
            {"hidden": own(self.decoder, decoded.output)},
        ]

    def require_shared(self, models: Any, inputs: Any) -> None:
        """See `Dissection.require_shared`, of both stacks."""
        batch, models = self.batch(inputs), list(models)
        given = {"encoder": self._asked(batch), "decoder": self._answered(batch, self._placeholder(batch))}
        for stack in self.stacks:
            assert stack.chain.require_shared is not None
            parts = [(name, module.get_submodule(stack.path)) for name, module in models]
            stack.chain.require_shared(parts, _taken(given[stack.name], stack.takes))


def _taken(given: dict[str, Tensor], takes: frozenset[str]) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if name in takes}


def _behind_blocks(name: str, parts: Dissection, given: Mapping[str, Tensor]) -> tuple[str, Any]:
    """Path of the one module that finishes what leaves a stack's last block, "" for none; and what a stack returns."""
    left: list[Tensor] = []
    behind: list[tuple[str, Tensor]] = []

    def leave(path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple | list) else output
        if path == parts.paths[-1]:
            left.append(output)
        elif left and path and _same(find_features(path, args, kwargs)[1], left[0]):
            behind.extend([] if _same(output, left[0]) else [(path, output)])

    inside = tuple(f"{path}." for path in parts.paths)
    with contextlib.ExitStack() as hooks:
        for path, module in parts.module.named_modules():
            if not path.startswith(inside):
                hooks.callback(module.register_forward_hook(partial(leave, path), with_kwargs=True).remove)
        output = parts.whole(dict(given))
    finished = result(output)
    if _same(finished, left[0]):
        return "", type(output)
    if len(behind) != 1 or not _same(finished, behind[0][1]):
        raise SpecError(
            f"what its {name} returns is not what one module makes, once, of its last block's features"
        )
    return behind[0][0], type(output)


def _same(one: Any, other: Tensor) -> bool:
    """Whether one tensor is the other, or a view of it."""
    return isinstance(one, Tensor) and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(eq=False)
class _Scores:
    """What a model does between the finished features of its decoder and its scores, seen without its stacks."""

    whole: Any
    parts: _Pair
    head: Any
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def found(self) -> LmScores:
        """The head, its scale and bias, and what else is done; refused where that is no map of scores one by one."""
        if getattr(type(self.head), "forward", None) is not nn.Linear.forward:
            raise not_seq2seq(self.whole, f"its head is a {type(self.head).__name__}; expected a linear map")
        place = next(path for path, module in self.whole.named_modules() if module is self.head)
        cores = tuple((self.whole.get_submodule(stack.path), stack.answer) for stack in self.parts.stacks)
        behind = Behind(self.whole, cores, self.head, (self.parts.reads, "decoder_input_ids"))
        features, given = self._random(self.head.in_features), self._random(self.head.out_features)
        read: list[Tensor] = []

        def score(entered: Tensor) -> Tensor:
            read.append(entered)
            return given

        made = behind.made(features, score)
        scale = float((read[0] / features).median())
        if not torch.allclose(read[0], features * scale, rtol=1e-12, atol=0):
            raise not_seq2seq(
                self.whole, "what its head reads is not what leaves its decoder, times a number"
            )
        bias = "" if self.head.bias is None else f"{place}.bias"
        for key, value in self._others(place).items():
            shift = self._random(value.numel())[0]
            shifted = behind.made(features, score, {key: shift.reshape(value.shape)})
            if torch.equal(shifted, made):
                continue
            if bias or value.numel() != self.head.out_features or not torch.equal(shifted, given + shift):
                raise not_seq2seq(self.whole, f"its scores depend on {key!r}, which is no bias of its head")
            bias, made = key, given
        key = self.parts.tied.get(f"{place}.weight", (f"{place}.weight",))[0]
        lm = LmScores(key=key, head=f"{place}.weight", bias=bias, scale=scale)
        if torch.equal(made, given):
            return lm
        for part in (slice(None), slice(1, 4)):
            if not torch.equal(behind(given[:, 0, part]), made[:, 0, part]):
                raise not_seq2seq(self.whole, "its scores are not made of its head's output, one by one")
        return replace(lm, behind=behind, slope=slope(behind, self.head.out_features))

    def _random(self, width: int) -> Tensor:
        return torch.randn(2, 1, width, generator=self.numbers, dtype=torch.float64)

    def _others(self, place: str) -> dict[str, Tensor]:
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

    def on_batch(self, module: nn.Module, example: Any) -> LayerChain:
        """The same of one that reads no tokens (Whisper), of which a batch shows what it reads."""
        reads_tokens = example is None or module.main_input_name == "input_ids"
        return seq2seq_chain(module, _EXAMPLE if reads_tokens else example)[0]

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
    """The architecture of an encoder-decoder that answers by text; its source is a folder or Hub id."""
    return _loaded(request, "hf-seq2seq")


@loaders.register("hf-t5")
def load_hf_t5(request: ArchitectureRequest) -> Architecture:
    """The architecture of a T5, v1.0 or v1.1 (FLAN); its source is a folder or Hub id."""
    return _loaded(request, "hf-t5")


def _loaded(request: ArchitectureRequest, loader: str) -> Architecture:
    """See `load_hf_seq2seq`; under the name of a loader."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as models

    source, offline = request.source, request.access.offline
    stated = read_plain_config(request, loader)
    if not is_seq2seq(stated):
        raise wrong_family(stated, source, "an encoder-decoder that answers by text")
    config = CONFIG_MAPPING[stated["model_type"]].from_dict(with_floats(stated))
    model_class = models[type(config)]
    skeleton = weightless(partial(built, model_class, config), source)
    with running(source):
        # Of files of any version, T5 keeps here whether its head is its embeddings: in memory it always says so.
        _tie(skeleton, request.untied or getattr(config, "scale_decoder_outputs", True) is False)
        computed = _with_own_tables(skeleton)
        chain, lm = seq2seq_chain(skeleton, _EXAMPLE)
    return Architecture(
        loader=loader,
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=_layout(skeleton, chain, computed),
        preprocess=hf_text_preprocess(source, config, offline, "encoder-decoder"),
        folder=FolderFormat(
            "model.safetensors", {"config.json": stated}, usage=partial(usage_of_texts, _USAGE)
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
    known = set(getattr(skeleton, "_keys_to_ignore_on_save", None) or ()) & skeleton.state_dict().keys()
    for key in known:
        owner, _, leaf = key.rpartition(".")
        module = skeleton.get_submodule(owner).to_empty(device="cpu")
        skeleton._init_weights(module)
        value = module._parameters.pop(leaf).detach()
        module.register_buffer(leaf, value, persistent=False)
    return tuple(known)


def _layout(skeleton: Any, chain: LayerChain, computed: tuple[str, ...]) -> Spellings:
    """Names in files, which hold what is tied under one name or several."""
    copies = {key: same[0] for key, same in chain.tied.items() if key != same[0]}
    plain = {key: name for key, name in file_names(skeleton).items() if key not in copies}
    names = [plain, *({**plain, same: copy} for copy, same in copies.items())]
    ignored = tuple(getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Spellings(names, (*copies, *computed), ignored)


_USAGE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

folder = "."  # this one, or the model's id on the Hub
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(["a prompt"], return_tensors="pt")
answers = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
"""
