"""Where the final drift comes from: local mismatches carried through path-averaged Jacobians, and by prefix swaps.

Both splits are fed one `LayerView` after the other, in forward order, all of one batch and variant, reference "expert".
Adjoint attribution says how much each layer's local mismatch moves one number (a loss, a margin, the final drift): a
covector at the final feature is pulled back through the path-averaged Jacobians, and its product with each layer's
local mismatch is that layer's part of the change. One pull-back serves all layers, where carrying every mismatch
forward costs one product per pair of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vjp

from driftlens.engine.pool import LayerMap
from driftlens.engine.sites import GROUPS, parameter_groups
from driftlens.engine.walk import LayerView, Split, smooth_layer, smooth_split
from driftlens.linalg.state import (
    PathJacobian,
    State,
    composite_nodes,
    floating,
    inner,
    norm,
    relative_error,
    subtract,
)
from driftlens.models.chain import SideInputs
from driftlens.models.heads import ScoreMap
from driftlens.runs.schema import ADJOINT, GROUP_CONTRIBUTIONS, LAYERS, SAMPLES
from driftlens.utils.devices import moved
from driftlens.utils.diagnostic import diagnostic
from driftlens.utils.errors import ShapeError

SCORE_PANELS = 8
"""Panels of the score map's segment: where a feature shortens on the way, the normalisation bends sharply."""


@dataclass(frozen=True)
class Step:
    """One layer on one batch, as the walk saw it: the merged layer `call`, both models' features before it, and its m.

    `nodes` are those of its path-averaged Jacobian's quadrature.
    """

    call: Callable[[State], State]
    expert_in: State
    merged_in: State
    local_mismatch: State
    nodes: int


@dataclass(frozen=True)
class Target:
    """A number whose change [n] from expert to variant is to be explained: <covector, e_L> for every sample."""

    covector: Tensor
    change: Tensor


@diagnostic("adjoint", table="adjoint", columns=ADJOINT.columns[len(ADJOINT.key) :], needs="jacobian")
def adjoint_parts(steps: Sequence[Step], covector: State) -> Tensor:
    """<A_{l+1}' ... A_L' u, m_l> for every layer l in forward order and sample, [L, n]; u is at the last boundary.

    By Prop. 2 (Eq. 5) they sum to <u, e_L>, up to the quadrature error of the Jacobians.
    Source: FeatCal (arXiv:2605.13030), Eq. 5, read from the left.
    """
    return torch.stack([inner(step.local_mismatch, u) for step, u in pulled_back(steps, covector)][::-1])


def pulled_back(steps: Sequence[Step], covector: State) -> Iterator[tuple[Step, State]]:
    """Every layer with the covector at its own output, the last layer first; arguments as for `adjoint_parts`."""
    for step in reversed(steps):
        yield step, covector
        if step is not steps[0]:
            covector = PathJacobian(step.call, step.expert_in, step.merged_in, step.nodes).vjp(covector)


def drift_target(expert: Tensor, variant: Tensor) -> Target:
    """The final drift itself: u = e_L / |e_L|^2, so that the parts are shares and sum to 1. NaN without drift."""
    drift = variant - expert
    energy = drift.flatten(1).square().sum(dim=1)
    each = energy.reshape(-1, *[1] * (drift.dim() - 1))
    return Target(drift / each, torch.where(energy > 0, 1.0, torch.nan))


def loss_target(head: ScoreMap, expert: Tensor, variant: Tensor, labels: Tensor) -> Target:
    """The cross-entropy of the variant minus that of the expert, in nats (Eq. 41).

    u = (averaged Jacobian of the score map)' (averaged gradient of the loss), both on their segments. What another map
    of the expert's changes is no drift.

    Args:
        head: the variant's score map for the task.
        expert: features of the expert, [n, d].
        variant: features of the variant, [n, d].
        labels: true rows of the score map, [n].
    """
    start, end = head.scores(expert), head.scores(variant)
    wanted = torch.zeros_like(start).scatter_(1, labels[:, None], 1.0)
    gradient = torch.zeros_like(start)
    for t, weight in composite_nodes(end - start):
        gradient += weight * (torch.lerp(start, end, t).softmax(dim=1) - wanted)
    return Target(_pulled(head, expert, variant, gradient), (gradient * (end - start)).sum(dim=1))


def margin_target(head: ScoreMap, expert: Tensor, variant: Tensor) -> Target:
    """The variant's margin of the expert's decision minus the expert's own, in scores; arguments as for `loss_target`.

    A margin is the score of the class that the expert chooses minus that of the strongest other class, its rival: each
    model's own. The variant decides otherwise exactly where its margin is negative. With one class there is no margin,
    and NaN.

    u pulls back the chosen class minus the rivals met on the way, each counting for the part of the segment of scores
    on which it is the strongest: scores are linear there, so the change is their product with u exactly.
    """
    start, end = head.scores(expert), head.scores(variant)
    if start.shape[1] < 2:
        return Target(torch.full_like(expert, torch.nan), torch.full_like(start[:, 0], torch.nan))
    chosen = start.argmax(dim=1, keepdim=True)
    before, after = (scores.scatter(1, chosen, -torch.inf).amax(dim=1) for scores in (start, end))
    direction = torch.zeros_like(start).scatter_(1, chosen, 1.0) - _rivals(start, end)
    change = ((end - start).gather(1, chosen)[:, 0]) - (after - before)
    return Target(_pulled(head, expert, variant, direction), change)


def _rivals(start: Tensor, end: Tensor) -> Tensor:
    """Return on how much of each segment of scores each class but the one chosen at its start is the largest, [n, c].

    The largest of lines is followed from crossing to crossing; a later one climbs more steeply, so no class comes back.
    """
    change = end - start
    others = start.scatter(1, start.argmax(dim=1, keepdim=True), -torch.inf)
    shares, t = torch.zeros_like(start), torch.zeros_like(start[:, :1])
    rival = others.argmax(dim=1, keepdim=True)
    while bool((t < 1).any()):
        ahead, steeper = others.gather(1, rival) - others, change - change.gather(1, rival)
        crossing = torch.where(steeper > 0, ahead / steeper, torch.inf).maximum(t)
        reached, next_rival = crossing.min(dim=1, keepdim=True)
        reached = reached.clamp_max(1)
        shares.scatter_add_(1, rival, reached - t)
        rival, t = next_rival, reached
    return shares


def _pulled(head: ScoreMap, expert: Tensor, variant: Tensor, direction: Tensor) -> Tensor:
    """The score map's path-averaged Jacobian, transposed, times a direction in score space.

    The segment is cut into panels of eight nodes: normalising a feature that nearly vanishes on the way is far from
    polynomial.
    """
    total = torch.zeros_like(expert)
    for t, weight in composite_nodes(direction, panels=SCORE_PANELS):
        total += weight * vjp(head.scores, torch.lerp(expert, variant, t))[1](direction)[0]
    return total


@dataclass(frozen=True)
class JacobianSettings:
    """How path-averaged Jacobians are computed.

    Attributes:
        nodes: quadrature nodes to begin with.
        max_nodes: where doubling them stops.
        tolerance: |p - A e| / |p| below which no more nodes are added.
        samples: how many diagnosis samples are looked at, the first ones.
        spectral: whether spectral norms are estimated (dear).
        contributions: whether local mismatches are carried to the final feature; else Jacobians are only checked.
        prefix: whether the prefix-swap split is computed too.
        random: whether random directions are pushed along, to compare the gain along the drift with theirs.
        seed: of the random directions.
    """

    nodes: int = 4
    max_nodes: int = 32
    tolerance: float = 1e-4
    samples: int = 32
    spectral: bool = False
    contributions: bool = True
    prefix: bool = True
    random: bool = True
    seed: int = 0


@dataclass(frozen=True)
class LayerSensitivity:
    """What the Jacobian of one layer did on one batch; every tensor is [n] over samples.

    `error` is |p - A e| and `size` |p|; where they were asked for, `random_gain` is |A v| / |v| for one random
    direction v, `spectral_norm` the largest |A v| / |v|, and `spectral_residual` |A'A v - s^2 v| / s^2 at the end of
    its power iteration.
    """

    error: Tensor
    size: Tensor
    nodes: int
    random_gain: Tensor | None = None
    spectral_norm: Tensor | None = None
    spectral_residual: Tensor | None = None


@diagnostic(
    "sample_contributions",
    table="samples",
    columns=SAMPLES.only("final_share"),
    needs="jacobian",
    option="jacobian",
)
@diagnostic(
    "contributions",
    columns=LAYERS.only(
        *(
            *(name for name in LAYERS.names if name.startswith("final_share")),
            *("remainder_share", "jacobian_error", "nodes", "jacobian_samples"),
            *("spectral_norm_mean", "spectral_residual_max", "random_gain_mean"),
        )
    ),
    needs="jacobian",
    option="jacobian",
)
@dataclass
class Contributions:
    """P_{l->L} m_l for every layer l: each local mismatch carried to the final feature.

    e_L = sum over l of P_{l->L} m_l with P_{l->L} = A_L ... A_{l+1} (Prop. 2, Eq. 5). With quadrature the sum misses
    e_L by a remainder, which `remainder` reports and no share contains.
    """

    settings: JacobianSettings = field(default_factory=JacobianSettings)
    vectors: State = field(default_factory=dict)
    sensitivities: dict[int, LayerSensitivity] = field(default_factory=dict)
    final_drift: State = field(default_factory=dict)
    seen: int = 0

    def add(self, view: LayerView) -> None:
        """Carry the vectors so far through one more layer and add the layer's own mismatch."""
        _require_next(view, self.seen)
        self.seen += 1
        split = smooth_split(view)
        carried = self._carried(view, split) if view.layer.index > 1 else {}
        if self.settings.contributions:
            self.vectors = {
                name: torch.cat([carried[name], leaf[None]]) if carried else leaf[None]
                for name, leaf in split.local_mismatch.items()
            }
        self.final_drift = split.drift

    def _carried(self, view: LayerView, split: Split) -> State:
        """Return A v for every vector so far and record the sensitivity; nodes double until A e is close to p."""
        settings, propagation = self.settings, split.propagation
        drift_in = floating(subtract(view.merged_in, view.expert_in))
        random = _random_like(drift_in, settings.seed + view.layer.index, view)
        # The drift checks the quadrature; its gain is compared with that of a random direction.
        riders = [drift_in, random] if settings.random else [drift_in]
        vectors = _stacked(self.vectors, riders)
        operator = PathJacobian(smooth_layer(view), view.expert_in, view.merged_in, settings.nodes)
        pushed = operator.jvps(vectors)
        image = _item(pushed, -len(riders))
        while 2 * operator.nodes <= settings.max_nodes:
            if not relative_error(image, propagation) > settings.tolerance:  # NaN: nothing propagates
                break
            operator = replace(operator, nodes=2 * operator.nodes)
            pushed = operator.jvps(vectors)
            image = _item(pushed, -len(riders))
        spectral = _spectral_norm(operator, drift_in) if settings.spectral else (None, None)
        self.sensitivities[view.layer.index] = LayerSensitivity(
            error=norm(subtract(image, propagation)),
            size=norm(propagation),
            nodes=operator.nodes,
            random_gain=norm(_item(pushed, -1)) / norm(random) if settings.random else None,
            spectral_norm=spectral[0],
            spectral_residual=spectral[1],
        )
        return {name: leaf[: -len(riders)] for name, leaf in pushed.items()}

    def shares(self) -> Tensor:
        """<P_{l->L} m_l, e_L> per layer and sample, [L, n]; divide by `energy` for shares of the final drift."""
        return torch.stack([inner(_item(self.vectors, i), self.final_drift) for i in range(self.seen)])

    def energy(self) -> Tensor:
        """|e_L|^2 per sample, [n]."""
        return inner(self.final_drift, self.final_drift)

    def remainder(self) -> State:
        """e_L minus the sum of all contributions."""
        return {name: leaf - self.vectors[name].sum(dim=0) for name, leaf in self.final_drift.items()}


@diagnostic(
    "prefix",
    columns=LAYERS.only(*(name for name in LAYERS.names if name.startswith("prefix_share"))),
    needs="jacobian",
)
@dataclass
class PrefixSwaps:
    """The derivative-free split: what changes in the final feature when the expert's prefix grows by one layer.

    c_l = S_{l-1}(h_{l-1}) - S_l(h_l), where h are the expert's features and S_l runs the merged layers after l. The sum
    over l telescopes to e_L exactly. It equals the Jacobian split when the merged suffix is linear; the difference is
    nonlinearity.
    """

    finals: list[State] = field(default_factory=list)
    """After the last layer: the final feature when the first l layers are the expert's, l = 0..L."""

    def add(self, view: LayerView) -> None:
        """Run the merged layer on every prefix, and start one more prefix behind the expert's layer."""
        _require_next(view, max(0, len(self.finals) - 1))
        if view.layer.index == 1:
            self.finals = [view.merged_out, view.expert_out]
            return
        # The merged path itself and the expert's prefix up to here are known from the walk already.
        between = [view.crossed_layer(state) for state in self.finals[1:-1]]
        self.finals = [view.merged_out, *between, view.crossed_out, view.expert_out]

    def shares(self) -> Tensor:
        """<c_l, e_L> per layer and sample, [L, n]; their sum over layers is |e_L|^2 to rounding."""
        drift = subtract(self.finals[0], self.finals[-1])
        steps = zip(self.finals, self.finals[1:], strict=False)
        return torch.stack([inner(subtract(before, after), drift) for before, after in steps])


@diagnostic(
    "groups",
    table="group_contributions",
    columns=GROUP_CONTRIBUTIONS.columns[len(GROUP_CONTRIBUTIONS.key) :],
    needs="jacobian",
)
def group_mismatches(expert: LayerMap, variant: LayerMap, state: State, side: SideInputs) -> dict[str, State]:
    """The part m_g of every module group in a layer's local mismatch: m = sum over g of m_g, to rounding.

    On the expert's features, groups change from the expert's parameters to the variant's one after the other, in the
    order of `GROUPS` and in its reverse. What the output changes by as g does telescopes to m in either order; m_g is
    the mean of both: of what two groups make together, each gets half. Of two groups that is Shapley's value. What is
    attached to the last layer is a group of its own; `state` are the expert's features before it.
    """
    of, has_more = parameter_groups(variant.layer), variant.attachment is not None
    order = [group for group in GROUPS if group in of.values()] + ["attached"] * has_more

    def out(changed: Sequence[str]) -> State:
        mixed = {name: (variant if of[name] in changed else expert).parameters[name] for name in of}
        attachment = variant.attachment if "attached" in changed else None
        return LayerMap(variant.layer, mixed, attachment)(state, side)

    forward = [out(order[:at]) for at in range(len(order) + 1)]
    back = [forward[-1], *(out(order[at:]) for at in range(1, len(order))), forward[0]]
    return {
        group: {
            name: (leaf + subtract(back[at], back[at + 1])[name]) / 2
            for name, leaf in subtract(forward[at + 1], forward[at]).items()
        }
        for at, group in enumerate(order)
    }


def _require_next(view: LayerView, seen: int) -> None:
    if view.reference != "expert" or view.layer.index != seen + 1:
        raise ShapeError(
            f"want layer {seen + 1} with reference 'expert', got layer {view.layer.index} with {view.reference!r}",
            hint="Feed the views of one batch and one variant in the order of the walk.",
        )


def _item(stack: State, index: int) -> State:
    return {name: leaf[index] for name, leaf in stack.items()}


def _stacked(vectors: State, riders: list[State]) -> State:
    """Riders behind the vectors, if there are any, along the first axis."""
    last = {name: torch.stack([rider[name] for rider in riders]) for name in riders[0]}
    return {name: torch.cat([leaf, last[name]]) for name, leaf in vectors.items()} or last


def _random_like(state: State, seed: int, view: LayerView) -> State:
    """Draw normal directions on the CPU, so on any device alike, for a layer and batch; they are zero on padding."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + view.start)
    drawn = {
        name: moved(torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), leaf.device)
        for name, leaf in state.items()
    }
    masks = {name: mask for name in drawn if (mask := view.side.mask(name)) is not None}
    return drawn | {name: drawn[name] * mask[..., None].to(drawn[name]) for name, mask in masks.items()}


def _spectral_norm(operator: PathJacobian, start: State, iterations: int = 30) -> tuple[Tensor, Tensor]:
    """Largest gain per sample by power iteration on A'A from the drift, and the residual of the last step, [n] each."""
    vector = _unit(start)
    for _ in range(iterations):
        image = operator.vjp(operator.jvp(vector))
        vector, before = _unit(image), vector
    squared = inner(before, image)
    residual = norm({name: leaf - _spread(squared, leaf) * before[name] for name, leaf in image.items()})
    return squared.clamp_min(0).sqrt(), residual / squared


def _unit(state: State) -> State:
    size = norm(state)
    return {name: leaf / _spread(size, leaf) for name, leaf in state.items()}


def _spread(per_sample: Tensor, leaf: Tensor) -> Tensor:
    return per_sample.view(-1, *[1] * (leaf.dim() - 1))
