"""What blocks are given beside features that differs from model to model, and so waits in the state beside them.

Gemma 4 gives each block an input of its own, which its stem makes of tokens (embeddings per layer), and lets late
blocks attend to keys and values of earlier ones. An input is `per_layer_input.<block>` in the state, [n, t, d], until
its block has run; keys and values are `shared_kv_states.<kind>.<0 or 1>`, [n, heads, t, d], until the last block has.

Gemma 3n gives its blocks several features of each token, AltUp's streams, [s, n, t, d]. They wait side by side as one
feature of the token, [n, t, s d]: a block reads and writes all of them, so that drift is drift of all, and a reshape
changes no sum, no norm and no derivative. What is made of them behind the last block is the head's.
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


def num_streams(block: nn.Module) -> int:
    """How many features of each token a block is given at once."""
    config = getattr(getattr(block, "altup", None), "config", None)
    return int(getattr(config, "altup_num_inputs", 1))


def beside_each_other(streams: Tensor) -> Tensor:
    """Streams [s, n, t, d] as one feature of a token, [n, t, s d]."""
    return streams.permute(1, 2, 0, 3).flatten(2)


def apart(hidden: Tensor, count: int) -> Tensor:
    """The streams of `beside_each_other` as blocks are given them."""
    return hidden.reshape(*hidden.shape[:2], count, -1).permute(2, 0, 1, 3).contiguous()


def is_given(block: nn.Module) -> bool:
    """Whether a block takes any of this."""
    return not {LAYER_INPUT, SHARED}.isdisjoint(signature(type(block).forward).parameters)


def bare(block_call: BlockCall, block: nn.Module) -> BlockCall:
    """The call of a block without what waits in the state."""
    places = {name: _place(block, name, block_call.args) for name in (LAYER_INPUT, SHARED)}
    args = tuple(None if index in places.values() else value for index, value in enumerate(block_call.args))
    return replace(block_call, args=args, kwargs={**block_call.kwargs, **_emptied(places, block_call.kwargs)})


def _emptied(places: Mapping[str, int | str], kwargs: Mapping[str, Any]) -> dict[str, None]:
    return {place: None for place in places.values() if isinstance(place, str) and place in kwargs}


def _place(block: nn.Module, name: str, args: Sequence[Any]) -> int | str:
    """Where a block is given this, by position or keyword."""
    names = list(signature(type(block).forward).parameters)[1:]  # the class's: its own may be replaced
    index = names.index(name) if name in names else len(args)
    return index if index < len(args) else name


def given(
    block: nn.Module, position: int, state: State, args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Put what waits for a block in its arguments; the keys and values to which it may add, by kind."""
    shared: dict[str, Any] = {}
    for name, leaf in state.items():
        if name.startswith(f"{SHARED}."):
            kind = name.removeprefix(f"{SHARED}.").rpartition(".")[0]
            shared[kind] = (*shared.get(kind, ()), leaf)
    for name, value in ((LAYER_INPUT, state.get(f"{LAYER_INPUT}.{position}")), (SHARED, shared)):
        place = _place(block, name, args)
        if isinstance(place, int):
            args[place] = value
        elif place in kwargs:
            kwargs[place] = value
    return shared


def waiting(
    position: int, blocks: Sequence[nn.Module], state: State, shared: Mapping[str, Any], mask: Tensor | None
) -> State:
    """What waits behind one of the blocks, of what did before it and of the keys and values that there are now."""
    later = {f"{LAYER_INPUT}.{index}" for index in range(position + 1, len(blocks))}
    inputs = {name: leaf for name, leaf in state.items() if name in later}
    return inputs | _leaves(shared, blocks[position + 1 :], mask)


def _leaves(shared: Mapping[str, Any], readers: Sequence[nn.Module], mask: Tensor | None) -> State:
    if not any(getattr(part, "is_kv_shared_layer", False) for block in readers for part in block.modules()):
        return {}
    hidden = None if mask is None else ~mask[:, None, :, None]
    return {
        f"{SHARED}.{kind}.{index}": leaf if hidden is None else leaf.masked_fill(hidden, 0)
        for kind, pair in shared.items()
        for index, leaf in enumerate(pair)
    }


@contextlib.contextmanager
def watched(blocks: Sequence[nn.Module], mask: Tensor | None) -> Iterator[list[State]]:
    """While this is open, what each block is given beside features is listed, as it waits before that block."""
    entered: list[State] = []

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = {}
        for name in (LAYER_INPUT, SHARED):
            place = _place(block, name, args)
            values[name] = args[place] if isinstance(place, int) else kwargs.get(place)
        value, hidden = values[LAYER_INPUT], None if mask is None else ~mask[..., None]
        layer_input = (
            {} if value is None else {LAYER_INPUT: value if hidden is None else value.masked_fill(hidden, 0)}
        )
        entered.append(layer_input | _leaves(values[SHARED] or {}, blocks[len(entered) :], mask))

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
        yield entered


def entering(position: int, entered: Sequence[State]) -> State:
    """What waits before a block, of what `watched` lists."""
    inputs = {
        f"{LAYER_INPUT}.{index}": leaf
        for index, state in enumerate(entered[position:], position)
        for name, leaf in state.items()
        if name == LAYER_INPUT
    }
    now = entered[position] if position < len(entered) else {}
    return inputs | {name: leaf for name, leaf in now.items() if name != LAYER_INPUT}
