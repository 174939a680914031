"""Language models of transformers as chains of layers, found by running them, and their loaders.

`causal_chain`: the head of the chain is the one module between the last block and the language-model head, which
belongs to no layer. `seq2seq_chain`: `encoder` [n, t, d] passes through the encoder's layers, then `hidden` [n, u, d]
through the decoder's blocks, each of which reads the finished `encoder`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.alignment import KeyLayout
from driftlens.checkpoints.unsupported import LIVE, is_causal_lm, is_seq2seq
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders
from driftlens.models.architectures.encoders import (
    build_language_model,
    ignored_key_patterns,
    key_spellings,
    saved_key_names,
    text_folder_format,
)
from driftlens.models.architectures.module_list import find_blocks, module_path, sequential_chain
from driftlens.models.chain import (
    TENSOR,
    TEXT,
    Layer,
    LayerChain,
    Parameters,
    SideInputs,
    State,
    Tap,
    WeightSlot,
    adapters,
)
from driftlens.models.heads import LmHeadSpec
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.readouts import lipschitz_bound
from driftlens.models.tracing.block_call import (
    RawInputs,
    call_with_weights,
    find_features,
    first_tensor,
    raw_inputs,
    record_calls,
    replace_forwards,
    replace_outputs,
    run_until_module,
    zero_out_padding,
)
from driftlens.models.tracing.block_runner import (
    BlockRunner,
    is_view,
    named_weights,
    num_streams,
    run_model,
    tied_weights,
)
from driftlens.utils.errors import IncompatibleModelsError, SpecError

# Example batch without a tokenizer. One row is padded, because libraries call blocks without a mask if none is padded.
PADDED = {"input_ids": torch.tensor([[0, 0], [0, 0]]), "attention_mask": torch.tensor([[1, 0], [1, 1]])}
_NOT_ELEMENTWISE = "its scores are not an elementwise function of its head's outputs"
_WRAPPED = (
    "No loader supports it yet. Use live modules that pass only features from block to block; answers are not "
    "measured then."
)


def causal_chain(whole: Any, example: Any, blocks: str | None = None) -> tuple[LayerChain, LmHeadSpec]:
    """Split a causal language model into layers; return the chain and its language-model head.

    Args:
        whole: the library's model with its head.
        example: a batch as its tokenizer makes it.
        blocks: path of the list of blocks; None searches for it.
    """
    path, of_blocks = find_blocks(whole, blocks)
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    # A subclass of `nn.Linear` with another forward function may compute more than the product.
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise not_causal_error(whole, f"its head is a {type(head).__name__}; expected a linear map")
    place = module_path(whole, head)
    trace = _ForwardTrace(whole, list(of_blocks))
    read, after_head = _head_input_and_later_steps(trace, head, example)
    final = trace.final_module_path(read) or place
    chain = sequential_chain(whole, example, blocks=path, final=final, reads_last=trace.reads_last)
    weight, embedding = f"{place}.weight", module_path(whole, table)
    keys = (f"{embedding}.weight", weight)
    # The library ties weights when it loads them, so two tensors on meta do not show it; the configuration does.
    is_tied = getattr(whole.config, "tie_word_embeddings", False) and weight in (
        getattr(whole, "_tied_weights_keys", None) or ()
    )
    stem, *middle, last = chain.layers
    # If not exactly one module computes the final feature (no norm, or a factor after it), the chain's head is
    # everything after the blocks.
    last = replace(last, path="head") if final == place else last
    chain = replace(
        chain,
        architecture=f"hf_{whole.config.model_type}",
        layers=(replace(stem, path=embedding), *middle, last),
        tied=dict.fromkeys(keys, keys) if is_tied else {},
        modality=replace(TEXT, pool="last"),
        settings={**chain.settings, "model": type(whole).__name__},
    )
    return chain, LmHeadSpec(
        key=keys[0] if is_tied else weight,
        head=weight,
        bias="" if head.bias is None else f"{place}.bias",
        after_head=after_head,
        slope=1.0 if after_head is None else _score_slope_bound(after_head, head.out_features),
    )


def not_causal_error(
    whole: Any, reason: str, hint: str = _WRAPPED, kind: str = "a causal language model"
) -> IncompatibleModelsError:
    """Return the error for a language model that can't be split into layers; `reason` has no final period."""
    return IncompatibleModelsError(
        f"a {whole.config.model_type} model ({type(whole).__name__}) can't be split into layers as {kind}: {reason}",
        hint=hint,
    )


@dataclass(eq=False)
class _PostHeadSteps:
    """The steps from a language-model head's output to the model's scores, such as soft-capping, as a function.

    Neither the head nor the `cores`, which compute its input, run. With each core is the class of its output, None for
    a tensor. `reads` are the names of the token ids among the model's inputs.
    """

    whole: Any
    cores: tuple[tuple[nn.Module, Any], ...]
    head: nn.Module
    reads: tuple[str, ...] = ("input_ids",)

    def __call__(self, scores: Tensor) -> Tensor:
        """Compute scores [n, classes] from the head's output for one token each, [n, classes]."""
        # Classes stand for tokens of one position; the features do not matter, as the head is replaced.
        features = torch.zeros(len(scores), 1, 1, dtype=scores.dtype, device=scores.device)
        return self.scores_of_features(features, lambda *_: scores[:, None])[:, 0]

    def can_reproduce_scores(self, outputs: Tensor, scores: Tensor) -> bool:
        """Return True if these steps map the head's `outputs` [n, classes] to `scores`, entry by entry."""
        # A part of the vocabulary shows steps that mix scores, such as a softmax over all of them.
        parts = (slice(None), slice(1, 4))
        return all(torch.equal(self(outputs[:, part]), scores[:, part]) for part in parts)

    def scores_of_features(
        self, features: Tensor, head: Callable[..., Tensor], weights: Parameters = MappingProxyType({})
    ) -> Tensor:
        """Compute the model's scores [n, t, classes], with `features` as the output of its transformer stacks.

        Args:
            features: [n, t, d].
            head: replaces the head.
            weights: replace some of the model's weights, by key.
        """
        answers = [
            (core, features if answer is None else answer(last_hidden_state=features)) for core, answer in self.cores
        ]
        ids = torch.zeros(features.shape[:2], dtype=torch.long, device=features.device)
        inputs = {**dict.fromkeys(self.reads, ids), "use_cache": False, "return_dict": True}
        with replace_outputs(answers), replace_forwards([(self.head, head)]):
            scores: Tensor = call_with_weights(self.whole, weights, (), inputs).logits
        return scores


def _score_slope_bound(after_head: _PostHeadSteps, width: int) -> float:
    """Return a bound on the change of scores per change of the head's output; NaN if unknown."""
    return float(lipschitz_bound(after_head, torch.zeros(1, width, dtype=torch.float64)))


def _head_input_and_later_steps(
    trace: _ForwardTrace, head: nn.Module, example: Any
) -> tuple[Tensor, _PostHeadSteps | None]:
    """Return the features that the head reads in one pass, and the steps from its output to scores, if any."""
    whole = trace.whole
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    # Random outputs of the head, because equal ones would hide steps that depend on their order.
    numbers = torch.Generator().manual_seed(0)

    def random_head_output(features: Tensor) -> Tensor:
        shape = (*features.shape[:-1], head.out_features)
        inputs.append(features)
        outputs.append(torch.randn(shape, generator=numbers, dtype=torch.float64).to(features.device))
        return outputs[-1]

    blocks = {path: whole.get_submodule(path) for path in trace.paths}
    with replace_forwards([(head, random_head_output)]), trace.record_modules():
        logits: Tensor = BlockRunner(whole, blocks).model_output(example).logits
    cores = [(module, kind) for module, kind in trace.answers if module is not head]
    after_head = _PostHeadSteps(whole, tuple(cores), head)
    output, scores = outputs[-1][:, -1], logits[:, -1]
    if not after_head.can_reproduce_scores(output, scores):
        raise not_causal_error(whole, _NOT_ELEMENTWISE)
    is_same = scores.dtype == output.dtype and torch.equal(scores, output)
    return inputs[-1], None if is_same else after_head


@dataclass(eq=False)
class _ForwardTrace:
    """A trace of one forward pass: inputs and outputs of the modules outside the blocks.

    Attributes:
        steps: path, features read and output of each module, blocks included.
        answers: the outermost module that contains the blocks, with the class of its output, and those that run later.
        reads_last: True if the module of `final` reads the last block's output.
    """

    whole: Any
    paths: list[str]
    steps: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    answers: list[tuple[nn.Module, Any]] = field(default_factory=list)
    reads_last: bool = True

    @property
    def last_block_output(self) -> Tensor:
        return next(output for path, _, output in self.steps if path == self.paths[-1])

    def final_module_path(self, read: Tensor) -> str:
        """Return the path of the module after the last block that returned the tensor `read`, or ""."""
        order = [path for path, *_ in self.steps]
        outputs = [step for step in self.steps if step[0] not in self.paths and is_view(read, step[2])]
        if outputs:
            path, entered, _ = outputs[0]
            self.reads_last = is_view(entered, self.last_block_output)
            is_after = order.index(path) > order.index(self.paths[-1])
            # With several streams, the final feature is computed from their mix.
            mixes = is_after and num_streams(self.whole.get_submodule(self.paths[-1])) > 1
            # A module that runs twice has no single output to stop at.
            if order.count(path) == 1 and (self.reads_last or mixes):
                return path
        self.reads_last = False
        return ""

    @contextlib.contextmanager
    def record_modules(self) -> Iterator[None]:
        """Record the inputs and outputs of all modules outside the blocks during a pass."""
        inside = tuple(f"{path}." for path in self.paths)

        def record_module_output(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # The last module to return that contains the blocks is the outermost core; its answer replaces inner ones.
            if path and self.paths[0].startswith(f"{path}."):
                self.answers = [(module, type(output))]
            elif any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                if self.answers and path:
                    self.answers.append((module, None))
                output = output[0] if isinstance(output, tuple | list) else output
                if isinstance(output, Tensor):
                    self.steps.append((path, find_features(path, args, kwargs)[1], output))

        with contextlib.ExitStack() as hooks:
            for path, module in self.whole.named_modules():
                if not path.startswith(inside):
                    watch = partial(record_module_output, path)
                    hooks.callback(module.register_forward_hook(watch, with_kwargs=True).remove)
            yield


@loaders.register("hf-decoder")
def _load_hf_decoder(request: ArchitectureRequest) -> Architecture:
    """Return the architecture of a causal language model; the chain ends in the input of its language-model head."""
    source = request.source
    stated, skeleton = build_language_model(
        request, "hf-decoder", is_causal_lm, "a causal language model", "MODEL_FOR_CAUSAL_LM_MAPPING"
    )
    # If no text is read, a folder without a tokenizer is enough.
    preprocess = (
        None if request.unread else hf_text_preprocess(source, skeleton.config, request.access.offline, "decoder")
    )
    example = PADDED if preprocess is None else dict(preprocess.example())
    chain, lm = causal_chain(skeleton, example, request.blocks)
    names, core = saved_key_names(skeleton), f"{skeleton.base_model_prefix}."
    # As vision-language models of transformers 4 and 5 name the decoder that they contain.
    spellings = [
        *key_spellings(names, skeleton),
        {key: f"language_model.{name}" for key, name in names.items()},
        {
            key: f"{core}language_model.{name.removeprefix(core)}" if name.startswith(core) else name
            for key, name in names.items()
        },
    ]
    return Architecture(
        loader="hf-decoder",
        source=source,
        skeleton=skeleton,
        chain=chain,
        layout=KeyLayout(spellings, ignored=ignored_key_patterns(skeleton), is_lenient=True),
        preprocess=preprocess,
        folder=text_folder_format(stated, "AutoModelForCausalLM"),
        lm=lm,
    )


_ENCODER_FEATURES = "encoder_hidden_states"
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True, eq=False)
class _LayerStack:
    """The encoder or the decoder of a model: its layers, its path, and the class of its output.

    `name` is `encoder` or `decoder`, and `stream` the name of its features in the state.
    """

    name: str
    stream: str
    path: str
    chain: LayerChain
    answer: Any

    @property
    def output_module_path(self) -> str:
        """The path of the module that returns the stack's final features."""
        return f"{self.path}.{self.chain.final or self.chain.blocks[-1].path}"

    def own_side_inputs(self, whole: SideInputs) -> SideInputs:
        """Return this stack's masks, positions and block calls, given those of both stacks."""
        before, count = f"{self.name}.", len(self.chain.blocks)
        tensors = {name.removeprefix(before): x for name, x in whole.tensors.items() if name.startswith(before)}
        calls = whole.calls[:count] if self.name == "encoder" else whole.calls[-count:]
        assert whole.inputs is not None
        return SideInputs(tensors, calls, whole.inputs.values[self.name])


class _EncoderDecoderRunner:
    """Runs the layers of an encoder-decoder as functions of parameters and features."""

    def __init__(self, whole: Any, example: Mapping[str, Tensor]) -> None:
        self.whole = whole
        self.reads = str(whole.main_input_name)
        self.tied = tied_weights(whole)

        self.start_token = getattr(whole.config, "decoder_start_token_id", None) or 0
        batch = self._inputs_of_both_stacks(example)
        self.encoder = self._split_stack_into_layers("encoder", "encoder", whole.get_encoder(), batch)
        self.decoder = self._split_stack_into_layers("decoder", "hidden", whole.get_decoder(), batch)
        self.stacks = (self.encoder, self.decoder)
        if not any(site.stream for layer in self.decoder.chain.blocks for site in layer.sites):
            raise SpecError("no block of its decoder reads its encoder's output")

    def _split_stack_into_layers(
        self, name: str, stream: str, module: nn.Module, batch: dict[str, Tensor]
    ) -> _LayerStack:
        """Split one stack into layers, by a pass over a batch."""
        path = module_path(self.whole, module)
        is_decoder = name == "decoder"
        inputs = self._decoder_inputs(batch) if is_decoder else self._encoder_inputs(batch)
        beside = {_ENCODER_FEATURES: "encoder"} if is_decoder else {}
        if not path or not beside.keys() <= inputs.keys():
            raise SpecError(f"its {name} is no separate module")
        listed, blocks = find_blocks(module, None)
        trace = _ForwardTrace(module, list(blocks))
        with trace.record_modules():
            output = BlockRunner(module, blocks, beside=beside).model_output(inputs)
        finished = first_tensor(output)
        is_bare = is_view(finished, trace.last_block_output)
        tail = "" if is_bare else trace.final_module_path(finished)
        if not (is_bare or (tail and trace.reads_last)):
            raise SpecError(f"the output of its {name} is not computed by one module from its last block's features")
        chain = sequential_chain(module, inputs, blocks=listed, final=tail, beside=beside)
        return _LayerStack(name, stream, path, chain, type(output))

    def _inputs_of_both_stacks(self, inputs: Any) -> dict[str, Tensor]:
        """Return the library's inputs of both stacks; without decoder input, its start token is used."""
        read = inputs[self.reads]
        start = torch.full((len(read), 1), self.start_token, device=read.device)
        batch = {self.reads: read, "decoder_input_ids": inputs.get("decoder_input_ids", start)}
        # Every batch gets masks, so that blocks are called alike with and without padding.
        for ids, mask in zip(list(batch.values()), _MASKS, strict=True):
            if mask in inputs:
                batch[mask] = inputs[mask].long()
            elif ids.dim() == 2 and not ids.is_floating_point():
                batch[mask] = torch.ones_like(ids)
        return batch

    def _encoder_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: batch[name] for name in (self.reads, "attention_mask") if name in batch}
        return _accepted_inputs(self.whole.get_encoder(), inputs)

    def _decoder_inputs(self, batch: Mapping[str, Tensor], side: SideInputs | None = None) -> dict[str, Tensor]:
        """Return the inputs that the decoder accepts; `side` are the encoder's side inputs, if known."""
        if side is None:
            _, side = self.encoder.chain.start(self._encoder_inputs(batch))
        block_call, ids = side.calls[-1], batch["decoder_input_ids"]
        # In the place of the encoder's features; one number, by which blocks that read them are recognized.
        number = torch.full((), 0.5, dtype=block_call.dtype, device=ids.device)
        inputs = {
            "input_ids": ids,
            "attention_mask": batch["decoder_attention_mask"],
            _ENCODER_FEATURES: number.expand(len(ids), *block_call.left),
        }
        if "attention_mask" in batch:
            inputs["encoder_attention_mask"] = batch["attention_mask"]
        return _accepted_inputs(self.whole.get_decoder(), inputs)

    def initial_state(self, inputs: Any) -> tuple[State, SideInputs]:
        """Return the state at boundary 0, which is empty for texts, and the side inputs of both stacks."""
        batch = self._inputs_of_both_stacks(inputs)
        state, encoder_side = self.encoder.chain.start(self._encoder_inputs(batch))
        _, decoder_side = self.decoder.chain.start(self._decoder_inputs(batch, encoder_side))
        tensors: dict[str, Tensor] = {}
        for stack, side in zip(self.stacks, (encoder_side, decoder_side), strict=True):
            tensors |= {f"{stack.name}.{name}": value for name, value in side.tensors.items()}
            if (mask := side.mask("hidden")) is not None:
                tensors[f"{stack.stream}_mask"] = mask
        sides = {"encoder": encoder_side, "decoder": decoder_side}
        both = RawInputs({name: side.inputs for name, side in sides.items()}, by_keyword=True)
        return state, SideInputs(tensors, (*encoder_side.calls, *decoder_side.calls), both)

    def chain(self) -> LayerChain:
        """Return the layers of encoder and decoder as one chain, with the whole model's key names."""
        names = {
            stack.name: {name: self._key_in_whole_model(stack, name) for name in stack.chain.layers[0].parameters}
            for stack in self.stacks
        }
        keys = dict.fromkeys(key for of_stack in names.values() for key in of_stack.values())
        stem = {key: WeightSlot(key) for key in keys}
        path = next(iter(stem)).rpartition(".")[0]
        layers = [
            Layer(1, "stem", path, stem, partial(self._run_embeddings, names), stream="encoder", pool="mean"),
            *(
                self._to_chain_layer(stack, layer)
                for stack in self.stacks
                for layer in stack.chain.layers[1:]
                if layer.role == "block" or stack.chain.final or stack is self.decoder
            ),
        ]
        return LayerChain(
            architecture=f"hf_{self.whole.config.model_type}",
            layers=tuple(replace(layer, index=number) for number, layer in enumerate(layers, 1)),
            start=self.initial_state,
            library_states=self.library_states,
            require_shared=self.require_same_arguments,
            tied=self.tied,
            settings={"model": type(self.whole).__name__},
            modality=replace(TEXT if self.reads == "input_ids" else TENSOR, pool="last"),
            final=self.decoder.output_module_path,
        )

    def _key_in_whole_model(self, stack: _LayerStack, name: str) -> str:
        """Return the name of a stack's weight in the whole model; tied weights share one."""
        key = f"{stack.path}.{name}"
        return self.tied.get(key, (key,))[0]

    def _run_embeddings(
        self,
        names: Mapping[str, Mapping[str, str]],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """Run the embeddings of encoder and decoder; return the features before their first blocks."""
        outputs: State = {}
        for stack in self.stacks:
            weights = {name: parameters[key] for name, key in names[stack.name].items()}
            entered = state if stack is self.encoder else {}
            outputs[stack.stream] = stack.chain.layers[0].call(weights, entered, stack.own_side_inputs(side))["hidden"]
        return outputs

    def _to_chain_layer(self, stack: _LayerStack, layer: Layer) -> Layer:
        """Convert a layer of one stack to a layer of the whole chain; the encoder's final norm becomes a block."""
        is_head, is_encoder = layer.role == "head", stack is self.encoder
        has_weights = not is_head or stack.chain.final
        return replace(
            layer,
            role="head" if is_head and not is_encoder else "block",
            path=f"{stack.path}.{layer.path}" if has_weights else stack.path,
            parameters={
                name: replace(slot, key=self._key_in_whole_model(stack, slot.key))
                for name, slot in layer.parameters.items()
                if has_weights
            },
            call=partial(self._run_stack_layer, stack, layer),
            # The paper calibrates no norms of language models.
            sites=tuple(replace(site, only_named=site.kind != "linear") for site in layer.sites),
            stream=stack.stream,
            pool="mean" if is_encoder else None,
        )

    def _run_stack_layer(
        self,
        stack: _LayerStack,
        layer: Layer,
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        own_side, features = stack.own_side_inputs(side), {"hidden": state[stack.stream]}
        if layer.role == "head" and stack is self.decoder:
            return layer.call(parameters, features, own_side) if stack.chain.final else features
        if stack is self.decoder:
            tensors = {**own_side.tensors, f"inputs.{_ENCODER_FEATURES}": state["encoder"]}
            own_side = replace(own_side, tensors=tensors)
        return {**state, stack.stream: layer.call(parameters, features, own_side, tap)["hidden"]}

    def library_states(self, module: nn.Module, inputs: Any) -> list[State]:
        """Return the states at boundaries 1..L of one ordinary forward pass of `module`, without its head."""
        batch, finished = self._inputs_of_both_stacks(inputs), list[Tensor]()
        last = module.get_submodule(self.decoder.output_module_path)
        blocks = {
            f"{stack.path}.{block.path}": module.get_submodule(f"{stack.path}.{block.path}")
            for stack in self.stacks
            for block in stack.chain.blocks
        }

        def run_both_stacks() -> Tensor:
            encoder = module.get_submodule(self.encoder.path)
            with encoder.register_forward_hook(lambda *args: finished.append(first_tensor(args[-1]))):
                return run_until_module(last, partial(run_model, module, raw_inputs(batch)), past=True)

        count = len(self.encoder.chain.blocks)
        recording = record_calls(blocks, run_both_stacks, keep=True, starts=(0, count))
        encoded, decoded = recording.features[: count + 1], recording.features[count + 1 :]
        _, side = self.initial_state(batch)

        def zero_padding(stack: _LayerStack, hidden: Tensor) -> Tensor:
            return zero_out_padding(stack.path, hidden, side.mask(stack.stream))

        encoder_features = [zero_padding(self.encoder, hidden) for hidden in encoded]
        encoder_features += [zero_padding(self.encoder, finished[0])] if self.encoder.chain.final else []
        embedded, *decoder_features = (zero_padding(self.decoder, hidden) for hidden in decoded)
        # While the encoder runs, the decoder's features are those of its stem.
        return [
            *({"encoder": hidden, "hidden": embedded} for hidden in encoder_features),
            *({"encoder": encoder_features[-1], "hidden": hidden} for hidden in decoder_features),
            {"hidden": zero_padding(self.decoder, recording.output)},
        ]

    def require_same_arguments(self, models: Any, inputs: Any) -> None:
        """Raise if the blocks' arguments other than features (masks, positions) differ between models."""
        batch, models = self._inputs_of_both_stacks(inputs), list(models)
        reads = (self._encoder_inputs(batch), self._decoder_inputs(batch))
        for stack, stack_inputs in zip(self.stacks, reads, strict=True):
            assert stack.chain.require_shared is not None
            parts = [(name, module.get_submodule(stack.path)) for name, module in models]
            stack.chain.require_shared(parts, stack_inputs)


def _accepted_inputs(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    parameters = inspect.signature(module.forward).parameters
    return {name: value for name, value in inputs.items() if name in parameters}


NAME = "seq2seq"


def seq2seq_chain(whole: Any, example: Mapping[str, Tensor]) -> tuple[LayerChain, LmHeadSpec | None]:
    """Return the layers of an encoder-decoder, which may be on meta, and its language-model head, if any.

    `example` is a batch as its processor makes it.
    """
    if any(name.endswith("experts") for name, _ in whole.named_modules()):
        raise _not_seq2seq(whole, "its blocks mix experts")
    parts = _EncoderDecoderRunner(whole, example)
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    return parts.chain(), None if head is None else _trace_language_model_head(whole, parts, head)


_not_seq2seq = partial(not_causal_error, hint=LIVE, kind="an encoder-decoder")


def _trace_language_model_head(whole: Any, parts: _EncoderDecoderRunner, head: Any) -> LmHeadSpec:
    """Find the head, its input scale, its bias and the steps after it, by passes with random features."""
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        raise _not_seq2seq(whole, f"its head is a {type(head).__name__}; expected a linear map")
    place = module_path(whole, head)
    cores = tuple((whole.get_submodule(stack.path), stack.answer) for stack in parts.stacks)
    after_head = _PostHeadSteps(whole, cores, head, (parts.reads, "decoder_input_ids"))
    numbers = torch.Generator().manual_seed(0)

    def random_vectors(width: int) -> Tensor:
        return torch.randn(2, 1, width, generator=numbers, dtype=torch.float64)

    features, outputs = random_vectors(head.in_features), random_vectors(head.out_features)
    inputs: list[Tensor] = []

    def fixed_head_output(entered: Tensor) -> Tensor:
        inputs.append(entered)
        return outputs

    scores = after_head.scores_of_features(features, fixed_head_output)
    # T5 scales features before a tied head; the ratio of random features shows by how much.
    scale = float((inputs[0] / features).median())
    if not torch.allclose(inputs[0], features * scale, rtol=1e-12, atol=0):
        raise _not_seq2seq(whole, "its head does not read a multiple of its decoder's output")
    bias = "" if head.bias is None else f"{place}.bias"
    inside = tuple(f"{path}." for path in (*(stack.path for stack in parts.stacks), place))
    # A weight outside the stacks that shifts every score is a bias, such as final_logits_bias of BART.
    for key, value in named_weights(whole).items():
        if key.startswith(inside) or key in parts.tied:
            continue
        shift = random_vectors(value.numel())[0]
        shifted = after_head.scores_of_features(features, fixed_head_output, {key: shift.reshape(value.shape)})
        if torch.equal(shifted, scores):
            continue
        if bias or value.numel() != head.out_features or not torch.equal(shifted, outputs + shift):
            raise _not_seq2seq(whole, f"its scores depend on {key!r}, which is no bias")
        bias, scores = key, outputs
    key = parts.tied.get(f"{place}.weight", (f"{place}.weight",))[0]
    lm = LmHeadSpec(key=key, head=f"{place}.weight", bias=bias, scale=scale)
    if torch.equal(scores, outputs):
        return lm
    if not after_head.can_reproduce_scores(outputs[:, 0], scores[:, 0]):
        raise _not_seq2seq(whole, _NOT_ELEMENTWISE)
    return replace(lm, after_head=after_head, slope=_score_slope_bound(after_head, head.out_features))


class _HfSeq2Seq:
    """The adapter of encoder-decoders of transformers."""

    name = NAME
    holds = ("config.is_encoder_decoder",)

    def matches(self, module: nn.Module) -> bool:
        """Return True if the configuration says encoder-decoder and the module has both as modules."""
        return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False)) and all(
            isinstance(getattr(module, f"get_{stack}", lambda: None)(), nn.Module) for stack in ("encoder", "decoder")
        )

    def chain(self, module: nn.Module) -> LayerChain:
        """Return the layers of a model; keys are those of `module.state_dict()`."""
        return seq2seq_chain(module, _EXAMPLE)[0]


adapters.register(NAME)(_HfSeq2Seq())

# Adapters have no tokenizer. One row of each stream is padded, so that blocks are traced with masks.
_EXAMPLE = {
    "input_ids": torch.zeros(2, 3, dtype=torch.long),
    "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "decoder_input_ids": torch.zeros(2, 2, dtype=torch.long),
    "decoder_attention_mask": torch.tensor([[1, 0], [1, 1]]),
}


def _load_seq2seq(request: ArchitectureRequest, loader: str) -> Architecture:
    """Return the architecture of an encoder-decoder that answers texts by text; its source is a folder or Hub id."""
    source, offline = request.source, request.access.offline
    expected = "a text-to-text encoder-decoder"
    stated, skeleton = build_language_model(
        request, loader, is_seq2seq, expected, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
    )
    config = skeleton.config
    # For files of any version, T5 keeps here whether its head is its embeddings: in memory it is always tied.
    _tie_weights(skeleton, request.untied or getattr(config, "scale_decoder_outputs", True) is False)
    computed = _compute_unsaved_tables(skeleton)
    preprocess = hf_text_preprocess(source, config, offline, "encoder-decoder")
    chain, lm = seq2seq_chain(skeleton, _EXAMPLE)
    return Architecture(
        loader=loader,
        source=source,
        skeleton=skeleton,
        chain=replace(chain, modality=replace(TEXT, pool="last")),
        layout=_checkpoint_layout(skeleton, chain, computed),
        preprocess=preprocess,
        folder=text_folder_format(stated, "AutoModelForSeq2SeqLM"),
        lm=lm,
    )


# `hf-t5` accepts only T5 v1.0 and v1.1 (FLAN).
for _loader in ("hf-seq2seq", "hf-t5"):
    loaders.register(_loader)(update_wrapper(partial(_load_seq2seq, loader=_loader), _load_seq2seq))


def _tie_weights(skeleton: Any, is_apart: bool) -> None:
    """Tie the weights that the library ties when it loads a file; with `is_apart`, all except the head's."""
    head = skeleton.get_output_embeddings()
    skeleton.tie_weights()
    if is_apart:
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


def _compute_unsaved_tables(skeleton: Any) -> tuple[str, ...]:
    """Compute the tables that the library never saves (Marian's positions), and return their keys."""
    # On meta, these tables have no values, and no file has them either.
    unsaved = set(getattr(skeleton, "_keys_to_ignore_on_save", None) or ()) & skeleton.state_dict().keys()
    for key in unsaved:
        owner, _, leaf = key.rpartition(".")
        module = skeleton.get_submodule(owner).to_empty(device="cpu")
        skeleton._init_weights(module)
        value = module._parameters.pop(leaf).detach()
        module.register_buffer(leaf, value, persistent=False)
    return tuple(unsaved)


def _checkpoint_layout(skeleton: Any, chain: LayerChain, computed: tuple[str, ...]) -> KeyLayout:
    """Return the key layout of checkpoint files, which store tied weights under one name or several."""
    copies = {key: aliases[0] for key, aliases in chain.tied.items() if key != aliases[0]}
    plain = {key: name for key, name in saved_key_names(skeleton).items() if key not in copies}
    names = [plain, *({**plain, same: copy} for copy, same in copies.items())]
    return KeyLayout(names, (*copies, *computed), ignored_key_patterns(skeleton), is_lenient=True)
