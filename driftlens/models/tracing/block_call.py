"""One call of one block: its arguments without the features, the raw inputs of a batch, and its padding mask.

`BlockCall` is recorded per block and batch (`hooks.observe`). `chain.SideInputs` stores the calls of a batch: tensors
(masks, positions, rotary tables) under readable names (`blocks.0.mask`, `inputs.tokens`), calls with references to
these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driftlens.utils.devices import to_device
from driftlens.utils.errors import SpecError

OTHER_LIST = (
    "Set `blocks` to the path of another list, or wrap the model so that each block reads the one before."
)


# A batch's entry, or what makes one of a batch: [n, t], true (or 1) where a token counts. None takes
# `attention_mask` where the batch has one; False says that nothing is padded.
Mask = str | Callable[[Any], Tensor] | Literal[False] | None

_REMEDY = (
    "Set `mask` to the name of an entry [n, t] of ones and zeros, a function from a batch to one, or False without "
    "padding."
)


@dataclass(frozen=True)
class BlockCall:
    """One call of one block, without the features.

    Attributes:
        args: positional arguments; None in the place of the features.
        kwargs: keyword arguments, likewise.
        place: position or keyword of the features.
        rest: what the block returned after the features (a tuple or list), or None if it returned them alone.
        dtype: the features' dtype when the call was recorded.
        entered: the shape of a sample's features that the block was given.
        left: the shape of those that it returned.
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
        """Return the arguments of the call with `hidden` as features, in the shape that the block expects."""
        # Tensors that had the features' dtype when recorded get the dtype of `hidden`, so that a model recorded in
        # float32 can be computed in float64.
        change = partial(self._alike, hidden)
        args, kwargs = list(named_map(self.args, change)), named_map(self.kwargs, change)
        owner: Any = args if isinstance(self.place, int) else kwargs
        owner[self.place] = unflattened(hidden, self.entered)
        return tuple(args), kwargs

    def output(self, hidden: Tensor) -> Any:
        """Return what the block returns when its features are `hidden`."""
        if self.rest is None:
            return hidden
        return type(self.rest)([hidden, *named_map(self.rest, partial(self._alike, hidden), "output")])

    def _alike(self, hidden: Tensor, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        follows = value.dtype == self.dtype and name not in self.fixed
        return value.to(hidden.device, hidden.dtype if follows else None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, features left out, by the argument's name or position."""
        return dict(_named_leaves({**dict(enumerate(self.args)), **self.kwargs}))

    def mapped(self, change: Callable[[Any, str], Any]) -> BlockCall:
        """Return the call with `change(leaf, name)` in the place of every leaf of its arguments."""
        return replace(self, args=named_map(self.args, change), kwargs=named_map(self.kwargs, change))


def unflattened(hidden: Tensor, shape: torch.Size) -> Tensor:
    """Return features [n, t, d] in the shape of a block's own samples, where these have more axes."""
    return hidden.reshape(len(hidden), *shape) if hidden.dim() <= len(shape) else hidden


@dataclass(frozen=True)
class Inputs:
    """A batch's raw inputs by name: `input` for a tensor, the keys of a dict, the positions of a tuple."""

    values: Mapping[str, Any]
    by_keyword: bool

    def arguments(self, replaced: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of the model: copies of the inputs, or of entries of `replaced` with the same names."""
        # Copies, because a stem may write into its input.
        values = {name: mapped(replaced.get(name, value), _copy) for name, value in self.values.items()}
        return ((), values) if self.by_keyword else (tuple(values.values()), {})

    def batch(self) -> Any:
        """Return the batch as the model takes it: a dict, a tensor or a tuple."""
        values = tuple(self.values.values())
        return dict(self.values) if self.by_keyword else values[0] if "input" in self.values else values


def raw_inputs(inputs: Any) -> Inputs:
    """Name the inputs of a batch: a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, Tensor):
        return Inputs({"input": inputs}, by_keyword=False)
    if isinstance(inputs, Mapping):
        return Inputs(dict(inputs), by_keyword=True)
    return Inputs({str(position): value for position, value in enumerate(inputs)}, by_keyword=False)


def find_features(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Return the position or keyword of a block's features, the first tensor among its arguments, and the features.

    Args:
        path: the block's path, for messages.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        SpecError: there is no tensor.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor):
            return place, value
    raise SpecError(f"block {path!r} is called without a tensor", hint=OTHER_LIST)


def features_of(path: str, output: Any) -> Tensor:
    """Return the features among a block's output: the tensor, or the first entry of a tuple or list."""
    features = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(features, Tensor):
        return features
    raise SpecError(
        f"block {path!r} returns a {type(output).__name__}; expected a tensor or a tuple that starts with one",
        hint=OTHER_LIST,
    )


def result(output: Any) -> Tensor:
    """Return the features among a model's output: the tensor, or the first one in a tuple or dict."""
    entries = output.values() if isinstance(output, Mapping) else output
    for entry in entries if isinstance(entries, Iterable) and not isinstance(entries, Tensor) else [entries]:
        if isinstance(entry, Tensor):
            return entry
    raise SpecError(
        f"the model returns a {type(output).__name__} without a tensor",
        hint="Wrap the model so that it returns its features.",
    )


def _named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _named_leaves(entry, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True)
class Reference:
    """A reference to a tensor in side inputs, by its name."""

    key: str


def stored(tensors: dict[str, Tensor], value: Any, name: str, *, stateless: bool = True) -> Any:
    """Move a tensor to `tensors`, unless it is there already, and return a reference; return other values.

    Args:
        tensors: the tensors of the side inputs by name.
        value: a tensor or a plain value.
        name: its name in `tensors`.
        stateless: True to raise for values that carry state from call to call.

    Raises:
        SpecError: the value carries state.
    """
    if not isinstance(value, Tensor):
        if stateless:
            _require_stateless(value, name)
        return value
    # Blocks share their masks and rotary tables; one copy of each is stored and moved to the device.
    key = next((key for key, tensor in tensors.items() if tensor is value), name)
    tensors[key] = value
    return Reference(key)


def _require_stateless(value: object, name: str) -> None:
    """Raise for modules, and for objects with a method `update` or with tensors."""
    tensors = [] if isinstance(value, type) else list(_named_leaves(getattr(value, "__dict__", {})))
    if tensors or isinstance(value, nn.Module) or (hasattr(value, "update") and not isinstance(value, type)):
        raise SpecError(
            f"{name!r} is a {type(value).__name__}, which carries state; expected tensors and plain values next to "
            "features",
            hint="Disable it (use_cache=False for a key-value cache), or wrap the model so that blocks don't get it.",
        )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to every leaf of nested tuples, lists and dicts."""
    return named_map(value, lambda leaf, _: change(leaf))


def named_map(value: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return a nested value with every leaf changed.

    Args:
        value: nested tuples, lists and dicts.
        change: (leaf, its name) -> the new leaf.
        name: the name of `value`; those of leaves are paths such as `mask.0`.
    """
    before = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {key: named_map(entry, change, f"{before}{key}") for key, entry in value.items()}
    # Not subclasses: a named tuple could not be rebuilt from an iterator.
    if type(value) in (tuple, list):
        return type(value)(named_map(entry, change, f"{before}{place}") for place, entry in enumerate(value))
    return change(value, name)


def padding_mask(inputs: Inputs, chosen: Mask) -> Tensor | None:
    """Return the mask [n, t], true where a token counts; None where all do."""
    if chosen is False:
        return None
    if isinstance(chosen, str) or chosen is None:
        name = chosen or "attention_mask"
        mask: Any = inputs.values.get(name)
    else:
        name, mask = "the result of `mask`", chosen(inputs.batch())
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


def without_padding(path: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return features with zeros in the rows of padding.

    Args:
        path: the module that returned the features, for messages.
        hidden: [n, t, ...]; features [n, d] are returned unchanged.
        mask: [n, t], true where a token counts; None means everywhere.

    Raises:
        SpecError: the mask has another shape than the tokens.
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


def unmasked_padding(inputs: Inputs, pad_token: int | None) -> str | None:
    """Return a warning for a batch without mask whose samples start or end like padded ones, or None.

    If the token for padding is not known, three equal tokens count as padding.
    """
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
