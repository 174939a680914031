"""The Jacobian of a layer, averaged over the segment between two inputs; an operator that is never formed.

A state is a dict of tensors whose first axis is the sample; only floating leaves are differentiated, the others are
held fixed. Samples do not interact, so one product serves every sample of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftlens.linalg.fixed_weights import FixedWeights
from driftlens.linalg.quadrature import gauss_legendre
from driftlens.linalg.state import State, floating, relative_error, subtract

TOGETHER = 4 << 20
"""Bytes of vectors, over all nodes, up to which one pass takes all nodes: in small layers calls cost more than sums."""


@dataclass(frozen=True)
class PathJacobian:
    """A = integral over t in [0, 1] of J layer(start + t (end - start)) dt, by Gauss-Legendre quadrature.

    By the mean-value identity A (end - start) = layer(end) - layer(start), which is what `closure` checks.
    Source: FeatCal (arXiv:2605.13030), Eq. 19; for a residual layer A = I + R with R of Eq. 31.

    Attributes:
        layer_call: the map, state to state; it modifies nothing.
        start: state at t = 0, the expert's input for reference "expert".
        end: state at t = 1, the merged model's input.
        nodes: quadrature nodes; the products cost that many derivative passes.
    """

    layer_call: Callable[[State], State]
    start: State
    end: State
    nodes: int

    def jvp(self, vector: State) -> State:
        """A v for one state-shaped vector v."""
        return {
            name: leaf[0] for name, leaf in self.jvps({n: leaf[None] for n, leaf in vector.items()}).items()
        }

    def jvps(self, vectors: State) -> State:
        """A v for several vectors at once, stacked along a new first axis; they share every undifferentiated pass."""
        total: State = {}
        with forward_mode_attention(), FixedWeights():
            weights = (weight for _, weight in gauss_legendre(self.nodes))
            for pushed, weight in zip(self._pushed(vectors), weights, strict=True):
                _add(total, pushed, weight)
        return total

    def vjp(self, covector: State) -> State:
        """A' u for one covector u, a state at the layer's output."""
        total: State = {}
        with forward_mode_attention(), FixedWeights():
            for t, weight in gauss_legendre(self.nodes):
                pull = vjp(self._call, self._point(t))[1]
                _add(total, pull(covector)[0], weight)
        return total

    def closure(self) -> Tensor:
        """|A (end - start) - (layer(end) - layer(start))| / |layer(end) - layer(start)|, a ratio of sums over samples.

        NaN where the layer's outputs do not differ.
        """
        exact = subtract(self.layer_call(self.end), self.layer_call(self.start))
        found = self.jvp(subtract(self.end, self.start))
        return relative_error(found, exact)

    def _pushed(self, vectors: State) -> Iterator[State]:
        """J v at every node, for several vectors."""
        points = (self._point(t) for t, _ in gauss_legendre(self.nodes))
        if sum(leaf.nbytes for leaf in vectors.values()) * self.nodes > TOGETHER:
            yield from (self._push(point, vectors) for point in points)
            return
        pushed = vmap(self._push, in_dims=(0, None))(_stacked(list(points)), vectors)
        yield from ({name: leaf[index] for name, leaf in pushed.items()} for index in range(self.nodes))

    def _push(self, point: State, vectors: State) -> State:
        return vmap(lambda v: jvp(self._call, (point,), (v,))[1])(vectors)

    def _point(self, t: float) -> State:
        """The point at t on the segment, floating leaves alone."""
        start, end = floating(self.start), floating(self.end)
        return {name: torch.lerp(start[name], end[name], t) for name in start}

    def _call(self, state: State) -> State:
        """The layer as a function of floating leaves alone."""
        fixed = {name: leaf for name, leaf in self.start.items() if not leaf.is_floating_point()}
        return floating(self.layer_call({**fixed, **state}))


@contextmanager
def forward_mode_attention() -> Iterator[None]:
    """Attention kernels that have forward-mode derivatives, for the length of the context."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # On first use torch.func.jvp scripts its decompositions and warns that scripting is deprecated.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        yield


def _stacked(states: list[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _add(total: State, part: State, weight: float) -> None:
    for name, leaf in part.items():
        total[name] = total[name].add_(leaf, alpha=weight) if name in total else weight * leaf
