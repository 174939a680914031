"""What processes send each other while a calibration is solved, and which solves the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from driftlens.base.division import balanced, shared
from driftlens.checkpoints.sources import TensorHeader
from driftlens.linalg.gram import held_entries
from driftlens.models.chain import Layer, LayerChain

_FLOAT64, _FLOAT32 = 8, 4


@dataclass(frozen=True)
class Group:
    """Linear sites of a layer that read the same, and so have one Gram matrix and one factor.

    Attributes:
        width: k, entries of an input.
        outs: entries of each site's output.
    """

    width: int
    outs: tuple[int, ...]

    @property
    def weights(self) -> int:
        """Numbers that are solved for."""
        return sum(self.outs) * self.width

    @property
    def moments(self) -> int:
        """Numbers in half of the Gram matrix and in the cross moments, of one task."""
        return held_entries(self.width) + self.weights

    @property
    def operations(self) -> float:
        """Of a Cholesky factor and two triangular solves."""
        return self.width**3 / 3 + 2 * self.weights * self.width


def solved_groups(
    chain: LayerChain, headers: Mapping[str, TensorHeader], sites: Mapping[int, Collection[str]]
) -> list[list[Group]]:
    """Of every layer up to the last one with chosen sites, in forward order."""
    last = max(sites, default=0)
    return [_groups(layer, headers, sites.get(layer.index, ())) for layer in chain.layers[:last]]


def _groups(layer: Layer, headers: Mapping[str, TensorHeader], wanted: Collection[str]) -> list[Group]:
    outs: dict[tuple[str, int], list[int]] = {}
    for site in layer.sites:
        if site.kind == "linear" and site.name in wanted:
            slot = layer.parameters[f"{site.name}.weight"]
            out, width = slot.shape(headers[slot.key].shape)
            outs.setdefault((site.input, width), []).append(out)
    return [Group(width, tuple(of)) for (_, width), of in outs.items()]


def solve_share(groups: Sequence[Sequence[Group]], number: int) -> float:
    """The share of all solves that lie on the way, where every layer waits for its busiest process."""
    total = sum(group.operations for layer in groups for group in layer)
    waited = sum(balanced([group.operations for group in layer], number)[1] for layer in groups)
    return waited / total if total else 0.0


def wire_bytes(
    groups: Sequence[Sequence[Group]], batches: Mapping[str, int], number: int
) -> tuple[int, int, int]:
    """What the busiest process sends and receives while a calibration is solved, and in how many messages.

    Of every group, half a Gram matrix and the cross moments, already folded over its tasks, go into one sum in float64;
    a sum over a ring of n processes makes each send 2 (n - 1) / n of it. Before that, processes that share a task's
    batches send its moments to the first of them. What was solved is sent once in float32.
    """
    if number == 1:
        return 0, 0, 0
    every = [group for layer in groups for group in layer]
    moments = sum(group.moments for group in every) * _FLOAT64
    each = moments * 2 * (number - 1) / number + sum(group.weights for group in every) * _FLOAT32
    runs = [[rank for rank, *_ in of] for of in shared(batches, number).values()]
    given = Counter(rank for ranks in runs for rank in ranks[1:])
    taken = Counter(rank for ranks in runs for rank in ranks[:1] * (len(ranks) - 1))
    sent, received = (int(each + moments * max(of.values(), default=0)) for of in (given, taken))
    return sent, received, len(every) * (1 + max(taken.values(), default=0)) + number * len(groups)
