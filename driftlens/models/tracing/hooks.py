"""Run a module while its blocks are recorded, replaced or skipped; the module is restored afterwards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from driftlens.models.chain import Parameters
from driftlens.models.tracing.block_call import OTHER_LIST, BlockCall, features_of, find_features, mapped
from driftlens.models.tracing.block_inputs import SHARED
from driftlens.utils.errors import SpecError

# Settings of transformers' configurations while a module runs. A cache would carry features from pass to pass; fused
# experts support no float64.
_PLAIN = {"use_cache": False, "_experts_implementation": "eager"}
# Different numbers for tensors that depend on weights, so that a comparison of two passes finds them.
_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set `module` and its parts to eval mode, and restore the mode of each.

    Also switch off what depends on earlier passes or has no derivatives: the fused kernel of `nn.MultiheadAttention`
    (no forward mode), key-value caches and fused experts of transformers (no float64, no derivatives), and tensors
    computed from weights that modules cache (biases of timm's LeViT).
    """
    parts = _parts(module)
    changes: list[tuple[Any, str, Any]] = [(part, "training", False) for part in parts if part.training]
    changes += _of_configs(parts, _PLAIN)
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
        with _changed(changes):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def plain_experts(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run experts of a mixture one by one: fused ones support no float64."""
    return _changed(_of_configs(_parts(module), {"_experts_implementation": "eager"}))


def _parts(module: nn.Module) -> dict[nn.Module, None]:
    """Return a module and its parts in any order, several times as fast as `modules()`."""
    parts, waiting = dict[nn.Module, None](), [module]
    while waiting:
        if (part := waiting.pop()) not in parts:
            parts[part] = None
            waiting += [inner for inner in part._modules.values() if inner is not None]
    return parts


def _of_configs(parts: Iterable[nn.Module], plain: Mapping[str, Any]) -> list[tuple[Any, str, Any]]:
    """Return the changes that give the configurations of modules the values in `plain`."""
    configs = {id(config): config for part in parts if (config := vars(part).get("config"))}
    return [
        (config, name, value)
        for config in configs.values()
        for name, value in plain.items()
        if getattr(config, name, None) not in (None, value)
    ]


@contextlib.contextmanager
def _changed(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, and restore each afterwards."""
    before = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def settle(module: nn.Module, device: torch.device) -> None:
    """Move the weights and buffers of a module to a device, except those on meta."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def buffers_on(module: nn.Module, device: torch.device) -> Iterator[None]:
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


def call(module: nn.Module, parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of `module` in eval mode with other parameters.

    Args:
        module: the module, which is not changed.
        parameters: parameters and saved buffers by name; others keep their values.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    with evaluating(module):
        # The weights of a model may be tied where those of the module are not, and the other way round.
        return functional_call(module, dict(parameters), args, dict(kwargs), tie_weights=False)


class _Reached(BaseException):
    """Raised to end a forward pass at a module. Not an `Exception`, so that no handler in the model catches it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def run_until(module: nn.Module, run: Callable[[], object], *, past: bool = False) -> Tensor:
    """Run a forward pass up to one module.

    Args:
        module: the module at which the pass ends.
        run: runs the whole model.
        past: True to end it after the module.

    Returns:
        The features that reach the module, or with `past` those that it returns.

    Raises:
        SpecError: the module did not run.
    """

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *_output: Any) -> None:
        raise _Reached(
            features_of("the last", _output[0]) if past else find_features("the first", args, kwargs)[1]
        )

    with contextlib.ExitStack() as hooks:
        if past:
            hooks.callback(module.register_forward_hook(stop, with_kwargs=True).remove)
        else:
            hooks.callback(module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True).remove)
        try:
            run()
        except _Reached as reached:
            return reached.hidden
    raise SpecError("the model skipped one of its blocks", hint=OTHER_LIST)


@contextlib.contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forward functions of modules, and restore them afterwards."""
    with contextlib.ExitStack() as restored:
        # In the module's `__dict__`, as other instances of its class must keep theirs. It may be replaced already.
        for module, forward in forwards:
            before = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
            restored.callback(module.__dict__.update, before)
            restored.callback(module.__dict__.pop, "forward")
            module.__dict__["forward"] = forward
        yield


def meta_device_run(
    blocks: Mapping[str, nn.Module], forms: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Let blocks on meta take real features and return zeros.

    Zeros have the shape of the block's features, in the structure that the block returns. So later blocks get the same
    arguments, except those computed from weights. `forms` caches the structures of blocks that keep their features'
    shape.
    """
    shared: dict[str, Any] = {}
    return replaced_forwards(
        (block, partial(_shell, path, block, forms, shared)) for path, block in blocks.items()
    )


def _shell(
    path: str, block: nn.Module, forms: dict[str, Any], shared: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    features = find_features(path, args, kwargs)[1]
    if path in forms:
        return forms[path](features.new_zeros(features.shape))

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    try:
        with buffers_on(block, torch.device("meta")):
            keywords = mapped(kwargs, to_meta)
            # A block adds its keys and values for later blocks. `mapped` copies the dictionary, so they would be lost.
            if SHARED in keywords:
                keywords[SHARED] = shared
            output = type(block).forward(block, *mapped(args, to_meta), **keywords)
    # Raised for a block that reads numbers, such as the lengths of packed sequences. It runs with zeros as weights.
    except NotImplementedError:
        zeros = {f"module.{name}": value for name, value in zeros_like_weights(block, features).items()}
        output = call(_Unheard(block), zeros, args, kwargs)
    rest = None if isinstance(output, Tensor) else list(output[1:])
    form = partial(_dressed, type(output), rest, features.device)
    shape = features_of(path, output).shape
    if shape == features.shape and not any(isinstance(value, Tensor) for value in rest or ()):
        forms[path] = form
    return form(features.new_zeros(shape))


class _Unheard(nn.Module):
    """Runs the forward function of a module's class, without the module's hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def zeros_like_weights(module: nn.Module, like: Tensor) -> dict[str, Tensor]:
    """Return zeros for weights on meta, expanded from one number of the dtype and device of `like`."""
    weights = module.named_parameters()
    return {name: like.new_zeros(()).expand(weight.shape) for name, weight in weights if weight.is_meta}


def _dressed(kind: Any, rest: list[Any] | None, device: torch.device, hidden: Tensor) -> Any:
    """Return features in a block's structure; other tensors of it depend on weights, and get a new number each time."""

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.full(value.shape, next(_NUMBERS), dtype=value.dtype, device=device)

    return hidden if rest is None else kind([hidden, *mapped(rest, other)])


def skip_blocks(
    blocks: Sequence[nn.Module], calls: Sequence[BlockCall], hidden: Tensor
) -> contextlib.AbstractContextManager[None]:
    """Let each block return the same features without running.

    Args:
        blocks: the blocks.
        calls: their recorded calls, which have the structures of their outputs.
        hidden: the features, in the shape of the last block's output.
    """
    outputs = [block_call.output(hidden) for block_call in calls]
    return replaced_forwards(
        (block, lambda *_, output=output, **__: output) for block, output in zip(blocks, outputs, strict=True)
    )


@dataclass
class Recording:
    """The calls of blocks in one forward pass; `features`, if kept, are those into the first and out of each block."""

    calls: list[BlockCall] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    output: Any = None


def observe(
    blocks: Mapping[str, nn.Module], run: Callable[[], object], *, keep: bool, is_added_to: bool = False
) -> Recording:
    """Record the calls of `blocks` while `run` runs without gradients.

    Args:
        blocks: path -> block, in forward order.
        run: runs the model.
        keep: True to keep features.
        is_added_to: True if the model may add to features between blocks; those that the next block reads are kept.

    Raises:
        SpecError: a block never runs, runs in another order, or reads features that the block before did not return.
    """
    recording, paths = Recording(), list(blocks)
    returned: tuple[Tensor, int] | None = None

    def enter(position: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = paths[position]
        if position != len(recording.calls):
            raise SpecError(
                f"block {path!r} runs as number {len(recording.calls)}, expected {position}", hint=OTHER_LIST
            )
        _, hidden = find_features(path, args, kwargs)
        if returned is not None and not _unchanged(*returned, hidden):
            if is_added_to:
                recording.features[-1:] = [hidden.clone()] * keep
                return
            raise SpecError(
                f"the model changes the features between {paths[position - 1]!r} and {path!r}",
                hint=OTHER_LIST,
            )
        if keep and not recording.features:
            recording.features.append(hidden.clone())

    def leave(
        position: int, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        nonlocal returned
        path = paths[position]
        hidden = features_of(path, output)
        if keep:
            # A copy, as the next block may write into its input.
            recording.features.append(hidden.clone())
        returned = hidden, _version(hidden)
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
            before, after = partial(enter, position), partial(leave, position)
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            hooks.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        recording.output = run()
    if len(recording.calls) < len(blocks):
        raise SpecError(f"block {paths[len(recording.calls)]!r} never runs", hint=OTHER_LIST)
    return recording


def _unchanged(returned: Tensor, version: int, arriving: Tensor) -> bool:
    # The same object may have been written to in place, which its version shows without a comparison.
    if arriving is returned:
        return _version(returned) == version
    return arriving.shape == returned.shape and torch.equal(arriving, returned)


def _version(tensor: Tensor) -> int:
    """Return a number that grows when the tensor is written to; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
