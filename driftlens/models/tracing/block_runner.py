"""`BlockRunner`, the one way through a model: each of its blocks as a function of parameters and features.

One ordinary forward pass records how the model calls its blocks. After that, the stem, each block and the head run
alone, with the weights of any model of this structure, through `torch.func.functional_call`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from driftlens.models.chain import Parameters, SideInputs, Site, State, Tap, WeightSlot
from driftlens.models.tracing.block_call import (
    SHARED_STATES,
    BlockCall,
    ForwardRecording,
    Mask,
    RawInputs,
    call_with_weights,
    eval_mode,
    find_features,
    first_tensor,
    map_leaves,
    output_features,
    padding_mask,
    raw_inputs,
    record_calls,
    replace_forwards,
    replace_outputs,
    restore_shape,
    run_until_module,
    simulate_meta_blocks,
    zero_out_padding,
)
from driftlens.models.tracing.block_sites import (
    BLOCK_ITSELF,
    expert_mixture,
    fused_tensor,
    is_channels_last,
    parameter_slot,
    site_kind,
    sites_in_block,
    tap_experts,
    tap_sites,
)
from driftlens.utils.devices import to_device
from driftlens.utils.errors import IncompatibleModelsError


class _ComputedArgument(nn.Module):
    """A block argument that the encoder computes from weights alone, such as a relative position bias.

    `names` maps names of these weights in the whole model to those in this module; `reads` gives the arguments of the
    method for features of the right shape.
    """

    def __init__(
        self,
        encoder: nn.Module,
        method: str,
        reads: Callable[[Tensor], tuple[Any, ...]],
        names: dict[str, str],
    ) -> None:
        super().__init__()
        self.encoder, self.method, self.reads, self.names = encoder, method, reads, names

    def forward(self, hidden: Tensor) -> Any:
        return getattr(self.encoder, self.method)(*self.reads(hidden))

    def compute_argument(self, parameters: Parameters, hidden: Tensor) -> Any:
        """Compute the argument with one model's parameters, by their names in the whole model."""
        return call_with_weights(self, {name: parameters[key] for key, name in self.names.items()}, (hidden,), {})


def _arguments_from_outer_weights(module: nn.Module, block: nn.Module) -> dict[str, _ComputedArgument | None]:
    """Return the block arguments that are computed from weights outside the blocks, by name or position.

    None stands for an argument that blocks compute themselves if it is None.
    """
    # By keyword in DeBERTa, by position in MPNet and T5.
    rules: tuple[tuple[str, str, tuple[str, ...], Callable[[Tensor], tuple[Any, ...]]], ...] = (
        ("rel_embeddings", "get_rel_embedding", ("rel_embeddings", "LayerNorm"), lambda _: ()),
        ("2", "compute_position_bias", ("relative_attention_bias",), lambda hidden: (hidden,)),
        ("2", "compute_bias", ("relative_attention_bias",), lambda hidden: (hidden.shape[1],) * 2),
    )
    places = list(signature(block.forward).parameters)
    tables = sum(hasattr(part, "relative_attention_bias") for part in module.modules())
    if tables != 1 or places[2:3] != ["position_bias"]:
        rules = rules[:1]
    for path, part in module.named_modules():
        for argument, method, owners, reads in rules:
            if not hasattr(part, method) or not isinstance(getattr(part, owners[0], None), nn.Embedding):
                continue
            inside = [(name, getattr(part, name, None)) for name in owners]
            names = {
                f"{path}.{name}.{leaf}".lstrip("."): f"encoder.{name}.{leaf}"
                for name, owner in inside
                if isinstance(owner, nn.Embedding | nn.LayerNorm)
                for leaf, _ in owner.named_parameters()
            }
            computed: dict[str, _ComputedArgument | None] = {argument: _ComputedArgument(part, method, reads, names)}
            # Attention to the encoder has no table: the block itself makes zeros.
            if "encoder_decoder_position_bias" in places:
                computed[str(places.index("encoder_decoder_position_bias"))] = None
            return computed
    return {}


class BlockRunner:
    """Runs the stem, each block and the head of a model alone, as functions of parameters and features.

    Args:
        module: the module, with weights or on meta.
        blocks: path -> block, in forward order.
        mask: see `block_call.Mask`.
        final: path of the module after all blocks whose output is the final feature, or whose input is if it computes
            the scores of a language model; "" for the output of the model.
        beside: raw input -> name of the stream of features of other tokens that it is, which blocks read.
        reads_last: True if `final` is given the output of the last block without further steps.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        mask: Mask = None,
        final: str = "",
        beside: Mapping[str, str] = MappingProxyType({}),
        reads_last: bool = True,
    ) -> None:
        self.module = module
        self.mask = mask
        self.final, self.reads_last = final, reads_last
        scores = getattr(module, "get_output_embeddings", lambda: None)()
        self.is_past = not final or module.get_submodule(final) is not scores
        self.beside = beside
        self.paths = list(blocks)
        self.blocks = list(blocks.values())
        self.computed = _arguments_from_outer_weights(module, self.blocks[0])
        self.computed_keys = sorted({key for entry in self.computed.values() if entry for key in entry.names})
        self.carries = any(_has_state_arguments(block) for block in self.blocks)
        self.streams = num_streams(self.blocks[0])
        self.mixtures = [expert_mixture(block) for block in self.blocks]
        self._calls: list[BlockCall] | None = None
        self.slots = [self._block_slots(position) for position in range(len(self.blocks))]
        # Of features at the boundaries 0..L - 1, until a forward pass shows what reads them.
        convolves = any(isinstance(part, _ConvNd) for block in self.blocks for part in block.modules())
        self.channels_last = [not convolves] * (len(self.blocks) + 1)
        self._knows_layouts = False
        self._beside_at: list[dict[str, str]] | None = None
        self._fixed: list[frozenset[str]] | None = None
        self._forms: dict[str, Any] = {}

    def outer_weights(self) -> dict[str, Tensor]:
        """Return the weights outside the blocks by name."""
        inside = tuple(f"{path}." for path in self.paths)
        return {name: value for name, value in named_weights(self.module).items() if not name.startswith(inside)}

    def _block_slots(self, position: int) -> dict[str, WeightSlot]:
        """Return the checkpoint slot of each weight of a block."""
        block, path = self.blocks[position], self.paths[position]
        prefix = "" if site_kind(block) is None else f"{BLOCK_ITSELF}."
        mixture = self.mixtures[position]
        experts = {} if mixture is None else mixture.expert_slots(lambda name: f"{path}.{name}")
        stacked = {slot.key for slot in experts.values()}
        return {
            f"{prefix}{name}": parameter_slot(block, name, key)
            for name in named_weights(block)
            if (key := f"{path}.{name}") not in stacked
        } | experts

    def parameter_slots(self, position: int) -> dict[str, WeightSlot]:
        """Return the checkpoint slots of a block's parameters, with outer weights that its arguments depend on."""
        slots = self.slots[position]
        return slots | {key: WeightSlot(key) for key in self.computed_keys if WeightSlot(key) not in slots.values()}

    def initial_state(self, inputs: Any) -> tuple[State, SideInputs]:
        """Return the state at boundary 0 (floating-point inputs) and the side inputs (masks, positions) of a batch."""
        named = raw_inputs(inputs)
        calls = self._calls
        if calls is None:
            calls = (
                self._record_calls_on_meta(named)
                if self.is_on_meta
                else self._record_forward_pass(self.module, named).calls
            )
            calls = self._replace_stream_copies(calls, named)
        state = {
            name: value
            for name, value in named.values.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
        }
        return state, SideInputs.from_calls(self.paths, calls, named, padding_mask(named, self.mask))

    def _replace_stream_copies(self, calls: list[BlockCall], inputs: RawInputs) -> list[BlockCall]:
        """Replace copies of encoder features among block arguments by the raw input tensors themselves."""
        if not self.beside:
            return calls
        if self._beside_at is None:
            self._beside_at = [
                {
                    name: stream
                    for name, tensor in block_call.tensors.items()
                    for stream in reversed(list(self.beside))
                    if is_bit_identical(tensor, inputs.values[stream])
                }
                for block_call in calls
            ]

        def replace_by_stream(streams: Mapping[str, str], leaf: Any, name: str) -> Any:
            return inputs.values[streams[name]] if name in streams else leaf

        pairs = zip(calls, self._beside_at, strict=True)
        return [block_call.map_leaves(partial(replace_by_stream, streams)) for block_call, streams in pairs]

    @property
    def is_on_meta(self) -> bool:
        """True if the weights of the module are on meta."""
        return next((weight.is_meta for weight in self.module.parameters()), False)

    def find_sites(
        self,
        position: int,
        weights: Mapping[str, Tensor],
        state: State,
        side: SideInputs,
        streams: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[tuple[Site, ...], State]:
        """Find the calibratable sites of a block by running it; return them and the state after the block.

        Args:
            position: the block's number, counted from 0.
            weights: the weights of the whole model by name.
            state: the state before the block.
            side: the side inputs of the batch.
            streams: features of other tokens that the block reads, by the name of their stream.
        """
        device = state["hidden"].device
        parameters = {
            name: slot.to_layer_layout(slot.take_rows(weights[slot.key].detach()).to(device))
            for name, slot in self.parameter_slots(position).items()
        }
        alone = partial(BlockRunner.run_block, self, position, (), parameters, state, side)
        with self._replace_mixtures_on_meta():
            sites, after = sites_in_block(self.blocks[position], self.slots[position], alone, state, streams)
        mixture = self.mixtures[position]
        return sites if mixture is None else (*sites, *mixture.expert_sites()), after

    @contextmanager
    def _replace_mixtures_on_meta(self) -> Iterator[None]:
        """Let mixtures of experts on meta return a tensor of their input's shape, because routing needs values."""
        modules = [mixture.module for mixture in self.mixtures if mixture is not None and self.is_on_meta]
        forwards = [
            (module, lambda *args, **kwargs: torch.empty_like(find_features("a mixture", args, kwargs)[1]))
            for module in modules
        ]
        with replace_forwards(forwards):
            yield

    def stand_in_weights(
        self, device: torch.device, number: float = 0.0, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the weights outside the blocks; those on meta are replaced by a constant."""
        # Expanded, so that tables of a large vocabulary take no memory.
        return {
            name: torch.full((), number, device=device, dtype=dtype).expand(weight.shape)
            if weight.is_meta
            else weight.detach()
            for name, weight in self.outer_weights().items()
        }

    def _record_calls_on_meta(self, inputs: RawInputs) -> list[BlockCall]:
        """Record the calls of blocks on meta; reuse them for later batches if blocks receive features alone."""
        device = next(value.device for value in inputs.values.values() if isinstance(value, Tensor))
        # At first, two passes with different numbers as weights: an argument that differs depends on weights.
        numbers = (0.0, 1.0) if self._fixed is None else (0.0,)
        recorded, *others = [
            self._record_calls_with_weights(inputs, self.stand_in_weights(device, number)) for number in numbers
        ]
        for other in others:
            if place := _first_differing_key(self._tensor_arguments(recorded), self._tensor_arguments(other)):
                raise IncompatibleModelsError(
                    f"block {place[0]!r} is given {place[1]!r}, which is computed from weights; expected the same for "
                    "all models",
                    hint="Use this family's own loader, or live modules that compute it inside each block.",
                )
        if self._fixed is None:
            self._fixed = self._fixed_dtype_arguments(inputs, device)
        recorded = [replace(call, fixed=fixed) for call, fixed in zip(recorded, self._fixed, strict=True)]
        # Calls are reused only if all inputs are floats: a batch of tokens may lack the mask that another has.
        values = inputs.values.values()
        if all(isinstance(x, Tensor) and x.is_floating_point() for x in values):
            self._calls = None if any(block_call.tensors for block_call in recorded) else recorded
        return recorded

    def _fixed_dtype_arguments(self, inputs: RawInputs, device: torch.device) -> list[frozenset[str]]:
        """Return, for each block, the arguments that stay float32 in a float64 pass, such as rotary tables."""
        try:
            calls = self._record_calls_with_weights(inputs, self.stand_in_weights(device, dtype=torch.float64))
        # A forward function that fails in float64 is not used in float64 either.
        except Exception:
            return [frozenset()] * len(self.blocks)
        tensors = [block_call.tensors if block_call.dtype == torch.float64 else {} for block_call in calls]
        return [frozenset(name for name, x in arguments.items() if x.dtype == torch.float32) for arguments in tensors]

    def _record_calls_with_weights(self, inputs: RawInputs, outer: Mapping[str, Tensor]) -> list[BlockCall]:
        with self._replace_blocks_on_meta():
            return self._record_forward_pass(self.module, inputs, past=self.blocks[-1], outer=outer).calls

    @contextmanager
    def _replace_blocks_on_meta(self) -> Iterator[None]:
        blocks = dict(zip(self.paths, self.blocks, strict=True))
        with self._replace_mixtures_on_meta(), simulate_meta_blocks(blocks, self._forms):
            yield

    def model_output(self, inputs: Any) -> Any:
        """Run the whole model on a batch and return its output; blocks on meta return zeros."""
        named = raw_inputs(inputs)
        if not self.is_on_meta:
            return run_model(self.module, named)
        device = next(value.device for value in named.values.values() if isinstance(value, Tensor))
        with self._replace_blocks_on_meta():
            return run_model(self.module, named, self.stand_in_weights(device))

    def run_stem(self, parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        """Run the model up to its first block and return the state before that block."""
        args, kwargs = side.raw_inputs().arguments(state)
        return self._state_before_block(0, partial(call_with_weights, self.module, parameters, args, kwargs), side)

    def _state_before_block(self, position: int, whole: Callable[[], Any], side: SideInputs) -> State:
        """Return the state before a block, by running the model with `whole` up to there."""
        block, mask = self.blocks[position], side.mask("hidden")
        if not self.carries:
            return {"hidden": self._features_for_state(position, run_until_module(block, whole), mask)}
        # The blocks' other inputs come from a pass in which each block returns its features unchanged.
        calls = [side.block_call(index) for index in range(position, len(self.blocks))]
        passing = [
            (block, lambda hidden, *_, block_call=block_call, **__: block_call.wrap_output(hidden))
            for block, block_call in zip(self.blocks[position:], calls, strict=True)
        ]
        with replace_forwards(passing), record_block_inputs(self.blocks[position:], mask) as entered:
            hidden = run_until_module(self.blocks[-1], whole, past=True)
        return {
            **state_from_inputs(position, [*[{}] * position, *entered]),
            "hidden": self._features_for_state(position, hidden, mask),
        }

    def run_block(
        self,
        position: int,
        sites: tuple[Site, ...],
        parameters: Parameters,
        state: State,
        side: SideInputs,
        tap: Tap | None = None,
    ) -> State:
        """Run one block and return the state after it.

        Args:
            position: the block's number, counted from 0.
            sites: its sites.
            parameters: its parameters by its own names.
            state: the state before the block.
            side: the side inputs of the batch.
            tap: called for each site; see `chain.Tap`.
        """
        block = self.blocks[position]
        # A copy, because blocks may write into their input (residual sums, in-place activations).
        hidden = self._features_for_blocks(state["hidden"], side).clone()
        positional, kwargs = side.block_call(position).arguments(hidden)
        args: list[Any] = list(positional)
        for name, argument in self.computed.items():
            owner: Any = args if name.isdecimal() else kwargs
            place: Any = int(name) if name.isdecimal() else name
            # A position without an argument: the block has the weights itself.
            if name in kwargs or (owner is args and args[place] is not None):
                owner[place] = argument and argument.compute_argument(parameters, state["hidden"])
        shared = set_state_arguments(block, position, state, args, kwargs) if self.carries else {}
        path, slots = self.paths[position], self.slots[position]
        weights, stacks = dict[str, Tensor](), defaultdict[str, list[str]](list)
        for name, slot in slots.items():
            if slot.is_stacked:
                stacks[slot.key.removeprefix(f"{path}.")].append(name)
            else:
                weights[slot.key.removeprefix(f"{path}.")] = slot.to_stored_layout(parameters[name])
        for stack, names in stacks.items():
            weights[stack] = fused_tensor([slots[name] for name in names], [parameters[name] for name in names])
        mixed = tap_experts(self.mixtures[position], weights, sites, tap, side.routes)
        with tap_sites(block, [site for site in sites if site.expert is None], tap), mixed:
            hidden = output_features(path, call_with_weights(block, weights, tuple(args), kwargs))
        mask = side.mask("hidden")
        beside = _state_arguments_after_block(position, self.blocks, state, shared, mask)
        return {**beside, "hidden": self._features_for_state(position + 1, hidden, mask)}

    def run_head(self, parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        """Run the modules after the last block on its features and return the model's output."""
        # The stem runs too, because a head may read its output, unless `final` is the whole head.
        if self.final and self.reads_last:
            own, prefix = parameters.items(), f"{self.final}."
            weights = {name.removeprefix(prefix): x for name, x in own if name.startswith(prefix)}
            output = call_with_weights(self.module.get_submodule(self.final), weights, (state["hidden"],), {})
            return {"hidden": self._model_output_features(output, side.mask("hidden"))}
        args, kwargs = side.raw_inputs().arguments({})
        calls = [side.block_call(position) for position in range(len(self.blocks))]
        hidden = restore_shape(self._features_for_blocks(state["hidden"], side).clone(), calls[-1].left)
        # Other weights do not affect the steps after the blocks, but the stem needs some to run again.
        if self.final:
            zero, outer = hidden.new_zeros(()), self.outer_weights()
            parameters = {name: zero.expand(weight.shape) for name, weight in outer.items()} | dict(parameters)
        past = self.module.get_submodule(self.final) if self.final else None
        whole = partial(call_with_weights, self.module, parameters, args, kwargs)
        with replace_outputs(
            (block, call.wrap_output(hidden)) for block, call in zip(self.blocks, calls, strict=True)
        ):
            output = whole() if past is None else run_until_module(past, whole, past=self.is_past)
        return {"hidden": self._model_output_features(output, side.mask("hidden"))}

    def library_states(self, module: nn.Module, inputs: Any) -> list[State]:
        """Return the states at boundaries 1..L of one ordinary forward pass of `module`."""
        named = raw_inputs(inputs)
        mask = padding_mask(named, self.mask)
        past = module.get_submodule(self.final) if self.final else None
        blocks = [module.get_submodule(path) for path in self.paths if self.carries]
        with record_block_inputs(blocks, mask) as entered:
            recording = self._record_forward_pass(module, named, keep=True, past=past)
        states = [
            {**state_from_inputs(boundary, entered), "hidden": self._features_for_state(boundary, x, mask)}
            for boundary, x in enumerate(recording.features)
        ]
        return [*states, {"hidden": self._model_output_features(recording.output, mask)}]

    def require_same_arguments(self, models: Iterable[tuple[str, nn.Module]], inputs: Any) -> None:
        """Raise if the blocks' arguments other than features (masks, positions) differ between models.

        Arguments are recorded from one model and passed to all. This is right for masks, positions and rotary tables,
        and wrong for tensors computed from weights: an encoder's output, a position bias, an embedding of a condition.
        """
        reference, expected = "", dict[tuple[str, str], Tensor]()
        for name, module in models:
            arguments = self._tensor_arguments(self._record_forward_pass(module, raw_inputs(inputs)).calls)
            reference, expected = (reference, expected) if reference else (name, arguments)
            if place := _first_differing_key(expected, arguments):
                raise IncompatibleModelsError(
                    f"block {place[0]!r} is given {place[1]!r}, which is computed from weights and differs between "
                    f"{reference} and {name}; expected the same for all models",
                    hint="Wrap the model so that this is part of the features or computed inside each block, or "
                    "set `blocks` to the path of another list.",
                )

    def _tensor_arguments(self, calls: Iterable[BlockCall]) -> dict[tuple[str, str], Tensor]:
        """Return the tensors that blocks are given next to features, by block and argument."""
        return {
            (path, argument): tensor
            for path, block_call in zip(self.paths, calls, strict=True)
            for argument, tensor in block_call.tensors.items()
            if argument not in self.computed
        }

    def _features_for_blocks(self, hidden: Tensor, side: SideInputs) -> Tensor:
        """Return features in the layout that blocks read, with parallel streams split and padding zeroed."""
        if self.streams == 1:
            return hidden
        return split_streams(zero_out_padding(self.paths[0], hidden, side.mask("hidden")), self.streams)

    def _features_for_state(self, boundary: int, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return features as the state stores them: [n, h, w, c] as tokens, with zeros in the rows of padding."""
        if hidden.dim() > 3 and self.streams > 1:
            hidden = _join_streams(hidden)
        if hidden.dim() > 3 and self.channels_last[boundary]:
            hidden = hidden.flatten(1, -2)
        return zero_out_padding(self.paths[max(boundary - 1, 0)], hidden, mask)

    def _model_output_features(self, output: Any, mask: Tensor | None) -> Tensor:
        """Return the features that a model returns, with zeros at padding if they are of the same tokens."""
        features = first_tensor(output)
        is_masked = mask is not None and features.shape[:2] == mask.shape
        return self._features_for_state(len(self.blocks), features, mask if is_masked else None)

    def _record_forward_pass(
        self,
        module: nn.Module,
        inputs: RawInputs,
        *,
        keep: bool = False,
        past: nn.Module | None = None,
        outer: Parameters | None = None,
    ) -> ForwardRecording:
        """Record an ordinary forward pass of `module`, up to the output of `past`; see `record_calls`."""
        forward = self._forward_pass_function(module, inputs, past, outer)
        blocks = {path: module.get_submodule(path) for path in self.paths}
        recording = record_calls(blocks, forward, keep=keep)
        if not self._knows_layouts:
            shapes = [recording.calls[0].entered, *(block_call.left for block_call in recording.calls)]
            passed = list(module.modules())
            last = passed.index(list(blocks[self.paths[-1]].modules())[-1])
            reading = [*(block.modules() for block in blocks.values()), passed[last + 1 :]]
            for boundary, (shape, modules) in enumerate(zip(shapes, reading, strict=True)):
                # Features that no module reads have the layout of the block before.
                if len(shape) > 2:
                    otherwise = self.channels_last[max(boundary - 1, 0)]
                    self.channels_last[boundary] = is_channels_last(shape, modules, otherwise)
            self._knows_layouts = True
        return self._remove_state_arguments(recording)

    def _forward_pass_function(
        self, module: nn.Module, inputs: RawInputs, past: nn.Module | None, outer: Parameters | None
    ) -> Callable[[], Any]:
        """Return a function that runs a module, with other weights if given, up to the output of `past` if given."""
        whole = partial(run_model, module, inputs, outer)
        if past is None:
            return whole
        # The final feature is the input of a module that computes scores.
        is_scores = bool(self.final) and past is module.get_submodule(self.final) and not self.is_past
        return partial(run_until_module, past, whole, past=not is_scores)

    def _remove_state_arguments(self, recording: ForwardRecording) -> ForwardRecording:
        if self.carries:
            pairs = zip(recording.calls, self.blocks, strict=False)
            recording.calls = [_without_state_arguments(block_call, block) for block_call, block in pairs]
        return recording


def is_bit_identical(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True if two tensors have the same shape and are bit-identical, NaN included."""
    if one is None or other is None or one.shape != other.shape:
        return False
    # Not `torch.equal`, for which NaN differs from itself. Outputs that overflow alike are the same.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _first_differing_key(
    one: Mapping[tuple[str, str], Tensor], other: Mapping[tuple[str, str], Tensor]
) -> tuple[str, str] | None:
    return next((key for key in {**one, **other} if not is_bit_identical(one.get(key), other.get(key))), None)


def is_view(one: Any, other: Tensor) -> bool:
    """Return True if one tensor shares the storage of the other."""
    return isinstance(one, Tensor) and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def run_model(module: nn.Module, inputs: RawInputs, weights: Parameters | None = None) -> Any:
    """Run a model on raw inputs in eval mode, without gradients, and return its output.

    Args:
        module: the module.
        inputs: raw inputs, which are moved and cast by `move_to_module`.
        weights: replace the module's own, all of one dtype, to which inputs are cast; None keeps its own.
    """
    args, kwargs = move_to_module(module, inputs.arguments({}))
    if weights:
        dtype = next(iter(weights.values())).dtype
        args, kwargs = map_leaves((args, kwargs), lambda value: _cast_float_tensor(value, dtype))
    with torch.no_grad(), eval_mode(module):
        return module(*args, **kwargs) if weights is None else call_with_weights(module, weights, args, kwargs)


def _cast_float_tensor(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def move_to_module(module: nn.Module, inputs: Any) -> Any:
    """Move raw inputs to the device of a module, and cast floating-point inputs to its dtype."""
    # While weights are streamed, those of blocks are loaded last, so the first one may still be on meta.
    weight = next((weight for weight in _float_weights(module) if not weight.is_meta), None)
    if weight is None:
        return inputs

    def move_and_cast(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return to_device(value, weight.device, weight.dtype if value.is_floating_point() else None)

    return map_leaves(inputs, move_and_cast)


def _float_weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield floating-point parameters and saved buffers, without the cost of names."""
    for part in module.modules():
        passing = part._non_persistent_buffers_set
        buffers = [value for name, value in part._buffers.items() if name not in passing]
        for value in (*part._parameters.values(), *buffers):
            if value is not None and value.is_floating_point():
                yield value


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return floating-point parameters and saved buffers by `state_dict()` name; tied ones under each name."""
    saved = module.state_dict()
    return {
        name: value
        for path, part in module.named_modules()
        for leaf, value in [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        if (name := f"{path}.{leaf}" if path else leaf) in saved and value.is_floating_point()
    }


def tied_weights(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each tied weight, by each of its names."""
    names: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            # All tensors on meta have the pointer 0.
            place = id(value) if value.is_meta else value.data_ptr()
            names[place, value.shape, value.stride()].append(name)
    return {name: tuple(tied) for tied in names.values() if len(tied) > 1 for name in tied}


# Arguments of blocks that differ from model to model, and so are part of the state next to the features.
#
# Gemma 4 passes each block an input of its own, which its stem computes from tokens (embeddings per layer), and lets
# late blocks attend to keys and values of earlier ones. In the state, an input is `per_layer_input.<block>` [n, t, d]
# until its block has run; keys and values are `shared_kv_states.<kind>.<0 or 1>` [n, heads, t, d] until the last has.
#
# Gemma 3n passes its blocks several features of each token, AltUp's streams [s, n, t, d]. The state stores them as one
# feature [n, t, s d], so that drift is drift of all of them; the reshape changes no sum, norm or derivative.
LAYER_INPUT = "per_layer_input"
_NAMES = (LAYER_INPUT, SHARED_STATES)


def num_streams(block: nn.Module) -> int:
    """Return the number of parallel feature streams that a block reads (AltUp in Gemma 3n), usually 1."""
    config = getattr(getattr(block, "altup", None), "config", None)
    return int(getattr(config, "altup_num_inputs", 1))


def _join_streams(streams: Tensor) -> Tensor:
    """Return streams [s, n, t, d] as one feature per token, [n, t, s d]."""
    return streams.permute(1, 2, 0, 3).flatten(2)


def split_streams(hidden: Tensor, count: int) -> Tensor:
    """Split one feature per token, [n, t, s d], into streams [s, n, t, d]; inverts `_join_streams`."""
    return hidden.reshape(*hidden.shape[:2], count, -1).permute(2, 0, 1, 3).contiguous()


def _has_state_arguments(block: nn.Module) -> bool:
    """Return True if a block takes arguments that are part of the state."""
    return not set(_NAMES).isdisjoint(signature(type(block).forward).parameters)


def _without_state_arguments(block_call: BlockCall, block: nn.Module) -> BlockCall:
    args, kwargs = [*block_call.args], {**block_call.kwargs}
    for name in _NAMES:
        _set_argument(block, name, None, args, kwargs)
    return replace(block_call, args=tuple(args), kwargs=kwargs)


def _position_or_keyword(block: nn.Module, name: str, args: Sequence[Any]) -> int | str:
    names = list(signature(type(block).forward).parameters)[1:]  # of the class, as `forward` may be replaced
    index = names.index(name) if name in names else len(args)
    return index if index < len(args) else name


def _set_argument(block: nn.Module, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    place = _position_or_keyword(block, name, args)
    if isinstance(place, int):
        args[place] = value
    elif place in kwargs:
        kwargs[place] = value


def set_state_arguments(
    block: nn.Module, position: int, state: State, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Set the arguments of block number `position` that are part of the state, such as shared keys and values.

    Return keys and values by kind, to which the block may add.
    """
    shared: dict[str, Any] = {}
    for name, leaf in state.items():
        if name.startswith(f"{SHARED_STATES}."):
            kind = name.removeprefix(f"{SHARED_STATES}.").rpartition(".")[0]
            shared[kind] = (*shared.get(kind, ()), leaf)
    _set_argument(block, LAYER_INPUT, state.get(f"{LAYER_INPUT}.{position}"), args, kwargs)
    _set_argument(block, SHARED_STATES, shared, args, kwargs)
    return shared


def _state_arguments_after_block(
    position: int,
    blocks: Sequence[nn.Module],
    state: State,
    shared: Mapping[str, Any],
    mask: Tensor | None,
) -> State:
    """Return the state after a block without features: inputs of later blocks, and shared keys and values."""
    later = {f"{LAYER_INPUT}.{index}" for index in range(position + 1, len(blocks))}
    inputs = {name: leaf for name, leaf in state.items() if name in later}
    return inputs | _shared_keys_and_values(shared, blocks[position + 1 :], mask)


def _shared_keys_and_values(shared: Mapping[str, Any], readers: Sequence[nn.Module], mask: Tensor | None) -> State:
    # Blocks add their keys and values even if no later block reads them. In the state, these would be streams whose
    # drift is measured.
    if not any(getattr(part, "is_kv_shared_layer", False) for block in readers for part in block.modules()):
        return {}
    hidden = None if mask is None else mask[:, None, :, None]
    return {
        f"{SHARED_STATES}.{kind}.{index}": _zero_padding(leaf, hidden)
        for kind, pair in shared.items()
        for index, leaf in enumerate(pair)
    }


def _zero_padding(leaf: Tensor, mask: Tensor | None) -> Tensor:
    return leaf if mask is None else leaf.masked_fill(~mask, 0)


@contextmanager
def record_block_inputs(blocks: Sequence[nn.Module], mask: Tensor | None) -> Iterator[list[State]]:
    """Yield a list that receives each block's state arguments, such as shared keys and values, when it runs."""
    entered: list[State] = []

    def record_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = [_position_or_keyword(block, name, args) for name in _NAMES]
        value, shared = (args[place] if isinstance(place, int) else kwargs.get(place) for place in places)
        inputs = {}
        if value is not None:
            inputs[LAYER_INPUT] = _zero_padding(value, None if mask is None else mask[..., None])
        entered.append(inputs | _shared_keys_and_values(shared or {}, blocks[len(entered) :], mask))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(record_arguments, with_kwargs=True, prepend=True).remove)
        yield entered


def state_from_inputs(position: int, entered: Sequence[State]) -> State:
    """Return the state before a block, without features, from the list of recorded block inputs."""
    inputs = {
        f"{LAYER_INPUT}.{index}": state[LAYER_INPUT]
        for index, state in enumerate(entered)
        if index >= position and LAYER_INPUT in state
    }
    now = entered[position] if position < len(entered) else {}
    return inputs | {name: leaf for name, leaf in now.items() if name != LAYER_INPUT}
