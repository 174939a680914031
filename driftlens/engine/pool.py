"""All models of a study side by side, read layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.engine.library import streamed_weights
from driftlens.engine.variant import Attachments, LayerMap, Variant, attached_to
from driftlens.errors import IncompatibleModelsError
from driftlens.models.chain import Layer, LayerChain, Slot, State
from driftlens.models.sources import StateSource, TensorHeader, check_finite


class ModelPool:
    """One skeleton, many weights. Only the layer at hand is read; nothing is modified.

    Args:
        chain: the architecture, taken apart; parameter names are those of `skeleton.state_dict()`.
        skeleton: the library's own module; its parameters may be on the meta device.
        models: weights by name (`base`, `merged`, `expert:<task>`, ...) in the skeleton's key names.
        device: where parameters are put.
        dtype: floating dtype in which everything is computed.
        modules: live modules by the same names, where the weights came from such; they serve the library's own forward.

    Raises:
        IncompatibleModelsError: keys, shapes or kinds of number differ between a model and the skeleton.
    """

    def __init__(
        self,
        chain: LayerChain,
        skeleton: nn.Module,
        models: Mapping[str, StateSource],
        *,
        device: torch.device,
        dtype: torch.dtype,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.chain = chain
        self.device = device
        self.dtype = dtype
        self._skeleton = skeleton
        self._modules = dict(modules or {})
        self._models: dict[str, Variant] = {}
        self._known_finite: set[tuple[str, Slot]] = set()
        for name, source in models.items():
            self.add(name, source)

    def __contains__(self, model: str) -> bool:
        return model in self._models

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, in the order in which they were added."""
        return tuple(self._models)

    def source(self, model: str) -> StateSource:
        """The weights called `model`, as stored."""
        return self._models[model].weights

    def variant(self, model: str) -> Variant:
        """The model called `model`: weights and attachments."""
        return self._models[model]

    def add(self, model: str, source: StateSource, attachments: Attachments | None = None) -> None:
        """Put another model beside those there are, or in the place of the one of that name.

        Args:
            model: its name.
            source: its weights.
            attachments: what is attached to its boundaries.

        Raises:
            IncompatibleModelsError: its keys, shapes or kinds of number differ from the skeleton's.
        """
        require_same_parameters(self._skeleton, self.chain, source)
        self._models[model] = Variant(model, source, dict(attachments or {}))

    def in_float64(self) -> ModelPool:
        """The same models, computed in float64; on the CPU where the device knows no such numbers."""
        device = torch.device("cpu") if self.device.type == "mps" else self.device
        wide = ModelPool(self.chain, self._skeleton, {}, device=device, dtype=torch.float64)
        for name, variant in self._models.items():
            wide.add(name, variant.weights, variant.attachments)
        return wide

    def parameters(self, model: str, layer: Layer) -> dict[str, Tensor]:
        """The parameters of one layer of one model, by the layer's own names, on `device` in `dtype`.

        Raises:
            NumericsError: a weight is NaN or infinite.
        """
        source = self.source(model)
        return {name: self._read(model, source, slot) for name, slot in layer.parameters.items()}

    def layer_map(self, model: str, layer: Layer, task: str) -> LayerMap:
        """One layer of one model for one task, with what is attached behind it; its parameters are read now.

        Raises:
            NumericsError: a weight is NaN or infinite.
        """
        attachment = self._models[model].attachments.get((task, layer.index))
        return LayerMap(layer, self.parameters(model, layer), attachment)

    def library_states(self, model: str, inputs: Any, task: str = "") -> list[State]:
        """States at boundaries 1..L from one ordinary forward pass of the library's own module with these weights.

        What is attached for `task` acts inside that pass, by hooks on the library's own blocks. One block's weights are
        resident at a time, beside those of the stem and the head.
        """
        attached = self._models[model].attached(task)
        module = self._modules.get(model, self._skeleton)
        with self._weights_of(model), attached_to(module, self.chain, attached):
            states = self.chain.library_states(module, inputs)
        # What reaches the first block and what leaves the head are recorded before anything is attached to them.
        for layer in (self.chain.layers[0], self.chain.layers[-1]):
            if layer.index in attached:
                state = states[layer.index - 1]
                state[layer.stream] = attached[layer.index](state[layer.stream])
        return states

    def _weights_of(self, model: str) -> AbstractContextManager[None]:
        """While this is open, the module that lends its forward pass computes with the model's weights."""
        if model in self._modules:
            return nullcontext()
        source = self.source(model)

        def read(key: str) -> Tensor:
            return source.read(key).to(self.device, self.dtype)

        blocks = [layer.path for layer in self.chain.blocks]
        return streamed_weights(self._skeleton, blocks, read, self.device)

    def _read(self, model: str, source: StateSource, slot: Slot) -> Tensor:
        tensor = source.read(slot.key, slot.rows)
        if (model, slot) not in self._known_finite:
            check_finite(source.name, slot.key, tensor)
            self._known_finite.add((model, slot))
        tensor = tensor.to(self.device, self.dtype)
        return tensor.mT if slot.transposed else tensor


def require_same_parameters(skeleton: nn.Module, chain: LayerChain, source: StateSource) -> None:
    """Refuse a model whose parameters are not those of the skeleton.

    Raises:
        IncompatibleModelsError: keys are missing or unknown, a shape differs, or integers stand where floats should.
    """
    wanted = {
        name: TensorHeader(tuple(p.shape), p.dtype) for name, p in skeleton.state_dict(keep_vars=True).items()
    }
    needed = {key: wanted[key] for key in chain.parameter_keys()}
    found = source.headers
    missing = [key for key in needed if key not in found]
    unknown = [key for key in found if key not in wanted]
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has {_some(unknown)}, which {chain.architecture} does not know"] if unknown else []
        raise IncompatibleModelsError(
            f"{source.name} {' and '.join(parts)}",
            hint="Experts, merged model and base must share one architecture; check `architecture` in the spec.",
            missing=missing,
            unknown=unknown,
        )
    for key, header in needed.items():
        if found[key].shape != header.shape:
            raise IncompatibleModelsError(
                f"{source.name}: {key!r} has shape {list(found[key].shape)}; "
                f"the architecture wants {list(header.shape)}",
                hint="The checkpoint belongs to another model size; merge only models fine-tuned from one base.",
                key=key,
            )
        if header.dtype.is_floating_point and not found[key].dtype.is_floating_point:
            raise IncompatibleModelsError(
                f"{source.name}: {key!r} is stored as {found[key].dtype}; expected a floating dtype",
                hint="Quantised weights can't be compared; load the model in float16 or wider and save it again.",
                key=key,
            )


def _some(keys: list[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:3])
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
