"""Calls of blocks: their arguments without the features, and ways to record, replace or skip them while a module runs.

`record_calls` records a `BlockCall` per block and batch. `chain.SideInputs` stores the calls of a batch: tensors
(masks, positions, rotary tables) under readable names (`blocks.0.mask`, `inputs.tokens`), calls with references to
these names.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from driftlens.utils.devices import to_device
from driftlens.utils.errors import SpecError

# Argument of blocks of Gemma 4: a dictionary to which each block adds keys and values for later ones.
SHARED_STATES = "shared_kv_states"
OTHER_LIST = "Set `blocks` to the path of another list, or wrap the model so that each block reads the one before."


# A batch's entry, or what makes one of a batch: [n, t], true (or 1) where a token counts. None takes
# `attention_mask` where the batch has one; False says that nothing is padded.
Mask = str | Callable[[Any], Tensor] | Literal[False] | None

_REMEDY = (
    "Set `mask` to the name of an entry [n, t] of ones and zeros, a function from a batch to one, or False without "
    "padding."
)


@dataclass(frozen=True)
class BlockCall:
    """The recorded arguments of one call of a block, without the features.

    Attributes:
        args, kwargs: its arguments, with None in the place of the features.
        place: position or keyword of the features.
        rest: what the block returned after the features (a tuple or list), or None if it returned them alone.
        dtype: the features' dtype when the call was recorded.
        entered, left: the shapes of a sample's features that the block was given and that it returned.
        fixed: tensors among the arguments, by the names of `tensors`, which keep their dtype.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    rest: tuple[Any, ...] | list[Any] | None
    dtype: torch.dtype
    entered: torch.Size
    left: torch.Size
    fixed: frozenset[str] = frozenset()

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the recorded arguments of the block, with `hidden` as its features."""
        change = partial(self._match_device_and_dtype, hidden)
        args, kwargs = list(map_named_leaves(self.args, change)), map_named_leaves(self.kwargs, change)
        owner: Any = args if isinstance(self.place, int) else kwargs
        owner[self.place] = restore_shape(hidden, self.entered)
        return tuple(args), kwargs

    def wrap_output(self, hidden: Tensor) -> Any:
        """Put features into the structure (tensor or tuple) that the block returns."""
        if self.rest is None:
            return hidden
        return type(self.rest)(
            [hidden, *map_named_leaves(self.rest, partial(self._match_device_and_dtype, hidden), "output")]
        )

    def _match_device_and_dtype(self, hidden: Tensor, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Tensors that had the features' dtype when recorded get the dtype of `hidden`, so that a model recorded in
        # float32 can be computed in float64.
        follows = value.dtype == self.dtype and name not in self.fixed
        return value.to(hidden.device, hidden.dtype if follows else None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, features left out, by the argument's name or position."""
        return dict(_named_tensors({**dict(enumerate(self.args)), **self.kwargs}))

    def map_leaves(self, change: Callable[[Any, str], Any]) -> BlockCall:
        """Return a copy with `change(leaf, name)` in place of every leaf of the arguments."""
        args, kwargs = map_named_leaves(self.args, change), map_named_leaves(self.kwargs, change)
        return replace(self, args=args, kwargs=kwargs, rest=map_named_leaves(self.rest, change, "output"))


def restore_shape(hidden: Tensor, shape: torch.Size) -> Tensor:
    """Reshape features [n, t, d] to a block's own sample shape, if that has more axes."""
    return hidden.reshape(len(hidden), *shape) if hidden.dim() <= len(shape) else hidden


@dataclass(frozen=True)
class RawInputs:
    """The raw inputs of a batch by name: `input` for a tensor, the keys of a dict, the positions of a tuple."""

    values: Mapping[str, Any]
    by_keyword: bool

    def arguments(self, replaced: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the model: copies of the inputs, some replaced by name."""
        # Copies, because a stem may write into its input.
        values = {name: map_leaves(replaced.get(name, value), _clone_tensor) for name, value in self.values.items()}
        return ((), values) if self.by_keyword else (tuple(values.values()), {})

    def original_batch(self) -> Any:
        """Return the batch as the model takes it: a dict, a tensor or a tuple."""
        values = tuple(self.values.values())
        return dict(self.values) if self.by_keyword else values[0] if "input" in self.values else values


def raw_inputs(inputs: Any) -> RawInputs:
    """Return the inputs of a batch by name, given a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(inputs, Tensor):
        return RawInputs({"input": inputs}, by_keyword=False)
    if isinstance(inputs, Mapping):
        return RawInputs(dict(inputs), by_keyword=True)
    return RawInputs({str(position): value for position, value in enumerate(inputs)}, by_keyword=False)


def find_features(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Return the position or keyword of a block's features, the first tensor among its arguments, and the features."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor):
            return place, value
    raise SpecError(f"block {path!r} is called without a tensor", hint=OTHER_LIST)


def output_features(path: str, output: Any) -> Tensor:
    """Return the features in a block's output: the tensor, or the first entry of a tuple or list."""
    features = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(features, Tensor):
        return features
    raise SpecError(
        f"block {path!r} returns a {type(output).__name__}; expected a tensor or a tuple that starts with one",
        hint=OTHER_LIST,
    )


def first_tensor(output: Any) -> Tensor:
    """Return the features in a model's output: the tensor, or the first one in a tuple or dict."""
    entries = output.values() if isinstance(output, Mapping) else output
    for entry in entries if isinstance(entries, Iterable) and not isinstance(entries, Tensor) else [entries]:
        if isinstance(entry, Tensor):
            return entry
    raise SpecError(
        f"the model returns a {type(output).__name__} without a tensor",
        hint="Wrap the model so that it returns its features.",
    )


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _named_tensors(entry, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True)
class TensorReference:
    """The name of a tensor in `SideInputs`, in place of the tensor."""

    key: str


def store_tensor(tensors: dict[str, Tensor], value: Any, name: str, *, stateless: bool = True) -> Any:
    """Move a tensor to `tensors`, unless it is there already, and return a reference; return other values.

    Args:
        tensors: the tensors of the side inputs by name.
        value: a tensor or a plain value.
        name: its name in `tensors`.
        stateless: True to raise for values that carry state from call to call.
    """
    if not isinstance(value, Tensor):
        if stateless:
            _require_stateless(value, name)
        return value
    # Blocks share their masks and rotary tables; one copy of each is stored and moved to the device.
    key = next((key for key, tensor in tensors.items() if tensor is value), name)
    tensors[key] = value
    return TensorReference(key)


def _require_stateless(value: object, name: str) -> None:
    """Raise for values that may carry state: modules, and objects with tensors or a method `update`."""
    tensors = [] if isinstance(value, type) else list(_named_tensors(getattr(value, "__dict__", {})))
    if tensors or isinstance(value, nn.Module) or (hasattr(value, "update") and not isinstance(value, type)):
        raise SpecError(
            f"{name!r} is a {type(value).__name__}, which carries state; expected tensors and plain values next to "
            "features",
            hint="Disable it (use_cache=False for a key-value cache), or wrap the model so that blocks don't get it.",
        )


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of nested tuples, lists and dicts."""
    return map_named_leaves(value, lambda leaf, _: change(leaf))


def map_named_leaves(value: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """Apply `change` to every leaf of nested tuples, lists and dicts, and to the leaf's name.

    Args:
        value: nested tuples, lists and dicts.
        change: (leaf, its name) -> the new leaf.
        name: the name of `value`; those of leaves are paths such as `mask.0`.
    """
    before = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {key: map_named_leaves(entry, change, f"{before}{key}") for key, entry in value.items()}
    # Not subclasses: a named tuple could not be rebuilt from an iterator.
    if type(value) in (tuple, list):
        return type(value)(map_named_leaves(entry, change, f"{before}{place}") for place, entry in enumerate(value))
    return change(value, name)


def padding_mask(inputs: RawInputs, chosen: Mask) -> Tensor | None:
    """Return the mask [n, t], true where a token counts; None where all do."""
    if chosen is False:
        return None
    if isinstance(chosen, str) or chosen is None:
        name = chosen or "attention_mask"
        mask: Any = inputs.values.get(name)
    else:
        name, mask = "the result of `mask`", chosen(inputs.original_batch())
    if mask is None and chosen is None:
        return None
    is_mask = is_whole = False
    # Both answers in one tensor, because each `tolist` synchronizes with the device.
    if isinstance(mask, Tensor) and mask.dim() == 2:
        is_mask, is_whole = torch.stack([((mask == 0) | (mask == 1)).all(), (mask != 0).all()]).tolist()
    if not is_mask:
        described = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError(
            f"{name} is {described}; expected ones and zeros [n, t], one where a token counts",
            hint=f"{_REMEDY} The batch holds {', '.join(inputs.values)}.",
        )
    if is_whole:
        return None
    if chosen is None and any(entry.startswith("decoder_") for entry in inputs.values):
        raise SpecError(
            "the batch has tokens for an encoder and a decoder, so attention_mask is ambiguous",
            hint=_REMEDY,
        )
    tensors = (value for value in inputs.values.values() if isinstance(value, Tensor))
    return to_device(mask.bool(), next(tensors, mask).device)


def zero_out_padding(path: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Set features [n, t, ...] to zero where the mask marks padding; features [n, d] are unchanged.

    Args:
        path: the module that returned the features, for messages.
        hidden: the features.
        mask: [n, t], true where a token counts; None means everywhere.
    """
    if mask is None or hidden.dim() == 2:
        return hidden
    if hidden.shape[:2] != mask.shape:
        raise SpecError(
            f"the mask is {list(mask.shape)}, features at {path!r} are {list(hidden.shape)}; expected one entry per "
            "token",
            hint=_REMEDY,
        )
    return hidden.masked_fill(~mask.reshape(*mask.shape, *[1] * (hidden.dim() - 2)), 0)


def missing_mask_warning(inputs: RawInputs, pad_token: int | None) -> str | None:
    """Return a warning if a batch has no mask but its samples look padded, or None."""
    for name, tokens in inputs.values.items():
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            continue
        # An example batch of equal tokens is not padded.
        if tokens.dtype == torch.bool or tokens.shape[1] < 4 or bool((tokens == tokens[:1, :1]).all()):
            continue
        if pad_token is None:
            ends = (tokens[:, :3], tokens[:, -3:])
            padded = torch.stack([(end == end[:, :1]).all(dim=1) for end in ends])
        else:
            padded = torch.stack([tokens[:, 0] == pad_token, tokens[:, -1] == pad_token])
        count = int(padded.any(dim=0).sum())
        if count and (pad_token is not None or 1 < count < len(tokens)):
            return (
                f"{count} of {len(tokens)} samples look padded in {name!r}, but the batch has no attention_mask, so "
                f"padding counts. {_REMEDY}"
            )
    return None


# Settings of transformers' configurations while a module runs. A cache would carry features from pass to pass; fused
# experts support no float64.
_PLAIN = {"use_cache": False, "_experts_implementation": "eager"}
# Different numbers for tensors that depend on weights, so that a comparison of two passes finds them.
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Set a module and its submodules to eval mode, and restore the mode of each afterwards.

    Also switch off what depends on earlier passes or has no derivatives: the fused kernel of `nn.MultiheadAttention`
    (no forward mode), key-value caches and fused experts of transformers (no float64, no derivatives), and tensors
    computed from weights that modules cache (biases of timm's LeViT).
    """
    parts = _module_and_submodules(module)
    changes: list[tuple[Any, str, Any]] = [(part, "training", False) for part in parts if part.training]
    changes += _config_changes(parts, _PLAIN)
    changes += [
        (part, name, {})
        for part in parts
        # torch's own modules, most of a block, cache nothing. To skip them saves time on every call.
        if not type(part).__module__.startswith("torch.")
        for name, value in vars(part).items()
        if name.endswith("_cache") and isinstance(value, dict)
    ]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _temporarily_set_attributes(changes):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def eager_experts(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run the experts of a mixture one by one, because fused kernels do not support float64."""
    return _temporarily_set_attributes(
        _config_changes(_module_and_submodules(module), {"_experts_implementation": "eager"})
    )


def _module_and_submodules(module: nn.Module) -> dict[nn.Module, None]:
    """Return a module and its submodules in any order, several times as fast as `modules()`."""
    parts, waiting = dict[nn.Module, None](), [module]
    while waiting:
        if (part := waiting.pop()) not in parts:
            parts[part] = None
            waiting += [inner for inner in part._modules.values() if inner is not None]
    return parts


def _config_changes(parts: Iterable[nn.Module], plain: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    """List the config attributes of modules that differ from `plain`, as (config, name, new value)."""
    configs = {id(config): config for part in parts if (config := vars(part).get("config"))}
    return [
        (config, name, value)
        for config in configs.values()
        for name, value in plain.items()
        if getattr(config, name, None) not in (None, value)
    ]


@contextlib.contextmanager
def _temporarily_set_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move the weights and buffers of a module to a device, except those on meta."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def buffers_on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move all buffers of a module to a device, and restore them afterwards."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer.to(device)
        yield
    finally:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def call_with_weights(
    module: nn.Module, parameters: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module in eval mode with other parameters and saved buffers, without changing it.

    Args:
        module: the module.
        parameters: parameters and saved buffers by name; others keep their values.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    with eval_mode(module):
        # The weights of a model may be tied where those of the module are not, and the other way round.
        return functional_call(module, dict(parameters), args, dict(kwargs), tie_weights=False)


class _StopForward(BaseException):
    """Raised to end a forward pass at a module. Not an `Exception`, so that no handler in the model catches it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def run_until_module(module: nn.Module, run: Callable[[], object], *, past: bool = False) -> Tensor:
    """Run a model up to a module and return the features that enter it, or with `past` those that it returns.

    Args:
        module: the module at which the pass ends.
        run: runs the whole model.
        past: True to end the pass after the module.
    """

    def stop_forward_pass(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *_output: Any) -> None:
        raise _StopForward(
            output_features("the last", _output[0]) if past else find_features("the first", args, kwargs)[1]
        )

    before = partial(module.register_forward_pre_hook, prepend=True)
    try:
        with (module.register_forward_hook if past else before)(stop_forward_pass, with_kwargs=True):
            run()
    except _StopForward as reached:
        return reached.hidden
    raise SpecError("the model skipped one of its blocks", hint=OTHER_LIST)


@contextlib.contextmanager
def replace_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward functions of modules, and restore them afterwards."""
    with contextlib.ExitStack() as restored:
        # In the module's `__dict__`, as other instances of its class must keep theirs. It may be replaced already.
        for module, forward in forwards:
            before = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
            restored.callback(module.__dict__.update, before)
            restored.callback(module.__dict__.pop, "forward")
            module.__dict__["forward"] = forward
        yield


def simulate_meta_blocks(
    blocks: Mapping[str, nn.Module], forms: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Let blocks on meta take real features and return zeros in the structure of their output.

    So later blocks get the same arguments, except those computed from weights. `forms` caches the structures of blocks
    that keep their features' shape.
    """
    shared: dict[str, Any] = {}
    return replace_forwards(
        (block, partial(_run_block_on_meta, path, block, forms, shared)) for path, block in blocks.items()
    )


def _run_block_on_meta(
    path: str, block: nn.Module, forms: dict[str, Any], shared: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    features = find_features(path, args, kwargs)[1]
    if path in forms:
        return forms[path](features.new_zeros(features.shape))

    try:
        with buffers_on_device(block, torch.device("meta")):
            arguments, keywords = map_leaves((args, kwargs), lambda x: x.to("meta") if isinstance(x, Tensor) else x)
            # A block adds its keys and values for later blocks. `mapped` copies the dictionary, so they would be lost.
            if SHARED_STATES in keywords:
                keywords[SHARED_STATES] = shared
            output = type(block).forward(block, *arguments, **keywords)
    # Raised for a block that reads numbers, such as the lengths of packed sequences. It runs with zeros as weights.
    except NotImplementedError:
        zeros = {f"module.{name}": value for name, value in zeros_like_weights(block, features).items()}
        output = call_with_weights(_HooklessModule(block), zeros, args, kwargs)
    rest = None if isinstance(output, Tensor) else list(output[1:])
    form = partial(_as_block_output, type(output), rest, features.device)
    shape = output_features(path, output).shape
    if shape == features.shape and not any(isinstance(value, Tensor) for value in rest or ()):
        forms[path] = form
    return form(features.new_zeros(shape))


class _HooklessModule(nn.Module):
    """Runs a module's forward function without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def zeros_like_weights(module: nn.Module, like: Tensor) -> dict[str, Tensor]:
    """Return zeros in place of a module's weights on meta, expanded from one number to save memory."""
    weights = module.named_parameters()
    return {name: like.new_zeros(()).expand(weight.shape) for name, weight in weights if weight.is_meta}


def _as_block_output(kind: Any, rest: list[Any] | None, device: torch.device, hidden: Tensor) -> Any:
    """Put features into a block's output structure; its other tensors get a new constant each time."""

    def constant_tensor(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.full(value.shape, next(_NUMBERS), dtype=value.dtype, device=device)

    return hidden if rest is None else kind([hidden, *map_leaves(rest, constant_tensor)])


def replace_outputs(outputs: Iterable[tuple[nn.Module, Any]]) -> contextlib.AbstractContextManager[None]:
    """Let modules return the given outputs without running."""
    return replace_forwards((module, lambda *_, output=output, **__: output) for module, output in outputs)


@dataclass
class ForwardRecording:
    """The block calls of one forward pass, and, if kept, the features that enter and leave each block."""

    calls: list[BlockCall] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    output: Any = None


def record_calls(
    blocks: Mapping[str, nn.Module],
    run: Callable[[], object],
    *,
    keep: bool,
    starts: Collection[int] = (0,),
    added_from: int | None = None,
) -> ForwardRecording:
    """Record the calls of `blocks` while `run` runs the model without gradients.

    Args:
        blocks: path -> block, in forward order.
        run: runs the model.
        keep: True to keep features: those into the first and out of each block of every stack.
        starts: positions of the first blocks of stacks, such as an encoder and a decoder.
        added_from: position from which on the model may add to features between blocks; those that the next block
            reads are kept. None: it may not.

    Raises:
        SpecError: a block never runs, runs in another order, or reads features that the block before did not return.
    """
    recording, paths = ForwardRecording(), list(blocks)
    returned: tuple[Tensor, int] | None = None

    def check_and_record_input(
        position: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        path = paths[position]
        if position != len(recording.calls):
            raise SpecError(
                f"block {path!r} runs as number {len(recording.calls)}, expected {position}", hint=OTHER_LIST
            )
        _, hidden = find_features(path, args, kwargs)
        if position in starts:
            recording.features += [hidden.clone()] * keep
        elif returned is not None and not _is_unchanged(*returned, hidden):
            if added_from is not None and position > added_from:
                recording.features[-1:] = [hidden.clone()] * keep
                return
            raise SpecError(
                f"the model changes the features between {paths[position - 1]!r} and {path!r}",
                hint=OTHER_LIST,
            )

    def record_call(
        position: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        nonlocal returned
        path = paths[position]
        hidden = output_features(path, output)
        if keep:
            # A copy, as the next block may write into its input.
            recording.features.append(hidden.clone())
        returned = hidden, _tensor_version(hidden)
        place, reached = find_features(path, args, kwargs)
        block_call = BlockCall(
            args=tuple(None if index == place else value for index, value in enumerate(args)),
            kwargs={name: None if name == place else value for name, value in kwargs.items()},
            place=place,
            rest=None if isinstance(output, Tensor) else output[1:],
            dtype=reached.dtype,
            entered=reached.shape[1:],
            left=hidden.shape[1:],
        )
        recording.calls.append(block_call)

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for position, block in enumerate(blocks.values()):
            before, after = partial(check_and_record_input, position), partial(record_call, position)
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            hooks.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        recording.output = run()
    if len(recording.calls) < len(blocks):
        raise SpecError(f"block {paths[len(recording.calls)]!r} never runs", hint=OTHER_LIST)
    return recording


def _is_unchanged(returned: Tensor, version: int, arriving: Tensor) -> bool:
    """Return True if a block receives exactly the features that the previous block returned."""
    # The same object may have been written to in place, which its version shows without a comparison.
    if arriving is returned:
        return _tensor_version(returned) == version
    return arriving.shape == returned.shape and torch.equal(arriving, returned)


def _tensor_version(tensor: Tensor) -> int:
    """Return a number that grows when the tensor is written to; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
