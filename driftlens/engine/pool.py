"""All models of a study, read layer by layer from one skeleton; a variant is weights plus feature corrections."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import EmbeddingTable, StateSource, TensorHeader, check_finite
from driftlens.data.samples import SampleSet, map_tensors
from driftlens.models.chain import (
    ExpertRoutes,
    Layer,
    LayerChain,
    Parameters,
    Pool,
    SideInputs,
    State,
    WeightSlot,
)
from driftlens.models.heads import LmHead, ScoreMap
from driftlens.models.tracing.block_call import buffers_on_device, eager_experts, output_features
from driftlens.models.tracing.block_sites import fused_tensor
from driftlens.utils.devices import device_for_dtype, to_device
from driftlens.utils.errors import DataError, IncompatibleModelsError, shorten_list


def inputs_to_device(inputs: object, device: torch.device, dtype: torch.dtype) -> object:
    """Move raw model inputs to a device, floating tensors also to `dtype`; lists become tuples."""

    def move_tensor(tensor: Tensor) -> Tensor:
        return to_device(tensor, device, dtype if tensor.is_floating_point() else None)

    return map_tensors(move_tensor, inputs)


def input_bytes(inputs: object) -> int:
    """Return the size of raw model inputs in bytes."""
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), inputs)
    return sum(sizes)


def with_updated_parameters(layer: Layer, parameters: Parameters, updates: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's parameters with some of them updated.

    If a fused tensor of a mixture changes, its experts are copied into one tensor; otherwise every pass would do that.

    Args:
        layer: the layer.
        parameters: all of its parameters.
        updates: the new ones; those of a fused tensor become views of it.
    """
    new = {**parameters, **updates}
    for slots in _slots_by_fused_tensor(layer).values():
        # Untouched stacks stay views of the file or of the live model.
        if not updates.keys().isdisjoint(slots):
            whole = fused_tensor([*slots.values()], [new[name] for name in slots])
            for row, (name, slot) in enumerate(slots.items()):
                new[name] = slot.to_layer_layout(whole[row : row + 1])
    updates.update((name, new[name]) for name in updates)
    return new


def _slots_by_fused_tensor(layer: Layer) -> dict[str, dict[str, WeightSlot]]:
    """Group the layer parameters that are rows of a fused tensor by the key of that tensor."""
    stacks: dict[str, dict[str, WeightSlot]] = {}
    for name, slot in layer.parameters.items():
        if slot.is_stacked:
            stacks.setdefault(slot.key, {})[name] = slot
    return stacks


class Attachment(Protocol):
    """A differentiable correction of the final feature of one model, for one task."""

    def __call__(self, stream: Tensor) -> Tensor:
        """Return corrected features of the same shape, [n, t, d] or [n, d]."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the correction by name, as they are saved.

        An attribute `code` may hold Python that computes `f` from `f` and these tensors `t`, for model cards.
        """


Attachments = Mapping[str, Attachment]
"""Corrections of the final feature by task."""


@dataclass(frozen=True)
class Variant:
    """One model of a pool: its weights, and corrections of its final feature by task."""

    weights: StateSource
    attachments: Attachments = field(default_factory=dict)


@dataclass(frozen=True)
class LayerMap:
    """One layer of one model as a function of features, followed by the correction for one task."""

    layer: Layer
    parameters: Parameters
    attachment: Attachment | None = None

    def __call__(self, state: State, side: SideInputs, routes: ExpertRoutes | None = None) -> State:
        """Return the features at the next boundary; records or follows routes through a mixture of experts."""
        out, stream = self.layer.call(self.parameters, state, side.with_routes(routes)), self.layer.stream
        return out if self.attachment is None else {**out, stream: self.attachment(out[stream])}


class ModelPool:
    """Several models of one architecture, read one layer at a time; nothing is modified.

    `models` are weights by name (`base`, `merged`, `expert:<task>`, ...) in the key names of `skeleton`, whose
    parameters may be on the meta device; `modules` are live modules by the same names, whose own forward pass runs.
    `budget` is how many bytes a whole model may take where one has to be in memory.
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
        budget: int = 2 << 30,
    ) -> None:
        self.chain = chain
        self.device = device
        self.dtype = dtype
        self.budget = budget
        self._skeleton = skeleton
        self._modules = dict(modules or {})
        self._models: dict[str, Variant] = {}
        self._heads: dict[Hashable, LmHead] = {}
        self._known_finite: set[tuple[str, WeightSlot]] = set()
        for name, source in models.items():
            self.add(name, source)

    def __contains__(self, model: str) -> bool:
        return model in self._models

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, in the order in which they were added."""
        return tuple(self._models)

    def source(self, model: str) -> StateSource:
        """Return the stored weights of a model."""
        return self._models[model].weights

    def variant(self, model: str) -> Variant:
        """Return the weights and attachments of a model."""
        return self._models[model]

    def score_map(self, head: ScoreMap | None, model: str) -> ScoreMap | None:
        """Return the score map (head) for one model; a language-model head uses the model's own rows."""
        if not isinstance(head, LmHead) or model not in self:
            return head
        # Cached, because the norms of its rows over a vocabulary are slow to compute.
        key, source = (model, head.lm, head.tokens, head.classes), self.source(model)
        # A model may have been replaced under its name.
        if key not in self._heads or self._heads[key].source is not source:
            self._heads[key] = head.of_model(source)
        return self._heads[key]

    def add(self, model: str, source: StateSource, attachments: Attachments | None = None) -> None:
        """Add or replace a model; raise if its parameters differ from the architecture's.

        Args:
            model: its name.
            source: its weights.
            attachments: corrections of its final feature by task.
        """
        require_same_parameters(self._skeleton, self.chain, source)
        self._models[model] = Variant(source, dict(attachments or {}))

    def in_float64(self) -> ModelPool:
        """Return the same models, computed in float64; on the CPU if the device has no float64."""
        # A shallow copy: both pools share models, heads and the record of checked tensors.
        wide = copy.copy(self)
        wide.device = device_for_dtype(torch.float64, self.device)
        wide.dtype = torch.float64
        wide._modules = {}  # live modules compute in their own dtype
        return wide

    def parameters(self, model: str, layer: Layer, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return parameters of a layer by its names, on `device` in `dtype`.

        Args:
            model: the model's name.
            layer: the layer.
            names: the parameters to read; None reads all.
        """
        if names is not None:
            return {name: self._read_parameter(model, layer.parameters[name]) for name in names}
        read = self._read_stem_parameter if layer.role == "stem" else self._read_parameter
        # One tensor for all experts of a mixture, or every pass would concatenate them.
        fused = {key: self._read_parameter(model, WeightSlot(key)) for key in _slots_by_fused_tensor(layer)}
        return {
            name: slot.to_layer_layout(slot.take_rows(fused[slot.key])) if slot.is_stacked else read(model, slot)
            for name, slot in layer.parameters.items()
        }

    def stored(self, model: str, slot: WeightSlot) -> Tensor:
        """Return one parameter as stored: on the CPU in the dtype of its file, in the layout of its layer."""
        source = self.source(model)
        tensor = source.read(slot.key, slot.rows)
        if (model, slot) not in self._known_finite:
            # Once per tensor: calibrations read each layer several times.
            check_finite(source.name, slot.key, tensor)
            self._known_finite.add((model, slot))
        return slot.to_layer_layout(tensor)

    def _read_parameter(self, model: str, slot: WeightSlot) -> Tensor:
        return to_device(self.stored(model, slot), self.device, self.dtype)

    def _read_stem_parameter(self, model: str, slot: WeightSlot) -> Tensor:
        """Read a parameter of the stem; a possible embedding table is converted row by row on use."""
        header = self.source(model).headers[slot.key]
        if self.device.type != "cpu" or len(header.shape) != 2 or header.dtype == self.dtype:
            return self._read_parameter(model, slot)
        if (model, slot) not in self._known_finite:
            self.stored(model, slot)  # checked, then read again: the checked pages would stay in memory
        return EmbeddingTable.wrap(self.stored(model, slot), self.dtype)

    def initial_state(self, inputs: object) -> tuple[State, SideInputs]:
        """Return the features before the first layer for raw inputs, and the side inputs of all layers."""
        return self.chain.start(inputs_to_device(inputs, self.device, self.dtype))

    def layer_map(self, model: str, layer: Layer, task: str) -> LayerMap:
        """Read one layer of one model for one task.

        Args:
            model: the model's name.
            layer: the layer; the last one includes the attachment.
            task: the task of the attachment.
        """
        # Attachments correct the final feature, which the last layer returns.
        is_last = layer.index == len(self.chain.layers)
        attachment = self._models[model].attachments.get(task) if is_last else None
        return LayerMap(layer, self.parameters(model, layer), attachment)

    def library_states(self, model: str, inputs: Any, task: str = "") -> list[State]:
        """Run the library's own module with a model's weights once; return the features after every layer.

        Args:
            model: the model's name; one block of its weights is in memory at a time.
            inputs: raw inputs.
            task: the task of the attachment, which corrects the last state.
        """
        if model in self._modules:
            states = self.chain.library_states(self._modules[model], inputs)
        else:
            with self._stream_model_weights(model):
                states = self.chain.library_states(self._skeleton, inputs)
        if (attachment := self._models[model].attachments.get(task)) is not None:
            stream = self.chain.layers[-1].stream
            states[-1][stream] = attachment(states[-1][stream])
        return states

    def _stream_model_weights(self, model: str) -> AbstractContextManager[None]:
        """Load a model's weights into the skeleton, block by block, inside the context."""
        # The library may read a tied weight under any of its names.
        used = {name for key in self.chain.parameter_keys() for name in self.chain.tied.get(key, (key,))}
        stem = {
            name: slot
            for slot in self.chain.layers[0].parameters.values()
            for name in self.chain.tied.get(slot.key, (slot.key,))
            if slot == WeightSlot(slot.key)
        }
        read = self._weight_reader(model)
        return stream_weights(
            self._skeleton,
            [layer.path for layer in self.chain.blocks],
            lambda name: self._read_stem_parameter(model, stem[name]) if name in stem else read(name),
            self.device,
            used,
        )

    def require_memory(self, model: str) -> None:
        """Raise a `DataError` if a model's weights exceed the memory budget; live models are in memory anyway."""
        count = sum(math.prod(header.shape) for header in self.source(model).headers.values())
        needed = count * self.dtype.itemsize
        if model not in self._modules and needed > self.budget:
            text = f"{needed / 1e6:,.1f} MB of weights of {model} don't fit compute.feature_budget"
            hint = "Raise it if a whole model fits in memory."
            raise DataError(f"{text}, {self.budget / 1e6:,.1f} MB", hint=hint)

    @contextmanager
    def load_module(self, model: str, task: str = "") -> Iterator[nn.Module]:
        """Load the library's whole module with one model's weights and correction, inside the context."""
        module = self._modules[model] if model in self._modules else self._module_with_weights(model)
        attachment = self._models[model].attachments.get(task)
        with ExitStack() as stack:
            if self.dtype == torch.float64:
                stack.enter_context(eager_experts(module))
            if attachment is not None:
                path = final_module_path(self.chain)
                hook = _attachment_hook(path, attachment)
                stack.callback(module.get_submodule(path).register_forward_hook(hook).remove)
            yield module

    def _module_with_weights(self, model: str) -> nn.Module:
        """Return a copy of the library's module with the weights of one model.

        Parameters that no layer reads and the file lacks stay on the meta device.
        """
        self.require_memory(model)
        # Checkpoints often store one name of tied weights only.
        held = self.source(model).headers.keys()
        names = [name for name in _weight_names(self._skeleton) if {name, *self.chain.tied.get(name, ())} & held]
        with buffers_on_device(self._skeleton, self.device):
            module = copy.deepcopy(self._skeleton)
        _set_weights(module, names, self._weight_reader(model))
        return module

    def _weight_reader(self, model: str) -> Callable[[str], Tensor]:
        """Return a function that reads weights by name; tied weights are read once."""
        source, once = self.source(model), dict[str, Tensor]()

        def read(key: str) -> Tensor:
            if key in source.headers and key not in self.chain.tied:
                return to_device(source.read(key), self.device, self.dtype)
            names = (key, *self.chain.tied.get(key, ()))
            stored = next((name for name in names if name in source.headers), key)
            if stored not in once:
                once[stored] = to_device(source.read(stored), self.device, self.dtype)
            return once[stored]

        return read


def require_same_parameters(skeleton: nn.Module, chain: LayerChain, source: StateSource) -> None:
    """Raise an `IncompatibleModelsError` for missing or unknown keys, other shapes, or integers for floats.

    Args:
        skeleton: the library's module.
        chain: its layers.
        source: the weights to check.
    """
    expected = {name: TensorHeader(tuple(p.shape), p.dtype) for name, p in skeleton.state_dict(keep_vars=True).items()}
    needed = {key: expected[key] for key in chain.parameter_keys()}
    headers = source.headers
    # Extra keys of the library, such as an unused pooler, are allowed; unknown ones are not.
    missing = [key for key in needed if key not in headers]
    unknown = [key for key in headers if key not in expected]
    lacks = f"lacks {shorten_list([*map(repr, missing)])}" if missing else ""
    has = f"has {shorten_list([*map(repr, unknown)])}, which {chain.architecture} does not know" if unknown else ""
    if missing or unknown:
        raise IncompatibleModelsError(
            f"{source.name} {' and '.join(filter(None, (lacks, has)))}",
            hint="All models must share one architecture; check `architecture` in the spec.",
            missing=missing,
            unknown=unknown,
        )
    for key, header in needed.items():
        if headers[key].shape != header.shape:
            raise IncompatibleModelsError(
                f"{source.name}: {key!r} has shape {list(headers[key].shape)}, expected {list(header.shape)}",
                hint="The checkpoint has another model size; use models fine-tuned from one base.",
                key=key,
            )
        if header.dtype.is_floating_point and not headers[key].dtype.is_floating_point:
            raise IncompatibleModelsError(
                f"{source.name}: {key!r} is stored as {headers[key].dtype}; expected a floating dtype",
                hint="Load the quantised model in float16 or wider and save it again.",
                key=key,
            )


@contextmanager
def stream_weights(
    module: nn.Module,
    block_paths: Sequence[str],
    read: Callable[[str], Tensor],
    device: torch.device,
    used: Collection[str] | None = None,
) -> Iterator[None]:
    """Run forward passes of `module` inside the context, with weights read block by block by `read`.

    A block's parameters are read before it runs and dropped after it; all others stay in memory.

    Args:
        module: the library's module, restored at the end.
        block_paths: paths of its blocks.
        read: full name of a weight -> its values.
        device: the device of the weights.
        used: names to read outside blocks; None reads all.
    """
    blocks = {path: module.get_submodule(path) for path in block_paths}
    in_blocks = {f"{path}.{name}" for path, block in blocks.items() for name in _weight_names(block)}
    outside = [name for name in _weight_names(module) if name not in in_blocks and (used is None or name in used)]
    with ExitStack() as stack:
        # Moving buffers touches every module, so it is skipped where nothing would move.
        if any(buffer.device != device for buffer in module.buffers()):
            stack.enter_context(buffers_on_device(module, device))
        stack.enter_context(_temporary_weights(module, outside, read))
        for path, block in blocks.items():
            _register_streaming_hooks(block, path, read, stack)
        yield


def _register_streaming_hooks(block: nn.Module, path: str, read: Callable[[str], Tensor], stack: ExitStack) -> None:
    """Register hooks that read a block's weights before it runs and drop them afterwards."""
    # Closing `loaded` alone drops the block's weights between passes.
    names, loaded = _weight_names(block), stack.enter_context(ExitStack())

    def load_block_weights(*_: Any) -> None:
        loaded.enter_context(_temporary_weights(block, names, lambda name: read(f"{path}.{name}")))

    stack.callback(block.register_forward_pre_hook(load_block_weights).remove)
    stack.callback(block.register_forward_hook(lambda *_: loaded.close()).remove)


def _weight_names(module: nn.Module) -> list[str]:
    """Return names of parameters, tied ones under every name, and of saved floating buffers."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return [
        name
        for name, value in saved.items()
        if isinstance(value, Tensor) and (name not in buffers or value.is_floating_point())
    ]


@contextmanager
def _temporary_weights(module: nn.Module, names: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[None]:
    """Replace weights inside the context and restore them afterwards."""
    # Parameters are replaced in their dictionaries, so that ties and hooks of the module survive.
    before = [(held, leaf, held[leaf]) for held, leaf, _ in _weight_locations(module, names)]
    try:
        _set_weights(module, names, read)
        yield
    finally:
        for held, leaf, weight in before:
            held[leaf] = weight


def _set_weights(module: nn.Module, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
    for name, (held, leaf, is_buffer) in zip(names, _weight_locations(module, names), strict=True):
        value = read(name)
        is_bare = is_buffer or isinstance(value, EmbeddingTable)  # nn.Parameter would convert the whole table
        held[leaf] = value if is_bare else nn.Parameter(value, requires_grad=False)


def _weight_locations(module: nn.Module, names: Sequence[str]) -> list[tuple[dict[str, Any], str, bool]]:
    """Return for each name the dictionary that holds the tensor, its key in there, and True for a buffer."""
    owners = [(module.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in names)]
    owned = [(owner, leaf, leaf not in owner._parameters) for owner, leaf in owners]
    return [(owner._buffers if is_buffer else owner._parameters, leaf, is_buffer) for owner, leaf, is_buffer in owned]


def attachment_tensors(attachments: Attachments, prefix: str | int) -> dict[str, Tensor]:
    """Return the tensors of all corrections under the keys `prefix/tensor/task`, for saving."""
    return {
        f"{prefix}/{name}/{task}": value.detach()
        for task, attachment in sorted(attachments.items())
        for name, value in attachment.tensors().items()
    }


def attachments_from_tensors(
    tensors: Iterable[tuple[str, Tensor]], make: Callable[[Mapping[str, Tensor]], Attachment]
) -> dict[str, Attachment]:
    """Build corrections by task from saved tensors; `make` takes the tensors of one task."""
    by_task: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors:
        _, name, task = key.split("/", 2)
        by_task[task][name] = value
    return {task: make(of_task) for task, of_task in by_task.items()}


def final_module_path(chain: LayerChain) -> str:
    """Return the path of the module that returns the final feature; raise if there is none."""
    last = chain.layers[-1]
    path = last.path if last.role == "block" else chain.final
    if path is None:
        raise IncompatibleModelsError(
            f"no module of {chain.architecture} returns the output of the {last.role}, to which a correction "
            "could be attached",
            hint="Choose a method that changes weights.",
        )
    return path


def _attachment_hook(path: str, attachment: Attachment) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook that applies a correction to a module's output features."""

    def correct_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        changed = attachment(output_features(path, output))
        # Library blocks return tuples whose first entry is the features.
        return changed if isinstance(output, Tensor) else type(output)([changed, *output[1:]])

    return correct_output


class ScoredSamples:
    """One task's samples with a score map, for merge methods that differentiate scores with respect to weights."""

    def __init__(self, pool: ModelPool, samples: SampleSet, head: ScoreMap, pooling: Pool) -> None:
        self._samples, self._pool, self._head, self._pooling = samples, pool, head, pooling

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the weights that scores depend on."""
        more = self._head.lm.keys if isinstance(self._head, LmHead) else ()
        return tuple(dict.fromkeys((*self._pool.chain.parameter_keys(), *more)))

    @property
    def parts(self) -> tuple[tuple[str, tuple[int, int] | None], ...]:
        """The parameter tensors behind `keys`: each a key, and its rows of a fused tensor (None for all)."""
        slots = [slot for layer in self._pool.chain.layers for slot in layer.parameters.values()]
        rows: dict[str, list[tuple[int, int] | None]] = {key: [] for key in self.keys}
        for key, place in dict.fromkeys((slot.key, slot.rows) for slot in slots):
            rows[key].append(place)
        fused = {key: places for key, places in rows.items() if places and None not in places}
        return tuple((key, place) for key in rows for place in fused.get(key, [None]))

    def to_pool_device(self, weight: Tensor) -> Tensor:
        """Return a weight on the pool's device, in the pool's dtype."""
        return weight.to(self._pool.device, self._pool.dtype)

    def log_probabilities(self, rows: Sequence[int], weights: Mapping[str, Tensor]) -> Tensor:
        """Return class log-probabilities [n, classes] of the samples `rows`, differentiable in `weights`."""
        state, side = self._pool.initial_state(self._samples.load(rows))
        held = _GradWeightSource(weights)
        for layer in self._pool.chain.layers:
            parameters = {
                name: slot.to_layer_layout(held.read(slot.key, slot.rows)) for name, slot in layer.parameters.items()
            }
            state = layer.call(parameters, state, side)
        # The head must read the weights that carry gradients, not those of the pool.
        head = self._head.of_model(held) if isinstance(self._head, LmHead) else self._head
        return torch.log_softmax(head.scores(layer.pool_state(state, side, self._pooling)), dim=-1)


class _GradWeightSource:
    """In-memory weights with the interface of a checkpoint that keep their gradients."""

    name = "the weights in memory"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.headers = {key: TensorHeader(tuple(value.shape), value.dtype) for key, value in weights.items()}
        self._weights = weights

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a tensor, or its rows [start, stop)."""
        return self._weights[key] if rows is None else self._weights[key][slice(*rows)]
