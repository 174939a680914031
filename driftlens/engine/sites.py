"""Selection of sites to calibrate, their inputs and outputs, and the weights of their rows."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.engine.walk import CachedBatch
from driftlens.models.chain import GATED, ExpertRoutes, Layer, LayerChain, Parameters, SideInputs, Site, State
from driftlens.models.tracing.block_sites import BLOCK_ITSELF
from driftlens.utils.devices import copy_to_host
from driftlens.utils.errors import IncompatibleModelsError, LayerNotFoundError, SpecError, join_names


def site_path(layer: Layer, site: Site) -> str:
    """Return a site's module path in the library's names; parts of a fused attention have separate paths."""
    if layer.role == "block":
        return layer.path if site.name == BLOCK_ITSELF else f"{layer.path}.{site.name}"
    return layer.parameters[f"{site.name}.weight"].key.removesuffix(".weight")


GROUPS = ("embeddings", "q", "k", "v", "qkv", "o", "gate", "up", "down", "norms", "head", "other")
"""Roles of modules in a transformer; `qkv` is a fused in-projection."""
_LETTERS = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "attn": "qkv"}


def site_roles(layer: Layer) -> dict[str, str]:
    """Return the role of every module in the transformer, one of `GROUPS`, such as `q` or `up`.

    Queries, keys and values are known by a word of their name, all others by shared inputs and order: after attention
    comes `o`, then `up` (with a second one on the same input `gate`), then `down`.
    """
    groups = {site.name: "norms" for site in layer.sites if site.kind != "linear"}
    linear = [site for site in layer.sites if site.kind == "linear"]
    if layer.role != "block":
        return groups | {site.name: "head" if layer.role == "head" else "embeddings" for site in linear}
    awaited = ""
    for _, run in itertools.groupby(linear, key=lambda site: site.input):
        names = sorted(site.name for site in run)
        lettered = {name: letter for name in names if (letter := _attention_projection_role(name))}
        rest = [name for name in names if name not in lettered]
        # Two modules on one input before the activation are a gated MLP.
        wide = ("gate", "up") if len(rest) == 2 else ("up",) * len(rest)
        groups |= lettered | dict(zip(rest, [awaited] * len(rest) if awaited else wide, strict=True))
        awaited = "o" if lettered else "" if awaited else "down"
    return groups


def parameter_roles(layer: Layer) -> dict[str, str]:
    """Return the role of every parameter, one of `GROUPS`; outside modules it follows from the layer."""
    group_of, usual = site_roles(layer), {"stem": "embeddings", "head": "head"}.get(layer.role, "other")
    return {name: group_of.get(name.rpartition(".")[0], usual) for name in layer.parameters}


def _attention_projection_role(name: str) -> str:
    leaf = name.rpartition(".")[2].lower()
    letters = {_LETTERS[word] for word in leaf.split("_") if word in _LETTERS}
    return "qkv" if "qkv" in leaf or len(letters) > 1 else next(iter(letters), "")


def select_sites(
    chain: LayerChain,
    *,
    layers: str | int | Sequence[str | int] | None = None,
    sites: Sequence[str] | None = None,
    update: Collection[str] = ("linear", "bias", "norm"),
) -> Mapping[int, tuple[str, ...]]:
    """Return the names of the modules (sites) to calibrate by layer index, in forward order.

    Args:
        chain: the model as layers.
        layers: the layers, as for `select_layers`; None means all.
        sites: globs on module paths (`*.attn.*`), or `GROUPS`; None means every linear and norm module inside blocks
            whose weight is not tied to another place.
        update: kinds of parameters to solve for; sites without any are left out.

    Raises:
        LayerNotFoundError: a pattern matches nothing, or no site is left.
        IncompatibleModelsError: a selected site runs more than once in its layer, or shares its weight.
    """
    paths = [site_path(layer, site) for layer in chain.layers for site in layer.sites]
    there = {group for layer in chain.layers for group in site_roles(layer).values()}
    for pattern in sites or ():
        if pattern not in there:
            groups = ", ".join(group for group in GROUPS if group in there)
            _positions_matching_glob("site", pattern, paths, f"Use patterns such as `*.mlp.*`, or one of {groups}.")
    selected = [*chain.layers]
    if layers is not None:
        indices = select_layers([layer.path for layer in chain.layers], layers)
        selected = [chain.layers[index - 1] for index in indices]
    chosen: dict[int, tuple[str, ...]] = {}
    tied = tied_sites(chain)
    for layer in selected:
        for site in layer.sites:
            path = site_path(layer, site)
            # Tied sites are skipped silently unless a pattern names them.
            is_left_out = sites is None and path in tied
            if (
                is_left_out
                or not _has_updated_parameters(site, update)
                or not _is_site_selected(layer, site, path, sites)
            ):
                continue
            if site.runs > 1:
                raise IncompatibleModelsError(
                    f"{path} runs {site.runs} times in one pass; expected one input to calibrate on",
                    hint="Set `sites` to patterns without it.",
                )
            if path in tied:
                raise IncompatibleModelsError(
                    f"{path} shares its weight with {', '.join(tied[path][:3])}; calibrating one would change all",
                    hint="Set `sites` to patterns without it, or untie the weight.",
                )
            chosen[layer.index] = (*chosen.get(layer.index, ()), site.name)
    if not chosen:
        request = {"layers": layers, "sites": sites, "update": update}
        matching = join_names(
            f"{name} {value if isinstance(value, str | int) else ' '.join(map(str, value))}"
            for name, value in request.items()
            if value is not None
        )
        shared = f"; {len(tied)} of them are tied" if tied else ""
        raise LayerNotFoundError(
            f"nothing to calibrate: {chain.architecture} has no site that matches {matching}",
            hint=f"Its sites are {', '.join(paths[:3]) or '(there are none)'}{shared}.",
        )
    return chosen


def tied_sites(chain: LayerChain) -> dict[str, tuple[str, ...]]:
    """Return the paths of modules whose weight or bias is tied, each with the other keys of the tie."""
    by_path: dict[str, tuple[str, ...]] = {}
    for layer in chain.layers:
        for site in layer.sites:
            slots = (layer.parameters.get(f"{site.name}.{part}") for part in ("weight", "bias"))
            keys = [slot.key for slot in slots if slot is not None]
            elsewhere = tuple(other for key in keys for other in chain.tied.get(key, ()) if other not in keys)
            if elsewhere:
                by_path[site_path(layer, site)] = elsewhere
    return by_path


def parameter_coverage(
    chain: LayerChain, source: StateSource, sites: Mapping[int, Collection[str]], update: Collection[str]
) -> tuple[float, str]:
    """Return the share of the blocks' parameters that calibration solves for, and a sentence about it.

    Args:
        chain: the model as layers.
        source: any model of the architecture; only headers are read.
        sites: names of the sites by layer index.
        update: kinds of parameters that are solved for: `linear` for weights, `bias`, `norm`.
    """
    total, solved, left = Counter[bool](), Counter[bool](), Counter[str]()  # by "in a block", and by name
    tied, counted = tied_sites(chain), set[object]()
    for layer in chain.layers:
        by_name, in_block = {site.name: site for site in layer.sites}, layer.role == "block"
        for name, slot in chain.own_parameters(layer).items():
            place = chain.tied.get(slot.key, (slot.key,))[0], slot.rows
            # Tied parameters count once.
            if place in counted:
                continue
            counted.add(place)
            owner, _, part = name.rpartition(".")
            site = by_name.get(owner)
            kind = _KINDS.get(part) if site is None or site.kind == "linear" else "norm"
            size = math.prod(slot.layer_shape(source.headers[slot.key].shape))
            total[in_block] += size
            if owner in sites.get(layer.index, ()) and kind in update:
                solved[in_block] += size
            elif in_block:
                is_tied = site is not None and site_path(layer, site) in tied
                label = f"{name}: its weight serves other places too" if is_tied else name
                left[layer.no_sites[name][1] if name in layer.no_sites else label] += size
    of_blocks, of_all = solved[True] / max(1, total[True]), solved.total() / total.total()
    most = left.most_common(_MOST_NAMED)
    shown = [f"{label} ({_format_percentage(size / total[True])})" for label, size in most]
    shown += [f"{len(left) - len(most)} more"] if len(left) > len(most) else []
    text = f"{sum(map(len, sites.values()))} sites hold {_format_percentage(of_blocks)} of the blocks' parameters"
    alone = f"; left alone: {', '.join(shown)}" if shown else ""
    return of_blocks, f"{text} and {_format_percentage(of_all)} of all layers'{alone}"


# Parameter of a linear module -> its kind in a calibrator's `update`.
_KINDS = {"weight": "linear", "bias": "bias"}
# Number of names that a message lists before it counts the others.
_MOST_NAMED = 5


def _format_percentage(share: float) -> str:
    """Format a share; a nonzero remainder or share is never rounded away."""
    text = f"{100 * share:.1f} %"
    if text == "100.0 %" and share < 1:
        return "over 99.9 %"
    return "under 0.1 %" if text == "0.0 %" and share else text


def _positions_matching_glob(kind: str, pattern: str, paths: Sequence[str], hint: str) -> list[int]:
    """Return the positions of the module paths that match a glob; raise with the nearest paths if none does."""
    positions = [position for position, path in enumerate(paths) if fnmatchcase(path, pattern)]
    if not positions:
        near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
        raise LayerNotFoundError(
            f"no {kind} matches {pattern!r}; the nearest are {', '.join(near)}", hint=hint, nearest=near
        )
    return positions


def sites_to_update(
    chain: LayerChain, sites: Mapping[int, Sequence[str]], update: Collection[str]
) -> dict[int, tuple[str, ...]]:
    """Return the sites whose kinds of parameters a calibrator changes, by layer index.

    Args:
        chain: the model as layers.
        sites: names of the sites by layer index.
        update: the calibrator's kinds of parameters.
    """
    updated = {}
    for index, names in sites.items():
        by_name = {site.name: site for site in chain.layers[index - 1].sites}
        if solved := tuple(name for name in names if _has_updated_parameters(by_name[name], update)):
            updated[index] = solved
    return updated


def _has_updated_parameters(site: Site, update: Collection[str]) -> bool:
    return "norm" in update if site.kind != "linear" else not {"linear", "bias"}.isdisjoint(update)


def _is_site_selected(layer: Layer, site: Site, path: str, sites: Sequence[str] | None) -> bool:
    if sites is None:
        return layer.role == "block" and not site.only_named
    group = site_roles(layer).get(site.name, "")
    return any(fnmatchcase(path, pattern) or pattern == group for pattern in sites)


# The rule that weighs all tokens alike.
UNIFORM = "uniform"
# Name of the layer's input among residual streams.
ENTERED = ""
# Number of compared rows of a batch without tokens.
_ROWS = 64


@dataclass(frozen=True)
class SiteActivations:
    """Recorded inputs and outputs of modules in one pass of a layer, with its side inputs."""

    side: SideInputs
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _StopLayer(Exception):
    """Raised to stop a forward pass of a layer once all requested modules have run."""


def record_activations(
    layer: Layer,
    parameters: Parameters,
    state: State,
    side: SideInputs,
    inputs: Collection[str],
    outputs: Collection[str] = (),
    *,
    stops: bool = False,
    known: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[SiteActivations, State]:
    """Run a layer; return the recorded inputs and outputs of some modules, and the features after it.

    An expert that receives no token has no rows.

    Args:
        layer: the layer to run.
        parameters: its parameters.
        state: features before it.
        side: the batch's side inputs.
        inputs: sites whose inputs are returned.
        outputs: sites whose outputs are returned.
        stops: True to stop after the last of these sites, without a state.
        known: outputs of sites, by an earlier pass on the same batch with the same parameters up to there; these sites
            don't run again.

    Raises:
        IncompatibleModelsError: a site runs twice before the pass ends, or not at all.
    """
    experts = {site.name for site in layer.sites if site.expert is not None}
    if not experts.isdisjoint({*inputs, *outputs}) and side.routes is None:
        side = side.with_routes(ExpertRoutes())
    rows_seen = SiteActivations(side)

    def _stop_after_last_site() -> None:
        if stops and len(rows_seen.inputs) == len(inputs) and len(rows_seen.outputs) == len(outputs):
            raise _StopLayer

    def record_output(site: str, y: Tensor) -> None:
        rows_seen.outputs[site] = y
        _stop_after_last_site()

    def record_input(site: str, x: Tensor) -> Tensor | Callable[[Tensor], None] | None:
        if site in rows_seen.inputs or site in rows_seen.outputs:
            raise IncompatibleModelsError(
                f"{layer.path} runs its module {site!r} twice; expected one input to calibrate on",
                hint="Set `sites` to patterns without it.",
            )
        if site in inputs:
            rows_seen.inputs[site] = x
            _stop_after_last_site()
        if site in known:
            return known[site]
        return partial(record_output, site) if site in outputs else None

    out: State = {}
    with contextlib.suppress(_StopLayer):
        _stop_after_last_site()
        # Without requested sites, taps would only cost time.
        out = layer.call(parameters, state, side, record_input if inputs or outputs or known else None)
    for rows, names, axis in ((rows_seen.inputs, inputs, 1), (rows_seen.outputs, outputs, 0)):
        for name in experts.intersection(names).difference(rows):
            # No token was routed to this expert.
            weight = parameters[f"{name}.weight"]
            rows[name] = weight.new_zeros(0, weight.shape[axis])
    missing = (set(inputs) - set(rows_seen.inputs)) | (set(outputs) - set(rows_seen.outputs))
    if missing:
        raise IncompatibleModelsError(
            f"{layer.path} never runs {', '.join(sorted(missing))}",
            hint="Set `sites` to patterns without it.",
        )
    return rows_seen, out


@dataclass
class ExpertFeatureCache:
    """A cache of the inputs and outputs of the experts' modules and layers, up to a budget in bytes.

    They don't depend on the merged model or on settings, so a later calibration gets bit-identical weights from them.
    """

    budget: int = 0
    _num_bytes: int = field(default=0, init=False)
    _passes: dict[tuple[object, ...], tuple[SiteActivations, State]] = field(default_factory=dict, init=False)

    def record_activations(
        self,
        batch: CachedBatch,
        layer: Layer,
        expert: Parameters,
        state: State,
        inputs: Collection[str],
        outputs: Collection[str],
        *,
        stops: bool,
    ) -> tuple[SiteActivations, State]:
        """Run an expert's layer and record module inputs and outputs; return cached results if there are any."""
        # The start of a batch identifies it: caches are asked for the same batches every time.
        key = batch.task, batch.start, layer.index, frozenset(inputs), frozenset(outputs), stops
        if key in self._passes:
            return self._passes[key]
        passed = record_activations(layer, expert, state, batch.side, inputs, outputs, stops=stops)
        rows, left = passed
        tensors = [*rows.inputs.values(), *rows.outputs.values(), *left.values()]
        num_bytes = self._num_bytes + sum(tensor.nbytes for tensor in tensors)
        if num_bytes <= self.budget:
            self._num_bytes = num_bytes
            self._passes[key] = passed
        return passed


def row_weights(
    chain: LayerChain,
    layer: Layer,
    site: Site,
    x: Tensor,
    state: State,
    side: SideInputs,
    rule: str = "",
) -> Tensor | None:
    """Return the token weight of each row of a module's `x`, [T]; None weighs each 1. Padding has weight 0.

    Args:
        chain: the model as layers, with its rules.
        layer: the layer of the site.
        site: the site that reads or returns `x`.
        x: [n, t, k]; also per head [n, t, h, k] or [n, h, t, k], flattened [n * t, k] or [n * t * h, k], or one row
            per sample [n, k], of which none is padding.
        state: features before the layer.
        side: side inputs of the batch; for an expert's rows with the routes.
        rule: the token-weight rule; by default the site's own.
    """
    if site.expert is not None:
        assert side.routes is not None
        tokens, gates = side.routes.tokens_and_gates(site.expert, len(x))
        mask = side.mask(layer.stream)
        counts = gates.square() if mask is None else gates.square() * mask.reshape(-1)[tokens]
        return counts.to(x)
    rule, mask = rule or site.token_weights, side.mask(site.stream or layer.stream)
    weights = None if rule == UNIFORM else chain.token_weights[rule](state, side)
    # Rows per sample, such as pooled features, have no padding.
    if mask is not None and (x.dim() > 2 or len(x) % mask.numel() == 0):
        weights = mask.to(x) if weights is None else weights.to(x) * mask
    if weights is None:
        return None
    weights = weights.to(x)
    rows = x.shape[:-1]
    if len(rows) == 1 and len(x) % weights.numel() == 0:
        weights = weights.reshape(-1).repeat_interleave(len(x) // weights.numel())
    elif len(rows) == 3 and rows[:2] == weights.shape:
        weights = weights[:, :, None].expand(rows)
    elif len(rows) == 3 and (rows[0], rows[2]) == weights.shape:
        weights = weights[:, None, :].expand(rows)
    if weights.numel() != rows.numel():
        raise IncompatibleModelsError(
            f"site {site.name!r} reads {list(x.shape)}; expected one row per token of {list(weights.shape)}, to "
            "find padding",
            hint="Set `sites` to patterns without it, or pass mask=False without padding.",
        )
    return weights.reshape(-1)


def require_weight_rule(chain: LayerChain, rule: str) -> None:
    """Raise a `SpecError` if the architecture has no token-weight rule of this name."""
    if rule not in (UNIFORM, GATED, *chain.token_weights):
        raise SpecError(
            f"{chain.architecture} has no token weights called {rule!r}",
            hint=f"It has {', '.join([UNIFORM, *chain.token_weights.keys() - {UNIFORM}])}.",
        )


def stack_site_weights(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    """Return the weights of some linear modules stacked, [O, k]; not a copy for one module."""
    weights = [parameters[f"{site.name}.weight"] for site in sites]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def stack_site_biases(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    """Return the biases of some linear modules stacked, [O]; zeros for a module without one."""
    weights = (parameters[f"{site.name}.weight"] for site in sites)
    biases = (parameters.get(f"{site.name}.bias") for site in sites)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])


def select_site_parameters(parameters: Parameters, sites: Sequence[Site], device: torch.device) -> dict[str, Tensor]:
    """Return the weights and biases of some modules on a device."""
    names = (f"{site.name}.{part}" for site in sites for part in ("weight", "bias"))
    return {name: parameters[name].to(device) for name in names if name in parameters}


def norm_without_affine(site: Site, rows: Tensor) -> Tensor:
    """Normalise rows [T, k] as a norm layer does, without its scale and shift."""
    # torch's RMSNorm uses this eps if none is set.
    eps = torch.finfo(rows.dtype).eps if site.eps is None else site.eps
    if site.kind == "layer_norm":
        return F.layer_norm(rows, rows.shape[-1:], eps=eps)
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)


def find_residual_streams(
    layer: Layer, parameters: Parameters, state: State, side: SideInputs, names: Collection[str]
) -> dict[str, str]:
    """Find the residual stream that each module's output y is added to: the module whose input is h in h + y.

    The layer runs once; a later module reads h + y, or the layer returns it. Sites without such a sum are left out, for
    instance where an output is scaled or normalised before it is added.

    Args:
        layer: the layer.
        parameters: its parameters.
        state: features before it.
        side: the batch's side inputs.
        names: the sites.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, tuple[Tensor, int]] = {}  # with the number of inputs read before

    # Outputs of a mixture's experts are gated and scattered, never added directly.
    experts = {site.name for site in layer.sites if site.expert is not None}

    def record_input_and_output(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        if site in experts:
            return None
        inputs[site] = x
        return (lambda y: outputs.__setitem__(site, (y, len(inputs)))) if site in names else None

    out = layer.call(parameters, state, side, record_input_and_output)
    sums = [*inputs.values(), out[layer.stream]]
    entered = {ENTERED: state[layer.stream]} if layer.stream in state else {}
    # The first sample is enough. It is compared on the host: each pair would synchronize with the device.
    tensors = [*entered.values(), *sums, *(y for y, _ in outputs.values())]
    sampled = copy_to_host([tensor[: 1 if tensor.dim() > 2 else _ROWS] for tensor in tensors])
    few = {id(tensor): rows for tensor, rows in zip(tensors, sampled, strict=True)}
    streams = {}
    for site, (y, before) in outputs.items():
        for name, h in (entered | inputs).items():
            alike = [z for z in sums[before:] if z.shape == y.shape == h.shape]
            if any(_is_residual_sum(few[id(z)], few[id(h)], few[id(y)]) for z in alike):
                streams[site] = name
                break
    return streams


def residual_stream(layer: Layer, name: str, entered: State, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the features of a residual stream, by its name from `find_residual_streams`.

    Args:
        layer: the layer.
        name: a module, or `""` for the layer's input.
        entered: features before the layer.
        inputs: inputs of its modules.
    """
    return entered[layer.stream] if name == ENTERED else inputs[name]


def _is_residual_sum(z: Tensor, h: Tensor, y: Tensor) -> bool:
    """Return True if z = h + y outside padding, and y is not zero."""
    # Some libraries set padded rows of the sum to zero.
    real = (z != 0).any(dim=-1)
    z, h, y = z[real], h[real], y[real]
    gap, size = torch.linalg.vector_norm(z - h - y), torch.linalg.vector_norm(y)
    return bool(gap <= 1e-3 * size) and bool(size > 0)


def select_layers(paths: Sequence[str], pattern: str | int | Sequence[str | int]) -> list[int]:
    """Return the indices of the layers that match a pattern, ascending; always with stem and head.

    `pattern`: `blocks`, `final` for the head, a glob on module paths, an index (1 is the stem), or a list of these.
    """
    patterns = [pattern] if isinstance(pattern, str | int) else pattern
    # Stem and head are the ends of every drift curve.
    chosen = {1, len(paths)}
    for part in patterns:
        chosen.update(_matching_layer_indices(paths, part))
    return sorted(chosen)


def _matching_layer_indices(paths: Sequence[str], pattern: str | int) -> list[int]:
    count = len(paths)
    if isinstance(pattern, int):
        if not 1 <= pattern <= count:
            raise LayerNotFoundError(
                f"no layer {pattern}; expected 1 (stem) to {count} (head)",
                hint="Block j of the library is layer j + 2.",
            )
        return [pattern]
    if pattern == "blocks":
        return list(range(2, count))
    if pattern == "final":
        return [count]
    hint = f"Use `blocks`, a pattern such as `{paths[count // 2][:-1]}*`, or layer numbers."
    return [position + 1 for position in _positions_matching_glob("layer", pattern, paths, hint)]
