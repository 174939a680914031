"""How a model calls its blocks, everything but the features that flow through it, and which tokens are padding.

A `Frame` is kept per block and batch. The tensors in it (masks, positions, rotary tables) and the raw inputs
lie in the side inputs under readable names (`blocks.0.mask`, `inputs.tokens`); the frames and the raw inputs
lie beside them, with references in the place of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from driftlens.models.chain import SideInputs, State
from driftlens.utils.devices import moved
from driftlens.utils.errors import SpecError

OTHER_LIST = (
    "Pass blocks= the path of another list, or wrap the model so that features flow from block to block."
)


_known: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("known_on_host", default=None)
"""Tensors of a device by their identity, each with the host's own of the same numbers."""


@contextmanager
def known_on_host(inputs: object, copies: object) -> Iterator[None]:
    """While this is open, `on_host` knows raw inputs' copies on a device, of the same structure."""
    pairs = zip(_named_leaves(inputs), _named_leaves(copies), strict=True)
    token = _known.set({id(copy): (copy, tensor) for (_, tensor), (_, copy) in pairs})
    try:
        yield
    finally:
        _known.reset(token)


def on_host(value: Any) -> Any:
    """The host's own tensor where it is known, so that nobody waits to read it; else the value itself."""
    return (_known.get() or {}).get(id(value), (None, value))[1]


def made_of(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A change of the tensor; the host makes it too of its own, and so knows both."""
    changed, own, pairs = change(tensor), on_host(tensor), _known.get()
    if pairs is not None and own is not tensor:
        pairs[id(changed)] = changed, change(own)
    return changed


Mask = str | Callable[[Any], Tensor] | Literal[False] | None
"""A batch's entry, or what makes one of a batch: [n, t], true (or 1) where a token counts.

None takes `attention_mask` where the batch has one; False says that nothing is padded.
"""

_REMEDY = (
    "Pass mask= the name of an entry [n, t] of ones and zeros, a function that makes one of a batch, or False where "
    "no sample is padded."
)


@dataclass(frozen=True)
class Frame:
    """One call of one block, without the features.

    Attributes:
        args: positional arguments; the features' place is None.
        kwargs: keyword arguments, likewise.
        place: position or keyword of the features.
        rest: what the block returned after the features (a tuple or list), or None if it returned them bare.
        dtype: the features' dtype when the call was recorded.
        entered: the shape of a sample's features that the block was given.
        left: the shape of those that it returned.
        fixed: tensors among the arguments, as `tensors_given` names them, whose dtype follows no feature's.
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
        """The call's arguments with `hidden` in its place, in the shape that the block wants.

        Tensors that had the features' dtype when recorded get the dtype of `hidden`, so that a model recorded
        in float32 can be computed in float64.
        """
        args, kwargs = list(self._alike(self.args, hidden)), self._alike(self.kwargs, hidden)
        hidden = unflattened(hidden, self.entered)
        if isinstance(self.place, int):
            args[self.place] = hidden
        else:
            kwargs[self.place] = hidden
        return tuple(args), kwargs

    def output(self, hidden: Tensor) -> Any:
        """What the block returns when its features are `hidden`."""
        if self.rest is None:
            return hidden
        return type(self.rest)([hidden, *self._alike(self.rest, hidden, "output")])

    def _alike(self, value: Any, hidden: Tensor, name: str = "") -> Any:
        def inside(entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
            before = f"{name}." if name else ""
            return {key: self._alike(entry, hidden, f"{before}{key}") for key, entry in entries}

        if isinstance(value, Mapping):
            return inside(value.items())
        if type(value) in (tuple, list):
            return type(value)(inside(enumerate(value)).values())
        if not isinstance(value, Tensor):
            return value
        follows = value.dtype == self.dtype and name not in self.fixed
        return value.to(hidden.device, hidden.dtype if follows else None)


def unflattened(hidden: Tensor, shape: torch.Size) -> Tensor:
    """Features [n, t, d] in the shape of a block's own samples, where these have more axes."""
    return hidden.reshape(len(hidden), *shape) if hidden.dim() <= len(shape) else hidden


@dataclass(frozen=True)
class Inputs:
    """A batch's raw inputs by name: `input` for a tensor, the keys of a dict, the positions of a tuple."""

    values: Mapping[str, Any]
    by_keyword: bool

    def arguments(self, replaced: State) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the model is called with copies of them, or of entries of `replaced` with the same names."""
        values = {name: mapped(replaced.get(name, value), _copy) for name, value in self.values.items()}
        return ((), values) if self.by_keyword else (tuple(values.values()), {})

    def batch(self) -> Any:
        """The batch as the model takes it: a dict, a tensor or a tuple."""
        values = tuple(self.values.values())
        return dict(self.values) if self.by_keyword else values[0] if "input" in self.values else values


def raw_inputs(inputs: Any) -> Inputs:
    """A batch as the model takes it: a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, Tensor):
        return Inputs({"input": inputs}, by_keyword=False)
    if isinstance(inputs, Mapping):
        return Inputs(dict(inputs), by_keyword=True)
    return Inputs({str(position): value for position, value in enumerate(inputs)}, by_keyword=False)


def find_features(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Where a block's features stand among its arguments, and they: the first tensor, positional ones first."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor):
            return place, value
    raise SpecError(f"block {path!r} is called without a tensor", hint=OTHER_LIST)


def features_of(path: str, output: Any) -> Tensor:
    """The features a block returned: its output, or the first entry of a tuple or list."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        return first
    raise SpecError(
        f"block {path!r} returns a {type(output).__name__}; wanted is a tensor, or a tuple led by one",
        hint=OTHER_LIST,
    )


def result(output: Any) -> Tensor:
    """The features in what a model returns: the tensor, or the first one in a tuple or dict."""
    entries = output.values() if isinstance(output, Mapping) else output
    for entry in entries if isinstance(entries, Iterable) and not isinstance(entries, Tensor) else [entries]:
        if isinstance(entry, Tensor):
            return entry
    raise SpecError(
        f"the model returns a {type(output).__name__} without a tensor",
        hint="Wrap the model so that it returns its features.",
    )


def side_inputs(
    paths: Sequence[str], frames: Sequence[Frame], inputs: Inputs, mask: Tensor | None = None
) -> SideInputs:
    """Frames and raw inputs as side inputs: every tensor once, under a readable name."""
    tensors: dict[str, Tensor] = {} if mask is None else {"hidden_mask": mask}
    kept_inputs = replace(inputs, values=_stowed(inputs.values, "inputs", tensors))
    kept_frames = tuple(
        replace(
            frame,
            args=_stowed(frame.args, path, tensors),
            kwargs=_stowed(frame.kwargs, path, tensors),
            rest=_stowed(frame.rest, f"{path}.output", tensors, stateless=False),
        )
        for path, frame in zip(paths, frames, strict=True)
    )
    # What float64 masks away is no number to a library whose softmax is float32, where a window sees padding alone.
    lowest = torch.finfo(torch.float32).min
    tensors = {
        name: tensor.clamp(min=lowest) if tensor.dtype == torch.float64 else tensor
        for name, tensor in tensors.items()
    }
    return SideInputs(tensors, kept_frames, kept_inputs)


def frame_at(side: SideInputs, position: int) -> Frame:
    """The frame of one block, tensors back in their places."""
    frame = side.frames[position]
    return replace(
        frame,
        args=_fetched(frame.args, side),
        kwargs=_fetched(frame.kwargs, side),
        rest=_fetched(frame.rest, side),
    )


def inputs_in(side: SideInputs) -> Inputs:
    """The raw inputs, tensors back in their places."""
    assert side.inputs is not None
    return replace(side.inputs, values=_fetched(side.inputs.values, side))


def tensors_given(frame: Frame) -> dict[str, Tensor]:
    """The tensors among a block's arguments, its features left out, by the argument's name or position."""
    return dict(_named_leaves({**dict(enumerate(frame.args)), **frame.kwargs}))


def with_tensors(frame: Frame, tensors: Mapping[str, Tensor]) -> Frame:
    """The frame with these in the place of tensors that `tensors_given` names so."""

    def put(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: put(entry, f"{name}.{key}") for key, entry in value.items()}
        if type(value) in (tuple, list):
            return type(value)(put(entry, f"{name}.{place}") for place, entry in enumerate(value))
        return tensors.get(name, value) if isinstance(value, Tensor) else value

    args = tuple(put(value, str(place)) for place, value in enumerate(frame.args))
    return replace(frame, args=args, kwargs={key: put(value, key) for key, value in frame.kwargs.items()})


def _named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from _named_leaves(entry, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True)
class _Reference:
    key: str


def _stowed(value: Any, name: str, tensors: dict[str, Tensor], *, stateless: bool = True) -> Any:
    """`value` with its tensors moved to `tensors`; the same tensor is filed once."""
    if isinstance(value, Tensor):
        place = next((key for key, tensor in tensors.items() if tensor is value), name)
        tensors[place] = value
        return _Reference(place)
    if isinstance(value, Mapping):
        return {
            key: _stowed(entry, f"{name}.{key}", tensors, stateless=stateless) for key, entry in value.items()
        }
    if type(value) in (tuple, list):
        return type(value)(
            _stowed(entry, f"{name}.{position}", tensors, stateless=stateless)
            for position, entry in enumerate(value)
        )
    if stateless:
        _require_stateless(name, value)
    return value


def _require_stateless(name: str, value: object) -> None:
    """Refuse what can carry something from call to call: modules, and objects that are updated or hold tensors."""
    tensors = [] if isinstance(value, type) else list(_named_leaves(getattr(value, "__dict__", {})))
    if tensors or isinstance(value, nn.Module) or (hasattr(value, "update") and not isinstance(value, type)):
        raise SpecError(
            f"{name!r} is a {type(value).__name__}, which carries state that no other model may read; "
            "expected tensors and plain values beside the features",
            hint="Switch it off (a key-value cache with use_cache=False), or wrap the model so that its blocks "
            "are called without it.",
        )


def _fetched(value: Any, side: SideInputs) -> Any:
    return mapped(value, lambda leaf: side[leaf.key] if isinstance(leaf, _Reference) else leaf)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to all that tuples, lists and dicts hold, however deep."""
    if isinstance(value, Mapping):
        return {key: mapped(entry, change) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(entry, change) for entry in value)
    return change(value)


def padding_mask(inputs: Inputs, chosen: Mask) -> Tensor | None:
    """Where tokens count, [n, t] of booleans; None where all of them do."""
    if chosen is False:
        return None
    if isinstance(chosen, str) or chosen is None:
        name = chosen or "attention_mask"
        mask: Any = inputs.values.get(name)
    else:
        name, mask = "what mask= returns", chosen(mapped(inputs.batch(), on_host))
    if mask is None and chosen is None:
        return None
    own, is_mask, is_whole = on_host(mask), False, False
    if isinstance(own, Tensor) and own.dim() == 2:  # both at once, as the host may wait for them
        is_mask, is_whole = torch.stack([((own == 0) | (own == 1)).all(), (own != 0).all()]).tolist()
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
            "the batch has tokens for an encoder and for a decoder; its attention_mask may be of either's",
            hint=_REMEDY,
        )
    tensors = (value for value in inputs.values.values() if isinstance(value, Tensor))
    return moved(mask.bool(), next(tensors, mask).device)


def without_padding(path: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Features with zeros in the rows of padding."""
    if mask is None or hidden.dim() == 2:
        return hidden
    if hidden.shape[:2] != mask.shape:
        raise SpecError(
            f"the mask is {list(mask.shape)}, the features at {path!r} are {list(hidden.shape)}; "
            "expected one mask entry per token",
            hint=_REMEDY,
        )
    return hidden.masked_fill(~mask.reshape(*mask.shape, *[1] * (hidden.dim() - 2)), 0)


def unmasked_padding(inputs: Inputs, pad_token: int | None) -> str | None:
    """What to tell the user of a batch without mask whose samples end or start like padded ones; None if they don't.

    Where the model pads with no known token, runs of three equal tokens are taken for padding.
    """
    for name, tokens in inputs.values.items():
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            continue
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
                f"{count} of {len(tokens)} samples of a batch look padded in {name!r}, and there is no attention_mask, "
                f"so padding counts like any token. {_REMEDY}"
            )
    return None
