"""Arguments of blocks that differ from model to model, and so are part of the state next to the features.

Gemma 4 passes each block an input of its own, which its stem computes from tokens (embeddings per layer), and lets late
blocks attend to keys and values of earlier ones. In the state, an input is `per_layer_input.<block>` [n, t, d] until
its block has run; keys and values are `shared_kv_states.<kind>.<0 or 1>` [n, heads, t, d] until the last block has.

Gemma 3n passes its blocks several features of each token, AltUp's streams [s, n, t, d]. The state stores them as one
feature [n, t, s d], so that drift is drift of all of them; the reshape changes no sum, norm or derivative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from torch import Tensor, nn

from driftlens.models.chain import State
from driftlens.models.tracing.block_call import BlockCall

LAYER_INPUT, SHARED = "per_layer_input", "shared_kv_states"
_NAMES = (LAYER_INPUT, SHARED)


def num_streams(block: nn.Module) -> int:
    """Return the number of features per token that a block reads at once."""
    config = getattr(getattr(block, "altup", None), "config", None)
    return int(getattr(config, "altup_num_inputs", 1))


def beside_each_other(streams: Tensor) -> Tensor:
    """Return streams [s, n, t, d] as one feature per token, [n, t, s d]."""
    return streams.permute(1, 2, 0, 3).flatten(2)


def apart(hidden: Tensor, count: int) -> Tensor:
    """Invert `beside_each_other`."""
    return hidden.reshape(*hidden.shape[:2], count, -1).permute(2, 0, 1, 3).contiguous()


def is_given(block: nn.Module) -> bool:
    """Return True if a block takes any of these arguments."""
    return not set(_NAMES).isdisjoint(signature(type(block).forward).parameters)


def bare(block_call: BlockCall, block: nn.Module) -> BlockCall:
    """Return the call of a block without the arguments that are in the state."""
    args, kwargs = [*block_call.args], {**block_call.kwargs}
    for name in _NAMES:
        _put(block, name, None, args, kwargs)
    return replace(block_call, args=tuple(args), kwargs=kwargs)


def _place(block: nn.Module, name: str, args: Sequence[Any]) -> int | str:
    """Return the position or keyword by which a block is given an argument."""
    names = list(signature(type(block).forward).parameters)[1:]  # of the class, as `forward` may be replaced
    index = names.index(name) if name in names else len(args)
    return index if index < len(args) else name


def _put(block: nn.Module, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    place = _place(block, name, args)
    if isinstance(place, int):
        args[place] = value
    elif place in kwargs:
        kwargs[place] = value


def set_arguments(
    block: nn.Module, position: int, state: State, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Set a block's arguments from the state.

    Args:
        block: the block.
        position: its number, counted from 0.
        state: the state before the block.
        args: positional arguments, which are changed in place.
        kwargs: keyword arguments, which are changed in place.

    Returns:
        Keys and values by kind, to which the block may add.
    """
    shared: dict[str, Any] = {}
    for name, leaf in state.items():
        if name.startswith(f"{SHARED}."):
            kind = name.removeprefix(f"{SHARED}.").rpartition(".")[0]
            shared[kind] = (*shared.get(kind, ()), leaf)
    _put(block, LAYER_INPUT, state.get(f"{LAYER_INPUT}.{position}"), args, kwargs)
    _put(block, SHARED, shared, args, kwargs)
    return shared


def remaining(
    position: int, blocks: Sequence[nn.Module], state: State, shared: Mapping[str, Any], mask: Tensor | None
) -> State:
    """Return the state after a block without features: inputs of later blocks, and all keys and values so far.

    Args:
        position: the block's number, counted from 0.
        blocks: all blocks.
        state: the state before the block.
        shared: keys and values by kind, the block's included.
        mask: [n, t], true where a token counts; None means everywhere.
    """
    later = {f"{LAYER_INPUT}.{index}" for index in range(position + 1, len(blocks))}
    inputs = {name: leaf for name, leaf in state.items() if name in later}
    return inputs | _leaves(shared, blocks[position + 1 :], mask)


def _leaves(shared: Mapping[str, Any], readers: Sequence[nn.Module], mask: Tensor | None) -> State:
    # Blocks add their keys and values even if no later block reads them. In the state, these would be streams whose
    # drift is measured.
    if not any(getattr(part, "is_kv_shared_layer", False) for block in readers for part in block.modules()):
        return {}
    hidden = None if mask is None else mask[:, None, :, None]
    return {
        f"{SHARED}.{kind}.{index}": _masked(leaf, hidden)
        for kind, pair in shared.items()
        for index, leaf in enumerate(pair)
    }


def _masked(leaf: Tensor, mask: Tensor | None) -> Tensor:
    return leaf if mask is None else leaf.masked_fill(~mask, 0)


@contextlib.contextmanager
def watched(blocks: Sequence[nn.Module], mask: Tensor | None) -> Iterator[list[State]]:
    """Yield a list to which each block's arguments are added when it is called."""
    entered: list[State] = []

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = [_place(block, name, args) for name in _NAMES]
        value, shared = (args[place] if isinstance(place, int) else kwargs.get(place) for place in places)
        inputs = {}
        if value is not None:
            inputs[LAYER_INPUT] = _masked(value, None if mask is None else mask[..., None])
        entered.append(inputs | _leaves(shared or {}, blocks[len(entered) :], mask))

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
        yield entered


def entering(position: int, entered: Sequence[State]) -> State:
    """Return the state before a block, features left out, from the list of `watched`."""
    inputs = {
        f"{LAYER_INPUT}.{index}": state[LAYER_INPUT]
        for index, state in enumerate(entered)
        if index >= position and LAYER_INPUT in state
    }
    now = entered[position] if position < len(entered) else {}
    return inputs | {name: leaf for name, leaf in now.items() if name != LAYER_INPUT}
