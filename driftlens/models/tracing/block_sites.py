"""Calibratable modules inside any block, in the order in which they run, and the experts of mixtures.

A mixture is a module with matrices of all its experts in tensors [experts, ., .]. It is given the experts of each token
and their gates, or the tokens of every expert. Its forward function is not replaced: a `TorchFunctionMode` watches what
it reads from its tensors, and routes are read off the router's `topk`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from driftlens.models.chain import GATED, ExpertRoutes, Site, SiteKind, State, Tap, WeightSlot
from driftlens.models.tracing.block_call import replace_forwards

# Name of a site that is the whole block, for which the path in the block would be empty.
BLOCK_ITSELF = "self"


def site_kind(module: nn.Module) -> SiteKind | None:
    """Return the kind of calibratable site that a module is (linear or norm), or None.

    Sites are linear modules, GPT-2's included; convolutions, as linear maps of patches; layer norms over one axis; and
    modules named like an RMS norm, with a weight vector and no bias.
    """
    if isinstance(module, nn.Linear) or _has_transposed_weight(module) or _is_plain_convolution(module):
        return "linear"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if isinstance(module, nn.LayerNorm):
        return "layer_norm"
    # By name, because each family of transformers has its own class, and torch's `nn.RMSNorm` is used by few.
    called = type(module).__name__
    if ("RMSNorm" in called or "T5LayerNorm" in called) and getattr(module, "bias", None) is None:
        return "rms_norm"
    return None


def _has_transposed_weight(module: nn.Module) -> bool:
    """Return True for the linear module of GPT-2, whose weight is [in, out]."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2


def _is_plain_convolution(module: nn.Module) -> bool:
    """Return True for a module that computes torch's own convolution, every output from all channels."""
    return (
        isinstance(module, nn.Conv2d)
        and (type(module).forward, type(module)._conv_forward) == (nn.Conv2d.forward, nn.Conv2d._conv_forward)
        and module.groups == 1
        and module.padding_mode == "zeros"
    )


# Norms by whether a trial call showed that they are over channels; a trial takes as long as a small batch.
_tried_norms: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _is_channel_norm(module: nn.Module) -> bool:
    """Return True for a norm over the channels of [n, c, h, w], found by a trial call."""
    if site_kind(module) in (None, "linear") or type(module).forward in (
        nn.LayerNorm.forward,
        nn.RMSNorm.forward,
    ):
        return False
    if module not in _tried_norms:
        weight: Any = module.weight
        # The extra axis of a norm of width 2 has length 3, so that it is not mistaken for the channels.
        try:
            module.forward(weight.new_zeros(1, len(weight), 1, 2 + (len(weight) == 2)))
            _tried_norms[module] = True
        # A norm over the last axis expects another width; which error it raises depends on the library.
        except Exception:
            _tried_norms[module] = False
    return _tried_norms[module]


# Attributes with the number of channels that a module reads; norms without one have as many weights.
_WIDTHS = ("in_channels", "num_features", "num_channels", "in_features")


def is_channels_last(shape: Sequence[int], modules: Iterable[nn.Module], otherwise: bool) -> bool:
    """Return True if features [n, *shape] have their channels last, judged by the next module that reads them.

    Args:
        shape: the features' shape per sample.
        modules: the modules after the boundary, in order.
        otherwise: returned if none of them reads these features.
    """
    for module in modules:
        reads_last = _needs_channels_last(module)
        width = next((vars(module)[name] for name in _WIDTHS if name in vars(module)), None)
        if reads_last is not None and width is None:
            width = len(module.get_parameter("weight"))
        if reads_last is not None and width in (shape[0], shape[-1]):
            return reads_last if shape[0] == shape[-1] else width == shape[-1]
    return otherwise


def _needs_channels_last(module: nn.Module) -> bool | None:
    """Return True if a module reads channels last, False if first, None if it does not matter."""
    if isinstance(module, _ConvNd | _NormBase | nn.GroupNorm):
        return False
    return None if site_kind(module) is None else not _is_channel_norm(module)


def parameter_slot(block: nn.Module, parameter: str, key: str) -> WeightSlot:
    """Return the checkpoint slot of a block's parameter.

    Args:
        block: the block.
        parameter: the parameter's name in the block.
        key: its name in the whole model.
    """
    owner, _, leaf = parameter.rpartition(".")
    module = block.get_submodule(owner)
    if leaf == "weight" and _is_plain_convolution(module):
        return WeightSlot(key, kernel=tuple(module.get_parameter(leaf).shape[1:]))
    return WeightSlot(key, transposed=leaf == "weight" and _has_transposed_weight(module))


def sites_in_block(
    block: nn.Module,
    parameters: Collection[str],
    run: Callable[[], State],
    state: State,
    streams: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[tuple[Site, ...], State]:
    """Return the sites of a block in the order of their first call, and its output.

    Args:
        block: the block.
        parameters: names of its parameters; a module without one of its own is no site.
        run: runs the block on `state` and returns the state after it.
        state: the state before the block.
        streams: features of other tokens that the block reads, by the name of their stream.
    """
    # Inputs are compared by identity. The tensors are kept, so that no later one gets the same address.
    calls: defaultdict[str, list[_Reading]] = defaultdict(list)
    # Subclasses of linear modules that return more than the product, such as routers.
    not_linear: set[str] = set()
    candidates: dict[str, tuple[SiteKind, nn.Module]] = {}

    def record_non_tensor_output(name: str, _module: nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, Tensor):
            not_linear.add(name)

    def record_input(name: str, geometry: Hashable, x: Tensor) -> None:
        calls[name].append((x, None if x.is_inference() else x._version, geometry))

    with contextlib.ExitStack() as hooks:
        for name, kind, module in _site_candidates(block, parameters):
            candidates[name] = kind, module
            hooks.callback(_register_input_listener(module, partial(record_input, name, _input_row_settings(module))))
            hooks.callback(module.register_forward_hook(partial(record_non_tensor_output, name)).remove)
        output = run()
    # Modules that read some tokens only, such as experts, are no sites: their rows [m, k] are neither one per sample
    # nor one per place of the features. All children of a list are experts if one of them is or never runs, because an
    # expert can read that many rows by chance.
    whole = [_num_feature_vectors(features["hidden"]) for features in (state, output)]
    reads_rows = {name for name, inputs in calls.items() if any(x.dim() == 2 for x, _, _ in inputs)}
    partial_readers = {
        _path_with_wildcards(name)
        for name in candidates
        if name not in calls
        or any(
            x.dim() == 2
            and len(x) != len(state["hidden"])
            and (not len(x) or all(len(x) % places for places in whole))
            for x, _, _ in calls[name]
        )
    }
    sites = [
        Site(
            name,
            kind,
            _first_site_with_same_input(calls, name),
            # The name of the constant depends on the library.
            eps=getattr(module, "eps", getattr(module, "variance_epsilon", None)),
            runs=len(inputs),
            stream=next((stream for stream, x in streams.items() if inputs[0][0] is x), ""),
        )
        for name, inputs in calls.items()
        for kind, module in [candidates[name]]
        if name not in not_linear
        if name not in reads_rows or _path_with_wildcards(name) not in partial_readers
    ]
    return tuple(sites), output


def _num_feature_vectors(features: Tensor) -> int:
    """Return the number of vectors in features [n, d], [n, t, d] or [n, c, h, w]."""
    return features.numel() // features.shape[1 if features.dim() > 3 else -1]


def _path_with_wildcards(path: str) -> str:
    """Return a path with `*` in place of numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def siteless_parameters(
    block: nn.Module, parameters: Collection[str], sites: Collection[Site]
) -> dict[str, tuple[str, str]]:
    """Return the parameters of a block that belong to no site, each with its module and the reason.

    Args:
        block: the block.
        parameters: names of its parameters.
        sites: its sites.
    """
    names, without_site = {site.name for site in sites}, {}
    for parameter in parameters:
        owner, _, leaf = parameter.rpartition(".")
        if owner not in names:
            parent = owner.rpartition(".")[0]
            # `nn.MultiheadAttention` never calls its output projection, so this is no site either.
            if owner != BLOCK_ITSELF and isinstance(block.get_submodule(parent), nn.MultiheadAttention):
                owner = parent
            module = block.get_submodule("" if owner == BLOCK_ITSELF else owner)
            without_site[parameter] = owner, _describe_module_without_site(module, owner, leaf)
    return without_site


def _describe_module_without_site(module: nn.Module, path: str, parameter: str) -> str:
    kind, why = type(module).__name__, ""
    if isinstance(module, nn.MultiheadAttention):
        why = "its projections don't run as modules"
    elif _is_expert_path(path) or "Expert" in kind:
        why = "experts of a mixture, which only some tokens reach"
    elif isinstance(module, _NormBase):
        why = "it uses training statistics"
    elif isinstance(module, _ConvNd):
        why = "depthwise or grouped" if module.groups > 1 else "no plain convolution of images"
    elif site_kind(module) is not None:
        why = "it never runs, or not on exactly all tokens"
    elif next(module.children(), None) is not None:
        kind = f"{kind}.{parameter}"
    return f"{kind}: {why}" if why else kind


# An input, its version and the geometry of its rows. Tensors of inference mode have no version.
_Reading = tuple[Tensor, int | None, Hashable]


def _first_site_with_same_input(calls: Mapping[str, Sequence[_Reading]], reader: str) -> str:
    value, *reading = calls[reader][0]
    # In inference mode, a tensor that was overwritten in between can't be recognized.
    if reading[0] is None:
        return reader
    return next(name for name, [(x, *other), *_] in calls.items() if x is value and other == reading)


def _input_row_settings(module: nn.Module) -> Hashable:
    """Return the settings by which a site turns its input into rows, such as kernel size and stride."""
    if isinstance(module, nn.Conv2d):
        return module.kernel_size, module.stride, module.padding, module.dilation
    return _is_channel_norm(module)


@contextlib.contextmanager
def tap_sites(block: nn.Module, sites: Collection[Site], tap: Tap | None) -> Iterator[None]:
    """Call `tap`, unless it is None, for each site of a block in the body of a `with` statement."""
    with contextlib.ExitStack() as hooks:
        if tap is not None:
            for site in sites:
                module = block.get_submodule("" if site.name == BLOCK_ITSELF else site.name)
                _register_tap_hooks(module, partial(tap, site.name), hooks)
        yield


def _site_candidates(block: nn.Module, parameters: Collection[str]) -> Iterator[tuple[str, SiteKind, nn.Module]]:
    for path, module in block.named_modules():
        name, kind = path or BLOCK_ITSELF, site_kind(module)
        # A module whose weight is computed (weight norm) has no such parameter and can't be solved for.
        if kind is not None and f"{name}.weight" in parameters and not _is_expert_path(name):
            yield name, kind, module


def _is_expert_path(path: str) -> bool:
    """Return True if a module is among the experts of a mixture, which not every token reaches."""
    return "experts" in path.split(".")


def _register_input_listener(module: nn.Module, listen: Callable[[Tensor], object]) -> Callable[[], None]:
    """Call `listen` with each input of `module`; return a function that removes the hook."""

    def call_listener(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(args[0] if args else next(iter(kwargs.values())))

    return module.register_forward_pre_hook(call_listener, with_kwargs=True).remove


def _register_tap_hooks(
    module: nn.Module,
    tap: Callable[[Tensor], Tensor | Callable[[Tensor], Tensor | None] | None],
    hooks: contextlib.ExitStack,
) -> None:
    """Register hooks that pass copies of a module's inputs and outputs to `tap`, or return the output it knows."""
    # Copies, as blocks may overwrite either later. A linear module's output is computed from its weight and bias,
    # without what a subclass, a parametrization or a hook adds.
    rows_of: Callable[[Tensor], Tensor] = Tensor.clone
    is_image = isinstance(module, nn.Conv2d) or _is_channel_norm(module)
    if is_image:
        rows_of = partial(_convolution_patches, module) if isinstance(module, nn.Conv2d) else _flatten_space_to_tokens
    heard: list[tuple[Tensor, Tensor | Callable[[Tensor], Tensor | None] | None]] = []
    computes = isinstance(module, nn.Linear) and (
        type(module).forward is not nn.Linear.forward or is_parametrized(module)
    )

    def tap_input(x: Tensor) -> None:
        copy = rows_of(x)
        heard.append((copy, tap(copy)))

    def tap_output(_module: nn.Module, _args: object, output: Tensor) -> Tensor | None:
        x, hear = heard.pop()
        if hear is None or isinstance(hear, Tensor):
            return None
        # No copy: the gradient must flow back to this tensor.
        if output.requires_grad:
            rows = _flatten_space_to_tokens(output) if is_image else output
        elif computes:
            weights = dict(module.named_parameters(recurse=False))
            rows = F.linear(x, weights["weight"], weights.get("bias"))
        else:
            rows = _flatten_space_to_tokens(output) if is_image else output.clone()
        changed = hear(rows)
        if changed is None and not output.requires_grad:
            return None
        rows = rows.clone() if changed is None else changed
        return rows.mT.reshape(output.shape) if is_image else rows

    forward = module.forward

    def forward_unless_known(*args: Any, **kwargs: Any) -> Any:
        known = heard[-1][1]
        return known.clone() if isinstance(known, Tensor) else forward(*args, **kwargs)

    hooks.callback(_register_input_listener(module, tap_input))
    # The rows of other modules are not all of what they return.
    if not is_image and not computes:
        hooks.enter_context(replace_forwards([(module, forward_unless_known)]))
    # Before other hooks, because a site's output is that of the module alone.
    hooks.callback(module.register_forward_hook(tap_output, prepend=True).remove)


def _flatten_space_to_tokens(x: Tensor) -> Tensor:
    """Copy [n, c, h, w] as [n, h * w, c]."""
    return x.flatten(-2).mT.clone(memory_format=torch.contiguous_format)


def _convolution_patches(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches that a convolution reads, [n, places, in * h * w]."""
    # Not the padding of `unfold`, which can't be asymmetric, as for `same`.
    padded = F.pad(x, module._reversed_padding_repeated_twice)
    return F.unfold(padded, module.kernel_size, module.dilation, stride=module.stride).mT.contiguous()


_READ = (torch.Tensor.__getitem__, torch.select, torch.Tensor.select)
_PRODUCTS = (
    *(torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),
    *(torch.mm, torch.Tensor.mm),
)
_BATCHED = (torch.bmm, torch.Tensor.bmm)
_TOP = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, eq=False)
class _ExpertMixture:
    """A mixture of experts whose weights are fused in one module of a block.

    `matrices` are the names of its `size` experts' tensors [experts, ., .]. It `is_routed` if it is given routes, and
    not the tokens of every expert.
    """

    path: str
    module: nn.Module
    size: int
    matrices: tuple[str, ...]
    is_routed: bool

    @property
    def is_transposed(self) -> bool:
        """True if its matrices are stored as [in, out]."""
        return bool(getattr(self.module, "is_transposed", not self.is_routed))

    def expert_slots(self, key: Callable[[str], str]) -> dict[str, WeightSlot]:
        """Return the checkpoint slots of all experts' parameters, by parameter name in the block."""
        return {
            f"{self.expert_site_name(expert, matrix)}.{leaf}": WeightSlot(
                key(f"{self.path}.{fused}"),
                rows=(expert, expert + 1),
                transposed=leaf == "weight" and self.is_transposed,
                is_stacked=True,
            )
            for matrix in self.matrices
            for leaf, fused in (("weight", matrix), ("bias", f"{matrix}_bias"))
            if hasattr(self.module, fused)
            for expert in range(self.size)
        }

    def expert_site_name(self, expert: int, matrix: str) -> str:
        return f"{self.path}.{expert}.{matrix}"

    def expert_sites(self) -> tuple[Site, ...]:
        """Return one site per matrix of each expert, in forward order."""
        return tuple(
            Site(name, "linear", name, token_weights=GATED, expert=expert)
            for expert in range(self.size)
            for matrix in self.matrices
            for name in [self.expert_site_name(expert, matrix)]
        )


def expert_mixture(block: nn.Module) -> _ExpertMixture | None:
    """Return the mixture of experts in a block; None if it has none, or several."""
    # A router's `topk` is recognized by the number of experts alone, so routes of several mixtures would be confused.
    several = [
        mixture for path, module in block.named_modules() if (mixture := _as_expert_mixture(path, module)) is not None
    ]
    return several[0] if len(several) == 1 else None


def _as_expert_mixture(path: str, module: nn.Module) -> _ExpertMixture | None:
    # Fused experts have no class in common, only tensors [experts, ., .] and a forward function of one or three inputs.
    stacks = {name: weight for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3}
    sizes = {len(weight) for weight in stacks.values()}
    if not path or len(stacks) < 2 or len(sizes) != 1 or isinstance(module, _ConvNd):
        return None
    parameters = [
        entry
        for entry in inspect.signature(type(module).forward).parameters.values()
        if entry.name != "self" and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    ]
    if len(parameters) not in (1, 3):
        return None
    return _ExpertMixture(path, module, sizes.pop(), tuple(stacks), len(parameters) == 3)


def fused_tensor(slots: Sequence[WeightSlot], parts: Sequence[Tensor]) -> Tensor:
    """Join the parameters of experts to the fused tensor, as a view if they are contiguous in memory."""
    base = parts[0]
    # Parts of one fused tensor are contiguous unless some were replaced. A copy would double their memory.
    if any(
        part.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        or part.stride() != base.stride()
        or part.storage_offset() != base.storage_offset() + place * base.numel()
        for place, part in enumerate(parts)
    ):
        return torch.cat([slot.to_stored_layout(part) for slot, part in zip(slots, parts, strict=True)])
    order = slice(None, None, -1) if slots[0].transposed else slice(None)
    shape, strides = (len(parts), *base.shape[order]), (base.numel(), *base.stride()[order])
    return base.as_strided(shape, strides, base.storage_offset())


@contextlib.contextmanager
def tap_experts(
    mixture: _ExpertMixture | None,
    weights: Mapping[str, Tensor],
    sites: Collection[Site],
    tap: Tap | None,
    routes: ExpertRoutes | None,
) -> Iterator[None]:
    """Call `tap` for each expert's matrices while their block runs, and record or impose the routes.

    Args:
        mixture: the block's mixture; None does nothing.
        weights: the block's weights of this pass by name.
        sites: the sites to call `tap` for.
        tap: see `chain.Tap`.
        routes: written, or used if they are given; None without either.
    """
    if mixture is None:
        yield
        return
    names = {site.name for site in sites}
    watch = _ExpertTracer(mixture, weights, names, tap, ExpertRoutes() if routes is None else routes)
    with mixture.module.register_forward_pre_hook(watch._routing_pre_hook, with_kwargs=True), watch:
        yield


class _ExpertTracer(TorchFunctionMode):
    """Intercepts the torch functions of a mixture of experts, to record its routes and tap its products."""

    def __init__(
        self,
        mixture: _ExpertMixture,
        weights: Mapping[str, Tensor],
        names: Collection[str],
        tap: Tap | None,
        routes: ExpertRoutes,
    ) -> None:
        super().__init__()
        self.mixture, self.names, self.tap, self.routes = mixture, names, tap, routes
        self.biases = {
            mixture.expert_site_name(expert, matrix): bias
            for matrix in mixture.matrices
            for expert, bias in enumerate(weights.get(f"{mixture.path}.{matrix}_bias", ()))
        }
        self.stacks = {id(weights[f"{mixture.path}.{matrix}"]): matrix for matrix in mixture.matrices}
        self.is_inside = False
        self.read: dict[int, tuple[str, Tensor]] = {}  # keeps tensors, so that no other gets the same id

    def _routing_pre_hook(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a mixture's experts and gates, or replace them by fixed ones; a forward pre-hook."""
        self.is_inside = True
        # Routes are read here and not only in `topk`, as some routers do not call it.
        if not self.mixture.is_routed:
            return None
        features, chosen, gates = (*args, *kwargs.values())
        self.routes.record(chosen, gates)
        if not self.routes.is_given:
            return None
        assert self.routes.chosen is not None and self.routes.gates is not None
        # Experts keep the given order, which identifies rows. Tokens with the same experts keep their router's own
        # gates; for others, the router has none, so they get the given ones.
        experts = self.routes.chosen
        own_gates = gates.gather(-1, (experts[..., None] == chosen[:, None]).long().argmax(dim=-1))
        elsewhere = self.routes.rerouted_tokens(ExpertRoutes(chosen, gates))[:, None]
        return (features, experts, torch.where(elsewhere, self.routes.gates, own_gates)), {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and self.is_inside:
            # The module adds to these zeros in place, and the sums may carry derivatives, also under `vmap`. A product
            # with the features is batched as they are.
            return args[0] * 0
        if func in _TOP and args[0].shape[-1] == self.mixture.size:
            return self._top_k_scores(func, args, kwargs)
        if func in _READ and id(args[0]) in self.stacks:
            # The index of an expert is read from the device once, as without this mode.
            expert = int(args[-1]) if isinstance(args[-1], Tensor) and not args[-1].dim() else args[-1]
            part = func(*args[:-1], expert, **kwargs)
            if part.dim() == 2:
                self.read[id(part)] = (
                    self.mixture.expert_site_name(int(expert), self.stacks[id(args[0])]),
                    part,
                )
            return part
        if self.tap is not None:
            if func in _PRODUCTS and id(args[1]) in self.read:
                return self._tap_expert_product(self.read[id(args[1])][0], args[0], func(*args, **kwargs))
            if func in _BATCHED and id(args[1]) in self.stacks:
                return self._tap_batched_product(self.stacks[id(args[1])], *args)
        return func(*args, **kwargs)

    def _top_k_scores(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of the router's `topk`, with fixed experts if they are given."""
        chosen = self.routes.chosen if self.routes.is_given else None
        if chosen is None or (kwargs.get("k") or args[1]) != chosen.shape[-1]:
            top = func(*args, **kwargs)
            if not self.mixture.is_routed:
                self.routes.record(top.indices, torch.ones_like(top.values))
            return top
        scores = args[0]
        return torch.return_types.topk((scores.gather(-1, chosen.reshape(*scores.shape[:-1], -1)), chosen))

    def _tap_expert_product(self, site: str, x: Tensor, y: Tensor) -> Tensor:
        """Pass the input and output of one expert's matrix to the tap; return its output, changed or not."""
        if site not in self.names or self.tap is None or (hear := self.tap(site, x.clone())) is None:
            return y
        bias = self.biases.get(site, 0.0)
        if isinstance(hear, Tensor):
            return hear - bias
        heard = y + bias
        changed = hear(heard)
        if changed is None and not y.requires_grad:
            return y
        return (heard if changed is None else changed) - bias  # the gradient flows back to `heard`

    def _tap_batched_product(self, matrix: str, rows: Tensor, weights: Tensor) -> Tensor:
        """Call the tap for every expert of a batched product, with the tokens of that expert only."""
        outputs = torch.bmm(rows, weights)
        for expert, size in enumerate(self.routes.tokens_per_expert(self.mixture.size)):
            tokens = self.routes.tokens_and_gates(expert, size)[0]
            y = outputs[expert, tokens]
            outputs[expert, tokens] = self._tap_expert_product(
                self.mixture.expert_site_name(expert, matrix), rows[expert, tokens], y
            )
        return outputs
