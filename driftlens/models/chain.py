"""Models as chains of layers, each a pure function of parameters and features. Entry point: `LayerChain`.

Boundary 0 is the raw input; layer l maps boundary l - 1 to boundary l. The stem is layer 1, block j (counted from 0)
layer j + 2, the head layer L. Every parameter belongs to the first layer that lists it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import LazyTensors, StateSource
from driftlens.models.heads import ScoreMap, is_top1_correct
from driftlens.models.tracing.block_call import (
    BlockCall,
    RawInputs,
    TensorReference,
    map_named_leaves,
    store_tensor,
)
from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Registry

# The features at a boundary by name, most often `hidden` [n, t, d]; the first axis of each tensor is the sample. Rows
# of masked tokens are zeros, so that padding has no drift.
State = dict[str, Tensor]
Parameters = Mapping[str, Tensor]
# Called with a site's name and its input [n, t, k] just before the site runs. If the result is a tensor, it is the
# output, and the site doesn't run unless its module computes more than that. Any other result, unless None, is called
# with the site's output; the result of that call, unless None, replaces the output.
Tap = Callable[[str, Tensor], Tensor | Callable[[Tensor], Tensor | None] | None]

# Layer index and the parameter's name in the layer. The name alone repeats in every block.
ParameterKey = tuple[int, str]

# The rule of token weights of a mixture's experts. A token counts the square of its gate, because the gate scales the
# expert's output and the loss is squared; it counts 0 for other experts.
GATED = "gated"

Role = Literal["stem", "block", "head"]
SiteKind = Literal["linear", "layer_norm", "rms_norm"]
Pool = Literal["cls", "mean", "last", "all"]


@dataclass(eq=False)
class ExpertRoutes:
    """The experts and gates of all tokens in one pass through a mixture of experts.

    `chosen` [T, k] are the experts of every token and `gates` [T, k] their weights. The pass writes both, unless they
    are given; with given routes, it uses these experts with the gates that its own router computes for them.
    """

    chosen: Tensor | None = None
    gates: Tensor | None = None
    is_given: bool = False

    def record(self, chosen: Tensor, gates: Tensor) -> None:
        """Store the experts and gates of a pass, unless they are fixed."""
        if not self.is_given:
            # The cached order belongs to the routes of an earlier batch.
            self.__dict__.pop("_sorted_experts", None)
            self.chosen, self.gates = (part.reshape(-1, part.shape[-1]) for part in (chosen, gates))

    def tokens_and_gates(self, expert: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the indices [m] of the tokens that are routed to one expert, and their gates [m]."""
        assert self.gates is not None
        places = self._expert_token_positions(expert, rows)
        return places % len(self.gates), self.gates.mT.reshape(-1)[places]

    def expert_tokens(self, expert: int, rows: int) -> Tensor:
        """Return the indices [m] of the tokens that are routed to one expert."""
        assert self.chosen is not None
        return self._expert_token_positions(expert, rows) % len(self.chosen)

    def _expert_token_positions(self, expert: int, rows: int) -> Tensor:
        # `rows` is known to the caller; to count them here would synchronize with the device.
        experts, places = self._sorted_experts
        return places[(experts < expert).sum() + torch.arange(rows, device=places.device)]

    def tokens_per_expert(self, num_experts: int) -> list[int]:
        """Return the number of tokens routed to each expert; synchronizes with the device."""
        experts = self._sorted_experts[0]
        bounds = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
        return torch.searchsorted(experts, bounds).diff().tolist()

    @cached_property
    def _sorted_experts(self) -> tuple[Tensor, Tensor]:
        """All chosen experts in sorted order, [k T], and the permutation that sorts them."""
        assert self.chosen is not None
        # Stable, because rows of an expert are identified by their order.
        return self.chosen.mT.reshape(-1).sort(stable=True)

    def expert_loads(self, num_experts: int, mask: Tensor | None) -> Tensor:
        """Return the number of unmasked tokens of each expert and the sum of their gates, [2, experts]."""
        assert self.chosen is not None and self.gates is not None
        real = self.gates.new_ones(len(self.gates)) if mask is None else mask.reshape(-1).to(self.gates)
        sent = torch.nn.functional.one_hot(self.chosen, num_experts).to(self.gates) * real[:, None, None]
        return torch.stack([sent.sum(dim=(0, 1)), (sent * self.gates[..., None]).sum(dim=(0, 1))])

    def rerouted_tokens(self, other: ExpertRoutes) -> Tensor:
        """Return a mask [T] of the tokens whose experts differ from those in `other`, in any order."""
        assert self.chosen is not None and other.chosen is not None
        return (self.chosen.sort(dim=-1).values != other.chosen.sort(dim=-1).values).any(dim=-1)

    def fixed_copy(self) -> ExpertRoutes:
        """Return a copy whose experts another pass uses instead of those of its own router."""
        return ExpertRoutes(self.chosen, self.gates, is_given=True)


@dataclass(frozen=True, eq=False)
class SideInputs(Mapping[str, Tensor]):
    """The block arguments of one batch other than features (masks, positions, token ids), shared by all models.

    `<stream>_mask` [n, t] is true where a token of that stream counts. `calls` and `inputs` refer to `tensors`.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    calls: tuple[BlockCall, ...] = ()
    inputs: RawInputs | None = None
    routes: ExpertRoutes | None = None

    @classmethod
    def from_calls(
        cls, paths: Sequence[str], calls: Sequence[BlockCall], inputs: RawInputs, mask: Tensor | None
    ) -> SideInputs:
        """Build side inputs from the recorded calls of the blocks; store every tensor once."""
        tensors: dict[str, Tensor] = {} if mask is None else {"hidden_mask": mask}
        named_inputs = replace(
            inputs, values=map_named_leaves(inputs.values, partial(store_tensor, tensors), "inputs")
        )

        def store_shared_tensor(path: str, leaf: Any, name: str) -> Any:
            return store_tensor(tensors, leaf, f"{path}.{name}", stateless=not name.startswith("output."))

        named_calls = [
            call.map_leaves(partial(store_shared_tensor, path)) for path, call in zip(paths, calls, strict=True)
        ]
        # The lowest number of float64 becomes -inf in float32, in which libraries compute the softmax. A row that is
        # masked completely would be NaN.
        lowest = torch.finfo(torch.float32).min
        tensors = {
            name: tensor.clamp(min=lowest) if tensor.dtype == torch.float64 else tensor
            for name, tensor in tensors.items()
        }
        return cls(tensors, tuple(named_calls), named_inputs)

    def block_call(self, position: int) -> BlockCall:
        """Return the recorded call of one block, with its tensors filled in."""
        return self.calls[position].map_leaves(self._resolve_reference)

    def raw_inputs(self) -> RawInputs:
        """Return the raw inputs of the batch, with their tensors filled in."""
        assert self.inputs is not None
        return replace(self.inputs, values=map_named_leaves(self.inputs.values, self._resolve_reference))

    def _resolve_reference(self, leaf: Any, _name: str) -> Any:
        return self[leaf.key] if isinstance(leaf, TensorReference) else leaf

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def mask(self, stream: str) -> Tensor | None:
        """Return the mask [n, t] of a stream, true where a token counts; None where all do."""
        return self.tensors.get(f"{stream}_mask")

    def with_routes(self, routes: ExpertRoutes | None) -> SideInputs:
        """Return a copy with routes, which a mixture of experts writes or uses."""
        return self if routes is None else replace(self, routes=routes)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes, including those shared with other batches."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> SideInputs:
        """Return a copy on another device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Modality:
    """A kind of model input (images, texts), with its default pooling and accuracy metric.

    Attributes:
        name: `image`, `text`, or `tensor` for inputs of the caller's own.
        pool: the default pooling to one vector per sample.
        metric: the name of the share of correct answers in the accuracy table.
        is_right: (score map, final features [n, d], labels) -> True for correct answers, [n].
    """

    name: str
    pool: Pool = "cls"
    metric: str = "accuracy"
    is_right: Callable[[ScoreMap, Tensor, Sequence[str]], Tensor] = is_top1_correct


IMAGE = Modality("image")
TEXT = Modality("text", pool="mean")
TENSOR = Modality("tensor")


@dataclass(frozen=True)
class WeightSlot:
    """The place of one parameter of a layer in a checkpoint: key, rows and layout.

    Attributes:
        key: the checkpoint's tensor.
        rows: rows [start, stop) of a fused tensor (an attention in-projection).
        transposed: True if the checkpoint stores the matrix as [in, out].
        kernel: [in, h, w] if the checkpoint stores each row as the kernel of a convolution.
        is_stacked: True if the one selected row is the parameter.
    """

    key: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    kernel: tuple[int, ...] = ()
    is_stacked: bool = False

    def layer_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the parameter's shape in the layer, given the shape of the checkpoint's tensor."""
        shape = stored if self.rows is None else (self.rows[1] - self.rows[0], *stored[1:])
        if self.is_stacked:
            shape = shape[1:]
        if self.kernel:
            shape = (shape[0], math.prod(self.kernel))
        return shape[::-1] if self.transposed else shape

    def take_rows(self, whole: Tensor) -> Tensor:
        """Return the parameter's rows of the checkpoint's tensor, without a copy."""
        return whole if self.rows is None else whole[slice(*self.rows)]

    def to_layer_layout(self, stored: Tensor) -> Tensor:
        """Convert a parameter from the checkpoint's layout to the layer's, without a copy."""
        if self.is_stacked:
            stored = stored[0]
        if self.kernel:
            stored = stored.flatten(1)
        return stored.mT if self.transposed else stored

    def to_stored_layout(self, parameter: Tensor) -> Tensor:
        """Convert a parameter from the layer's layout to the checkpoint's, without a copy."""
        if self.transposed:
            parameter = parameter.mT
        if self.is_stacked:
            return parameter[None]
        return parameter.reshape(len(parameter), *self.kernel) if self.kernel else parameter


@dataclass(frozen=True)
class Site:
    """One calibratable module of a layer.

    Attributes:
        name: its path inside the layer (`attn.q_proj`); its parameters are `name.weight` and perhaps `name.bias`.
        input: sites with the same input read the same tensor.
        token_weights: the chain's rule for how much each token counts in moments.
        eps: the constant of a norm.
        mixes_tokens: True if other tokens read this site's output at one token, as attention reads keys and values.
        runs: the number of calls in one pass; a module that runs twice has no one input to be calibrated on.
        stream: the entry of the state whose tokens it reads; "" for the layer's own.
        only_named: True if it is calibrated only where a pattern of sites names it.
        expert: the number of the mixture's expert that it belongs to, which reads only the tokens sent there.
    """

    name: str
    kind: SiteKind
    input: str
    token_weights: str = "uniform"
    eps: float | None = None
    mixes_tokens: bool = False
    runs: int = 1
    stream: str = ""
    only_named: bool = False
    expert: int | None = None


# One layer as a function that modifies nothing: its parameters by its own names, the state before it, the side inputs
# and perhaps a tap -> the state after it.
LayerCall = Callable[..., State]


@dataclass(frozen=True)
class Layer:
    """One layer of a `LayerChain`: its function, parameters and calibratable sites.

    Attributes:
        index: 1 for the stem, L for the head.
        path: module path in the library's own names.
        parameters: the layer's own parameter names, and where each lies in a checkpoint.
        sites: calibratable modules, in the order in which they run.
        stream: the entry of the state that this layer writes; norms and cosines pool it.
        pool: a pooling that replaces every other except `all`, such as the mean for tokens of an encoder, none of which
            has the scores alone.
        is_residual: True if the layer is h + g(h), so that its input drift can be subtracted from its output drift.
        no_sites: parameters that belong to no site -> their module, and its kind with the reason; for messages.
        needs: the side input without which its sites do not run, such as the places of images; "" without one.
    """

    index: int
    role: Role
    path: str
    parameters: Mapping[str, WeightSlot]
    call: LayerCall
    sites: tuple[Site, ...] = ()
    stream: str = "hidden"
    pool: Pool | None = None
    is_residual: bool = False
    no_sites: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needs: str = ""

    def has_inputs_in(self, side: SideInputs) -> bool:
        """Return True if the batch has inputs for this layer's sites, such as images for a vision tower."""
        return not self.needs or self.needs in side

    @property
    def num_experts(self) -> int:
        """The number of experts of a mixture; 0 for other layers."""
        return max((site.expert + 1 for site in self.sites if site.expert is not None), default=0)

    def pool_state(self, state: State, side: SideInputs, how: Pool) -> Tensor:
        """Pool the layer's output state to one vector per sample, linearly.

        Args:
            state: the state after the layer.
            side: the side inputs, which have the stream's mask.
            how: the pooling; the layer's own replaces it, unless it is `all`.
        """
        pool = how if how == "all" else self.pool or how
        return pool_features(state[self.stream], pool, side.mask(self.stream))


@dataclass(frozen=True)
class LayerChain:
    """A model as layers: head(blocks(stem(x))) equals the library's own forward pass.

    Attributes:
        architecture: the adapter's name, for messages and the manifest.
        start: raw inputs of a batch -> state at boundary 0 and the side inputs of every layer.
        library_states: (module, raw inputs) -> the states at boundaries 1..L of one ordinary forward pass of the
            library's own module, with which the closure error compares the chain.
        token_weights: rules named by `Site.token_weights`: state and side -> weights [n, t].
        require_shared: (models by name, a batch) -> None; raises if the side inputs of one model do not fit another.
            None if side inputs depend on the raw inputs alone.
        tied: every checkpoint key of a tied tensor -> all keys of this tensor.
        settings: settings of the architecture other than shapes (activation, eps, heads), for messages.
        final: path of the library's module whose output is the final feature, "" for the model itself; None if no
            module returns it.
    """

    architecture: str
    layers: tuple[Layer, ...]
    start: Callable[[Any], tuple[State, SideInputs]]
    library_states: Callable[[nn.Module, Any], list[State]]
    token_weights: Mapping[str, Callable[[State, SideInputs], Tensor]] = field(default_factory=dict)
    require_shared: Callable[[Iterable[tuple[str, nn.Module]], Any], None] | None = None
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    modality: Modality = TENSOR
    final: str | None = None

    def __post_init__(self) -> None:
        roles = [layer.role for layer in self.layers]
        expected = ["stem", *["block"] * (len(roles) - 2), "head"]
        assert roles == expected, roles
        assert [layer.index for layer in self.layers] == list(range(1, len(roles) + 1))

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """The layers between stem and head."""
        return self.layers[1:-1]

    def parameter_keys(self) -> tuple[str, ...]:
        """Return the checkpoint keys of all parameters, each once, in forward order."""
        return tuple(dict.fromkeys(slot.key for layer in self.layers for slot in layer.parameters.values()))

    def own_parameters(self, layer: Layer) -> dict[str, WeightSlot]:
        """Return the parameters that belong to `layer`: those that no earlier layer lists."""
        # Tied weights and packed tensors are listed by several layers, but must be solved for once.
        earlier = {slot for other in self.layers[: layer.index - 1] for slot in other.parameters.values()}
        return {name: slot for name, slot in layer.parameters.items() if slot not in earlier}


class Adapter(Protocol):
    """One architecture family, registered under its name.

    An adapter may have `holds`, paths of attributes: `matches` is then called only for modules that have one of them.
    """

    @property
    def name(self) -> str:
        """The name of the family."""

    def matches(self, module: nn.Module) -> bool:
        """Return True if this adapter supports `module`, by structure, not by version or class name alone."""

    def chain(self, module: nn.Module) -> LayerChain:
        """Return the layers of a module, which may be on meta; parameter names are those of `module.state_dict()`."""


# Modules without an adapter are split by `sequential_chain`.
adapters: Registry[Adapter] = Registry("adapter", "driftlens.models.architectures", "driftlens.adapters")


def adapter_for(module: nn.Module) -> Adapter | None:
    """Return the adapter for a module's family; None if only `sequential_chain` can split it."""
    return next((entry for entry in adapters.values() if _can_match(entry, module) and entry.matches(module)), None)


def _can_match(adapter: Adapter, module: nn.Module) -> bool:
    """Return False if the module lacks the parts that every model of the adapter has."""
    # `matches` walks all blocks of a module. This check is cheap and excludes most adapters.
    paths: tuple[str, ...] = getattr(adapter, "holds", ())
    return not paths or any(attribute_at(module, path) is not None for path in paths)


def attribute_at(part: Any, path: str) -> Any:
    """Return the attribute at a dotted path; None if there is none."""
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def pool_features(hidden: Tensor, how: Pool, mask: Tensor | None = None) -> Tensor:
    """Pool features to one vector per sample, [n, d], or [n, t * d] for `all`; linear in `hidden`.

    Args:
        hidden: [n, t, d], or [n, d], which is returned as it is; of convolutions [n, c, h, w], with a mean over space.
        how: `cls` the first token, `last` the last unmasked one, `mean` the mean over unmasked tokens, `all` the whole
            state flattened (its norm is the Frobenius norm).
        mask: [n, t], true where a token counts; None, or another shape (of a head's input), means everywhere.

    Raises:
        SpecError: there is no such way, or `cls` or `last` of features that have channels and no tokens.
    """
    if how not in get_args(Pool):
        raise SpecError(f"pool is {how!r}, expected one of {', '.join(get_args(Pool))}")
    if hidden.dim() == 2:
        return hidden
    if hidden.dim() > 3 and how in ("cls", "last"):
        raise SpecError(
            f"pool {how!r} requires tokens [n, t, d]; the features have channels and space, {list(hidden.shape)}",
            hint="Use `mean` or `all`.",
        )
    if hidden.dim() > 3 and how == "mean":
        return hidden.flatten(2).mean(dim=2)
    mask = None if mask is None or mask.shape != hidden.shape[:2] else mask
    if how == "cls":
        return hidden[:, 0]
    if how == "all":
        return hidden.flatten(1)
    if how == "last":
        if mask is None:
            return hidden[:, -1]
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        # Not the number of tokens less one: rows may be padded on the left. A row of padding alone takes position 0.
        last = torch.where(mask.bool(), positions, -1).amax(dim=1).clamp_min(0)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.to(hidden.dtype)
    # At least 1: a sample without tokens has zeros, not NaN.
    return (hidden * weights[..., None]).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp_min(1)


def updated_tensors(
    chain: LayerChain, parameters: Mapping[ParameterKey, Tensor], start: StateSource
) -> LazyTensors[str]:
    """Map checkpoint keys to tensors with new layer parameters, each computed on access.

    Args:
        chain: the model's layers.
        parameters: the new parameters, by layer index and name.
        start: the changed model under the skeleton's key names, whose tensors provide layout, dtype, and the rows of
            packed tensors that have no new parameter.
    """
    touched: dict[str, list[tuple[ParameterKey, WeightSlot]]] = {}
    for index, name in parameters:
        slot = chain.layers[index - 1].parameters[name]  # several rows may share one packed tensor
        touched.setdefault(slot.key, []).append(((index, name), slot))

    def updated_tensor(key: str) -> Tensor:
        # A copy, because a source may return its own tensor. Rows without a new parameter keep their values.
        tensor = start.read(key).clone()
        for parameter, slot in touched[key]:
            value = parameters[parameter]
            rows = slice(None) if slot.rows is None else slice(*slot.rows)
            tensor[rows] = slot.to_stored_layout(value).detach().to(tensor)
        return tensor

    return LazyTensors(touched, updated_tensor)
