"""How much tokens and tasks count by random backward passes of the experts, without labels.

With v ~ N(0, I) and f a sample's final feature, g = d<v, f / |f|> / dy at the output y of a site; e is, token by token,
the mean of |g|^2 over two such v. Features run forward layer by layer and gradients back layer by layer, each layer
computed again on its own: one layer of one expert and the features of one task at its boundaries are alive at a time,
those beyond the store's budget on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from driftlens.engine.sites import row_weights
from driftlens.engine.walk import CachedBatch, FeatureStream, OnStep
from driftlens.linalg.gram import GramSum, single
from driftlens.models.chain import Layer, LayerChain, Parameters, Pool, Routes, SideInputs, Site, State
from driftlens.utils.devices import near_float64, wide
from driftlens.utils.variants import expert_of

NUM_PASSES = 2
_LEAST, _FLOOR = 1e-4, 0.02


@dataclass(frozen=True)
class Group:
    """Linear sites that read the same rows and all have a bias, or none; `has_bias` says which."""

    sites: tuple[Site, ...]
    has_bias: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sites."""
        return tuple(site.name for site in self.sites)


def groups_of(layer: Layer, names: Collection[str]) -> list[Group]:
    """The named linear sites of a layer in the order in which they run, those that read the same rows together."""
    groups: dict[tuple[str, str, bool], list[Site]] = {}
    for site in layer.sites:
        if site.name in names and site.kind == "linear":
            key = site.input, site.token_weights, f"{site.name}.bias" in layer.parameters
            groups.setdefault(key, []).append(site)
    return [Group(tuple(sites), has_bias) for (_, _, has_bias), sites in groups.items()]


@dataclass
class Weighted:
    """Token weights of one group and task: the rows of every batch, which sum to 1 over all that the task has.

    `trace` is that of the gradients' second moment over all batches of the task, if asked for; `energy` says how much
    the task counts beside others.
    """

    rows: list[Tensor]
    trace: float
    energy: float


@dataclass
class Weighable:
    """Of one group and task, what its token weights are made of: how much rows count, and their gradients' energy.

    `energies` are the rows', None where all count alike; `traces` has that of their second moment, if asked for.
    """

    counts: list[Tensor]
    energies: list[Tensor] | None = None
    traces: list[Tensor] = field(default_factory=list)

    def weighted(self) -> Weighted:
        """Return weights by the energy over the task's mean; what rows count where there is no energy."""
        counted = _total([count.sum() for count in self.counts])
        energies = self.energies or []
        energy = _total([count @ e for count, e in zip(self.counts, energies, strict=bool(energies))])
        energy /= max(counted, 1e-300)
        rows = list(self.counts)
        if energies and energy > 0:
            rows = [
                count * ((e / energy).clamp_min(_LEAST).sqrt() + _FLOOR)
                for count, e in zip(self.counts, energies, strict=True)
            ]
        size = max(_total([near_float64(row).sum(dtype=torch.float64) for row in rows]), 1e-300)
        return Weighted([row / size for row in rows], _total(self.traces), energy)


def _total(numbers: Sequence[Tensor]) -> float:
    return float(sum(torch.stack([*numbers]).tolist())) if numbers else 0.0


Key = tuple[int, int]
"""Layer, and number of the group in it."""


def row_counts(
    chain: LayerChain, layer: Layer, site: Site, y: Tensor, state: State, side: SideInputs
) -> Tensor:
    """How much each row of a site's output counts by its rule and its mask, [T]."""
    weights = row_weights(chain, layer, site, y, state, side)
    return y.new_ones(y.shape[:-1].numel()) if weights is None else weights


def moment_of(key: Key) -> str:
    """Under what name the second moment of a group's gradients, [o, o], waits with the task's first batch."""
    return f"moment-{key[0]}-{key[1]}"


def _together(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in one piece of memory: what stays of every batch splits the room that it leaves to the next."""
    return [*torch.cat([*parts]).split_with_sizes([len(part) for part in parts])] if parts else []


def _recorded(boundary: int) -> str:
    return f"passed-{boundary}"


@dataclass(frozen=True)
class ExpertGradients:
    """Token weights of one task at every chosen group, by backward passes of its expert.

    `chosen` has the groups by layer index, and `moments` asks for the second moments of the gradients, too: they wait
    with the task's first batch, as all layers' together may be larger than the model. `on_step` is called before every
    batch with the layer that the passes back are at and the task; the last layer, while features still go forward.
    """

    stream: FeatureStream
    pooling: Pool
    chosen: Mapping[int, Sequence[Group]]
    moments: bool
    on_step: OnStep
    num_passes: int = NUM_PASSES

    def weigh(
        self, task: str, draws: Callable[[CachedBatch], Callable[[int], Tensor]], start: str
    ) -> dict[Key, Weighable]:
        """What token weights are made of; the expert's features wait under the name `start` before the first layer.

        `draws` gives of a batch and the width of the final feature the random directions, [passes, n, width].
        """
        layers = self.stream.pool.chain.layers[min(self.chosen) - 1 :]
        self._record(task, layers, start)
        weighable: dict[Key, Weighable] = {}
        for layer in reversed(layers):
            parameters = self.stream.pool.parameters(expert_of(task), layer)
            entered = start if layer is layers[0] else _recorded(layer.index - 1)
            groups = self._groups(layer, task)
            counts: list[list[Tensor]] = [[] for _ in groups]
            energies: list[list[Tensor]] = [[] for _ in groups]
            moments: list[GramSum | None] = [None for _ in groups]
            for batch in self.stream.batches(layer, task, tell=partial(self.on_step, layer.index, task)):
                side = batch.side.along(Routes()) if layer.num_experts else batch.side
                seen = self._back(layer, groups, parameters, batch, side, entered, draws(batch))
                for at, group in enumerate(groups):
                    y, gradients = seen[at]
                    state = batch.get(entered)
                    count = row_counts(self.stream.pool.chain, layer, group.sites[0], y, state, side)
                    if group.sites[0].expert is not None:  # of an expert's gates the gradients know
                        count = count.ne(0).to(count)
                    counts[at].append(count)
                    rows = [g.reshape(-1, g.shape[-1]) for g in gradients]
                    energies[at].append(sum((g.square().sum(1) for g in rows), count * 0) / len(rows))
                    for g in rows if self.moments else ():
                        moment = moments[at] = moments[at] or GramSum(g.shape[1], single(g).dtype, g.device)
                        moment.add_rows(g * count.sqrt()[:, None])
                if entered != start:
                    batch.drop(entered)
            for at, summed in enumerate(moments):
                entry = weighable[layer.index, at] = Weighable(_together(counts[at]), _together(energies[at]))
                if summed is not None:
                    full = summed.full()
                    entry.traces.append(wide(full).trace())
                    self.stream.cached[task][0].put(moment_of((layer.index, at)), {"moment": full})
        for batch in self.stream.cached[task]:
            for number in range(self.num_passes):
                batch.drop(f"back-{number}")
        return weighable

    def _groups(self, layer: Layer, task: str) -> Sequence[Group]:
        """The chosen groups of a layer that sees anything of a task."""
        sees = all(layer.sees(batch.side) for batch in self.stream.cached[task])
        return self.chosen.get(layer.index, ()) if sees else ()

    def _record(self, task: str, layers: Sequence[Layer], start: str) -> None:
        """Take the expert through the layers, and let what is at every boundary wait for the way back."""
        on_step = partial(self.on_step, layers[-1].index, task)
        entered = start
        for layer in layers[:-1]:
            expert = self.stream.pool.layer_map(expert_of(task), layer, task)
            for batch in self.stream.batches(layer, task, tell=on_step):
                left = expert(batch.get(entered), batch.side)
                self.stream.keep(layer, batch, _recorded(layer.index), left, named="the expert")
            entered = _recorded(layer.index)

    def _back(
        self,
        layer: Layer,
        groups: Sequence[Group],
        parameters: Parameters,
        batch: CachedBatch,
        side: SideInputs,
        entered: str,
        draw: Callable[[int], Tensor],
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """Output and gradients of every group; the gradients at the boundary before take the place of those behind."""
        wanted = {site.name for group in groups for site in group.sites}
        outputs: dict[str, Tensor] = {}

        def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
            return (lambda y: outputs.__setitem__(site, y)) if site in wanted else None

        with torch.enable_grad():
            state = {
                name: value.detach().requires_grad_(value.is_floating_point())
                for name, value in batch.get(entered).items()
            }
            out = layer.call(parameters, state, side, tap if wanted else None)
            for name in wanted.difference(outputs):  # an expert that no token is sent to
                weight = parameters[f"{name}.weight"]
                outputs[name] = weight.new_zeros(0, len(weight)).requires_grad_()
            if layer.role == "head":
                f = torch.nn.functional.normalize(layer.vectors(out, batch.side, self.pooling), dim=-1)
                heads = [[(f * v.to(f)).sum()] for v in draw(f.shape[-1])]
                arriving: list[list[Tensor | None]] = [[None]] * self.num_passes
            else:
                heads = [list(out.values())] * self.num_passes
                backs = [batch.get(f"back-{number}") for number in range(self.num_passes)]
                arriving = [[back[name] for name in out] for back in backs]
        leaves = [value for value in state.values() if value.requires_grad]
        sites = [outputs[site.name] for group in groups for site in group.sites]
        gradients: list[list[Tensor]] = []
        for number in range(self.num_passes):
            more = number + 1 < self.num_passes
            pairs = [
                pair for pair in zip(heads[number], arriving[number], strict=True) if pair[0].requires_grad
            ]
            slopes = torch.autograd.grad(
                [value for value, _ in pairs],
                [*leaves, *sites],
                [gradient for _, gradient in pairs],
                retain_graph=more,
                allow_unused=True,
            )
            full = [
                torch.zeros_like(value) if g is None else g
                for value, g in zip([*leaves, *sites], slopes, strict=True)
            ]
            batch.put(f"back-{number}", dict(zip(state, full, strict=False)))
            gradients.append(full[len(leaves) :])
        of_groups, start = [], 0
        for group in groups:
            places = slice(start, start + len(group.sites))
            of_groups.append((sites[start].detach(), [torch.cat(g[places], dim=-1) for g in gradients]))
            start = places.stop
        return of_groups
