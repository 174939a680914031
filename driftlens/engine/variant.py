"""Variants: weights, and what is attached to their boundaries; a layer of one for one task as a single map.

Everything that compares models goes through `LayerMap`, so an attachment is part of the layer before it: e = m + p,
p = A e and the split of the final drift hold with it as they hold without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, State, Tap
from driftlens.models.frames import features_of, find_features
from driftlens.models.sources import StateSource


class Attachment(Protocol):
    """A pure, differentiable map of the features at one boundary of one variant, for one task.

    Surgery puts one behind the last layer, SurgeryV2 one behind every layer.
    """

    def __call__(self, stream: Tensor) -> Tensor:
        """Features [n, t, d] or [n, d] in the place of those that left the layer, of the same shape."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """All numbers that make up the map, by name: what is saved of it."""
        ...


Attachments = Mapping[tuple[str, int], Attachment]
"""(task, boundary) -> what is attached there; boundary l is what leaves layer l."""


@dataclass(frozen=True)
class Variant:
    """One model of a study.

    Attributes:
        label: its name in a pool, in tables and in file names: `base`, `merged`, `expert:cars`, `calibrated:featcal`.
        weights: its parameters, under the skeleton's key names.
        attachments: what is attached to its boundaries.
    """

    label: str
    weights: StateSource
    attachments: Attachments = field(default_factory=dict)

    def attached(self, task: str) -> dict[int, Attachment]:
        """What is attached for one task, by boundary."""
        return {boundary: found for (name, boundary), found in self.attachments.items() if name == task}


@dataclass(frozen=True)
class LayerMap:
    """One layer of one variant for one task, as a function of features: the layer, then the attachment behind it.

    Attributes:
        layer: which one.
        parameters: its own, on the device and in the dtype of the computation.
        attachment: None where nothing is attached.
    """

    layer: Layer
    parameters: Parameters
    attachment: Attachment | None = None

    def __call__(self, state: State, side: SideInputs, tap: Tap | None = None) -> State:
        """Features at the next boundary."""
        out = self.layer.call(self.parameters, state, side, tap)
        if self.attachment is None:
            return out
        stream = self.layer.stream
        return {**out, stream: self.attachment(out[stream])}

    def at(self, side: SideInputs) -> Callable[[State], State]:
        """The map with the side inputs of one batch."""
        return lambda state: self(state, side)


@contextmanager
def attached_to(
    module: nn.Module, chain: LayerChain, attachments: Mapping[int, Attachment]
) -> Iterator[None]:
    """Inside the context, an ordinary forward pass of `module` runs with attachments behind its stem and blocks.

    What is attached behind the head is not: no module's output is the final feature in every library.
    """
    with ExitStack() as hooks:
        for layer in chain.blocks:
            if layer.index in attachments:
                block = module.get_submodule(layer.path)
                hooks.callback(
                    block.register_forward_hook(_behind(layer.path, attachments[layer.index])).remove
                )
        if 1 in attachments:
            first = chain.blocks[0].path
            hook = _before(first, attachments[1])
            hooks.callback(
                module.get_submodule(first).register_forward_pre_hook(hook, with_kwargs=True).remove
            )
        yield


def _behind(path: str, attachment: Attachment) -> Callable[[nn.Module, Any, Any], Any]:
    def change(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        changed = attachment(features_of(path, output))
        return changed if isinstance(output, Tensor) else type(output)([changed, *output[1:]])

    return change


def _before(path: str, attachment: Attachment) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def change(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = find_features(path, args, kwargs)
        if isinstance(place, int):
            return (*args[:place], attachment(args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, place: attachment(kwargs[place])}

    return change
