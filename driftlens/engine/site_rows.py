"""What chosen sites are fed and what they make of it, taken while a layer runs, and how much each row counts.

Such a pass may end as soon as nothing more is wanted of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from driftlens.base.errors import IncompatibleModelsError, SpecError
from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, Site, State

UNIFORM = "uniform"
"""The rule of token weights that counts all tokens alike."""
ENTERED = ""
"""Stands for what enters a block, among the streams that are added to."""
_ROWS = 64
"""Of a batch without tokens, which say whether one tensor is the sum of two others."""


@dataclass(frozen=True)
class SiteRows:
    """Inputs and outputs of sites by their names, [n, t, k] or [n, k] each."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _SeenAll(Exception):
    """Thrown out of a layer whose remaining work nobody needs."""


def rows_and_output(
    layer: Layer,
    parameters: Parameters,
    state: State,
    side: SideInputs,
    inputs: Collection[str],
    outputs: Collection[str] = (),
    *,
    stops: bool = False,
) -> tuple[SiteRows, State]:
    """What goes into some sites and comes out of some, and the state that leaves the layer.

    With `stops`, what the layer does after the last of them is not computed, and no state leaves it. Layers are pure
    functions of what they are given, so nothing is left behind by stopping one in the middle. A site that runs twice
    before the pass ends, or not at all, is refused.
    """
    seen = SiteRows()

    def stop_after_all() -> None:
        if stops and len(seen.inputs) == len(inputs) and len(seen.outputs) == len(outputs):
            raise _SeenAll

    def hear(site: str, y: Tensor) -> None:
        seen.outputs[site] = y
        stop_after_all()

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        if site in seen.inputs or site in seen.outputs:
            raise IncompatibleModelsError(
                f"{layer.path} runs its module {site!r} twice, so it has no one input to calibrate on",
                hint="Leave it out with a pattern of sites.",
            )
        if site in inputs:
            seen.inputs[site] = x
            stop_after_all()
        return partial(hear, site) if site in outputs else None

    out: State = {}
    with contextlib.suppress(_SeenAll):
        stop_after_all()
        out = layer.call(parameters, state, side, tap if inputs or outputs else None)
    missing = (set(inputs) - set(seen.inputs)) | (set(outputs) - set(seen.outputs))
    if missing:
        raise IncompatibleModelsError(
            f"{layer.path} never runs {', '.join(sorted(missing))}",
            hint="Leave it out with a pattern of sites.",
        )
    return seen, out


def row_weights(
    chain: LayerChain, layer: Layer, site: Site, x: Tensor, state: State, side: SideInputs, rule: str = ""
) -> Tensor | None:
    """Weights of the rows of `x`, [T]; None counts each 1. Padding weighs nothing, whatever a rule says.

    Args:
        chain: has the rules.
        layer: of the site.
        site: reads or makes `x`.
        x: [n, t, k]; also per head [n, t, h, k] or [n, h, t, k], flattened [n * t, k], or one row per sample [n, k], of
            which none is padding.
        state: what enters the layer.
        side: side inputs of the batch.
        rule: by which tokens count; the site's own if left out.
    """
    rule, mask = rule or site.token_weights, side.mask(site.stream or layer.stream)
    weights = None if rule == UNIFORM else chain.token_weights[rule](state, side)
    if mask is not None and (x.dim() > 2 or len(x) == mask.numel()):
        weights = mask.to(x) if weights is None else weights.to(x) * mask
    if weights is None:
        return None
    weights = weights.to(x)
    rows = x.shape[:-1]
    if len(rows) == 3 and rows[:2] == weights.shape:
        weights = weights[:, :, None].expand(rows)
    elif len(rows) == 3 and (rows[0], rows[2]) == weights.shape:
        weights = weights[:, None, :].expand(rows)
    if weights.numel() != rows.numel():
        raise IncompatibleModelsError(
            f"site {site.name!r} reads {list(x.shape)}, which is not one row per token of {list(weights.shape)}, so "
            "its padding can't be told",
            hint="Leave it out with a pattern of sites, or pass mask=False where nothing is padded.",
        )
    return weights.reshape(-1)


def require_rule(chain: LayerChain, rule: str) -> None:
    """Refuse a rule of token weights that the architecture doesn't have."""
    if rule != UNIFORM and rule not in chain.token_weights:
        raise SpecError(
            f"{chain.architecture} has no token weights called {rule!r}",
            hint=f"It has {', '.join([UNIFORM, *chain.token_weights.keys() - {UNIFORM}])}.",
        )


def stacked(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    """The weights of some sites below each other, [O, k]; not a copy where there is one site."""
    weights = [parameters[f"{site.name}.weight"] for site in sites]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def added_to(
    layer: Layer, parameters: Parameters, state: State, side: SideInputs, names: Collection[str]
) -> dict[str, str]:
    """Site of those named -> the module whose input h its output y is added to, `""` for what enters the layer.

    Found by running the layer once: a later module reads h + y, or the layer returns it. Sites without such a sum are
    left out; the others come in the order in which they run.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, tuple[Tensor, int]] = {}  # and how many inputs had been read by then

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        inputs[site] = x
        return (lambda y: outputs.__setitem__(site, (y, len(inputs)))) if site in names else None

    out = layer.call(parameters, state, side, tap)
    sums = [*inputs.values(), out[layer.stream]]
    entered = {ENTERED: state[layer.stream]} if layer.stream in state else {}
    streams = {}
    for site, (y, before) in outputs.items():
        for name, h in (entered | inputs).items():
            if h.shape == y.shape and any(z.shape == y.shape and _is_sum(z, h, y) for z in sums[before:]):
                streams[site] = name
                break
    return streams


def _is_sum(z: Tensor, h: Tensor, y: Tensor) -> bool:
    """Whether z = h + y where it isn't padding, and y counts."""
    few = slice(1 if z.dim() > 2 else _ROWS)  # the first sample says it
    z, h, y = z[few], h[few], y[few]
    real = (z != 0).any(dim=-1)
    z, h, y = z[real], h[real], y[real]
    gap, size = torch.linalg.vector_norm(z - h - y), torch.linalg.vector_norm(y)
    return bool(gap <= 1e-3 * size) and bool(size > 0)
