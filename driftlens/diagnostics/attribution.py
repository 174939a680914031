"""Attribution of the final drift to layers: by path-averaged Jacobians, and by prefix swaps.

e_L = sum over l of A_L ... A_{l+1} m_l (Prop. 2, Eq. 5). How much each layer's local mismatch m_l moves one number (the
final drift, a loss, a margin) is <A_{l+1}' ... A_L' u, m_l> with that number's covector u at the final feature. One
sweep from the last layer to the first pulls u back for all layers. Entry point: `BackwardSweep`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import vjp, vmap

from driftlens.engine.pool import LayerMap, ModelPool
from driftlens.engine.walk import CachedBatch, FeatureStore, LayerView, differentiable_split
from driftlens.linalg.state import (
    PathJacobian,
    State,
    floating_leaves,
    inner_products,
    quadrature_nodes,
    relative_error,
    stack_states,
    state_from_stack,
    state_norms,
    subtract_states,
)
from driftlens.models.chain import ExpertRoutes, Layer
from driftlens.models.heads import ScoreMap
from driftlens.runs.schema import ADJOINT, LAYERS, SAMPLES
from driftlens.utils.devices import to_device
from driftlens.utils.registry import diagnostic

# Panels of eight nodes on the score map's segment: normalizing a feature close to zero is far from polynomial.
SCORE_PANELS = 8


@diagnostic("adjoint", table="adjoint", columns=ADJOINT.columns[len(ADJOINT.key) :], needs="jacobian")
@dataclass(frozen=True)
class AttributionTarget:
    """A number to attribute to layers: its change [n] from expert to variant, and its covector."""

    covector: Tensor
    change: Tensor


def loss_target(head: ScoreMap, expert: Tensor, variant: Tensor, labels: Tensor) -> AttributionTarget:
    """Return the change of cross-entropy from expert to variant, in nats (Eq. 41), as a target to attribute.

    u = (averaged Jacobian of the score map)' (averaged gradient of the loss), both averaged over their segments. A
    difference between the two models' score maps does not count as drift.

    Args:
        head: the variant's score map for the task.
        expert: features of the expert, [n, d].
        variant: features of the variant, [n, d].
        labels: true rows of the score map, [n].
    """
    start, end = head.scores(expert), head.scores(variant)
    one_hot = torch.zeros_like(start).scatter_(1, labels[:, None], 1.0)
    gradient = torch.zeros_like(start)
    # The averaged gradient times the change of scores is the change of the loss itself, not its linearization.
    for t, weight in quadrature_nodes(end - start):
        gradient += weight * (torch.lerp(start, end, t).softmax(dim=1) - one_hot)
    return AttributionTarget(
        _pull_back_through_head(head, expert, variant, gradient), (gradient * (end - start)).sum(dim=1)
    )


def margin_target(head: ScoreMap, expert: Tensor, variant: Tensor) -> AttributionTarget:
    """Return the change of the expert's decision margin from expert to variant, as a target to attribute.

    A margin is the score of the class that the expert chooses minus that of each model's own strongest other class, its
    rival. With a single class it is NaN. u pulls back the chosen class minus the rivals along the segment, weighted
    by the part of the segment on which it is the strongest.

    Args:
        head: the variant's score map for the task.
        expert: features of the expert, [n, d].
        variant: features of the variant, [n, d].
    """
    start, end = head.scores(expert), head.scores(variant)
    if start.shape[1] < 2:
        return AttributionTarget(torch.full_like(expert, torch.nan), torch.full_like(start[:, 0], torch.nan))
    chosen = start.argmax(dim=1, keepdim=True)
    before, after = (scores.scatter(1, chosen, -torch.inf).amax(dim=1) for scores in (start, end))
    # On the straight segment of scores the margin is piecewise linear: its change is the product with this direction.
    direction = torch.zeros_like(start).scatter_(1, chosen, 1.0) - _rival_class_fractions(start, end)
    change = ((end - start).gather(1, chosen)[:, 0]) - (after - before)
    return AttributionTarget(_pull_back_through_head(head, expert, variant, direction), change)


def _rival_class_fractions(start: Tensor, end: Tensor) -> Tensor:
    """Return for each class the part of the score segment on which it is the strongest rival, [n, c]."""
    change = end - start
    others = start.scatter(1, start.argmax(dim=1, keepdim=True), -torch.inf)
    shares, t = torch.zeros_like(start), torch.zeros_like(start[:, :1])
    rival = others.argmax(dim=1, keepdim=True)
    # Each next rival has a steeper line, so no class comes back, and the loop ends.
    while bool((t < 1).any()):
        ahead, steeper = others.gather(1, rival) - others, change - change.gather(1, rival)
        # Rounding may put a crossing before the current point.
        crossing = torch.where(steeper > 0, ahead / steeper, torch.inf).maximum(t)
        reached, next_rival = crossing.min(dim=1, keepdim=True)
        reached = reached.clamp_max(1)
        shares.scatter_add_(1, rival, reached - t)
        rival, t = next_rival, reached
    return shares


def _pull_back_through_head(head: ScoreMap, expert: Tensor, variant: Tensor, direction: Tensor) -> Tensor:
    """Multiply a direction in score space by the transposed, path-averaged Jacobian of the score map."""
    total = torch.zeros_like(expert)
    for t, weight in quadrature_nodes(direction, panels=SCORE_PANELS):
        total += weight * vjp(head.scores, torch.lerp(expert, variant, t))[1](direction)[0]
    return total


@dataclass(frozen=True)
class JacobianSettings:
    """Settings of path-averaged Jacobians.

    Attributes:
        nodes: initial number of quadrature nodes.
        max_nodes: largest number of nodes; the number is doubled until then.
        tolerance: |p - A e| / |p| below which no more nodes are added.
        samples: number of diagnosis samples, the first ones.
        spectral: True to estimate spectral norms (expensive).
        contributions: True to record shares of the final drift; otherwise Jacobians are only checked.
        prefix: True to compute the prefix-swap split.
        random: True to compare the gain along the drift with that along random directions.
        seed: seed of the random directions.
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
    """Gains and errors of one layer's path-averaged Jacobian on one batch; every tensor is [n].

    `error` is |p - A e| and `size` is |p|. If requested, `random_gain` is |A v| / |v| for one random direction v,
    `spectral_norm` the largest |A v| / |v|, and `spectral_residual` |A'A v - s^2 v| / s^2 after power iteration.
    """

    error: Tensor
    size: Tensor
    nodes: int
    random_gain: Tensor | None = None
    spectral_norm: Tensor | None = None
    spectral_residual: Tensor | None = None


@dataclass(frozen=True)
class BackwardStep:
    """One layer of one variant on one batch in the backward sweep, with features and covectors.

    Attributes:
        routes: of a mixture of experts, where tokens of the crossed pass went: A is taken along them.
        expert_in: the expert's features before the layer; `merged_in` the variant's.
        local_mismatch: m, and with the jumps of tokens that go elsewhere, see `differentiable_split`.
        propagation: p = e - m.
        covectors: the targets' covectors at the layer's output, stacked along a new first axis.
    """

    layer: Layer
    variant: str
    batch: CachedBatch
    layer_map: LayerMap
    routes: ExpertRoutes | None
    expert_in: State
    merged_in: State
    local_mismatch: State
    propagation: State
    covectors: State

    def parts(self) -> Tensor:
        """Return the contribution <u, m> of the layer for every covector u and sample, [k, n]."""
        return vmap(inner_products, in_dims=(None, 0))(self.local_mismatch, self.covectors)

    def operator(self, nodes: int) -> PathJacobian:
        """Return the path-averaged Jacobian A of the layer."""
        side = self.batch.side.with_routes(self.routes)
        return PathJacobian(lambda state: self.layer_map(state, side), self.expert_in, self.merged_in, nodes)

    def sensitivity_and_pullback(self, settings: JacobianSettings, nodes: int) -> tuple[LayerSensitivity, State]:
        """Return the layer's sensitivity and A' u; quadrature nodes double until A e is close enough to p."""
        drift_in = floating_leaves(subtract_states(self.merged_in, self.expert_in))
        random = self._random_directions(drift_in, settings.seed)
        # The drift checks the quadrature; its gain is compared with that of a random direction.
        vectors = stack_states([drift_in, random] if settings.random else [drift_in])
        operator = self.operator(nodes)
        pushed, pulled = operator.products(vectors, self.covectors)
        while 2 * operator.nodes <= settings.max_nodes:
            # Written with `not`: if nothing propagates, the error is NaN, and more nodes would not help.
            if not relative_error(state_from_stack(pushed, 0), self.propagation) > settings.tolerance:
                break
            operator = replace(operator, nodes=2 * operator.nodes)
            pushed, pulled = operator.products(vectors, self.covectors)
        spectral = _spectral_norm_and_residual(operator, drift_in) if settings.spectral else (None, None)
        sensitivity = LayerSensitivity(
            error=state_norms(subtract_states(state_from_stack(pushed, 0), self.propagation)),
            size=state_norms(self.propagation),
            nodes=operator.nodes,
            random_gain=state_norms(state_from_stack(pushed, 1)) / state_norms(random) if settings.random else None,
            spectral_norm=spectral[0],
            spectral_residual=spectral[1],
        )
        return sensitivity, pulled

    def _random_directions(self, state: State, seed: int) -> State:
        """Sample random normal directions on the CPU, equal for all devices, and zero on padding."""
        # The large factor keeps the seeds of all layers and batches apart.
        generator = torch.Generator().manual_seed((seed + self.layer.index) * 1_000_003 + self.batch.start)
        drawn = {
            name: to_device(torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), leaf.device)
            for name, leaf in state.items()
        }
        # Padding carries no drift, so it must not count in the norm of a direction.
        masks = {name: mask for name in drawn if (mask := self.batch.side.mask(name)) is not None}
        return drawn | {name: drawn[name] * mask[..., None].to(drawn[name]) for name, mask in masks.items()}


@diagnostic(
    "sample_contributions",
    table="samples",
    columns=SAMPLES.select_columns("final_share"),
    needs="jacobian",
    option="jacobian",
)
@diagnostic(
    "contributions",
    columns=LAYERS.select_columns(
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
class BackwardSweep:
    """The backward sweep that pulls covectors at the final feature back through all layers.

    `add` keeps the features at every boundary; `steps` goes back through them. `sensitivities` are those of the first
    batch; other batches take the nodes that it needed.
    """

    pool: ModelPool
    task: str
    variants: Sequence[str]
    settings: JacobianSettings = field(default_factory=JacobianSettings)
    store: FeatureStore = field(default_factory=FeatureStore)
    file_prefix: str = ""
    batches: dict[int, CachedBatch] = field(default_factory=dict, init=False)
    sensitivities: dict[tuple[str, int], LayerSensitivity] = field(default_factory=dict, init=False)
    _routes: dict[tuple[str, int, int], ExpertRoutes] = field(default_factory=dict, init=False)

    def add(self, view: LayerView) -> None:
        """Store the features after a layer and its local mismatch, for the backward sweep."""
        if view.start not in self.batches:
            name = f"{self.file_prefix}{view.start}"
            self.batches[view.start] = CachedBatch(self.store, self.task, name, view.side, view.start, view.stop)
        batch, split, layer = self.batches[view.start], differentiable_split(view), view.layer.index
        # The expert's features are the same next to all variants, so they are stored once.
        if view.variant == self.variants[0]:
            batch.put(f"expert-{layer}", view.expert_out)
            if layer == 1:
                batch.put("expert-0", view.expert_in)
        batch.put(f"merged-{view.variant}-{layer}", view.merged_out)
        batch.put(f"mismatch-{view.variant}-{layer}", split.local_mismatch)
        if view.routes:
            self._routes[view.variant, view.start, layer] = view.routes["crossed"].fixed_copy()

    def clear(self) -> None:
        """Remove the features of all batches."""
        for batch in self.batches.values():
            batch.clear()
        self.batches.clear()
        self._routes.clear()

    def ends(self, batch: CachedBatch, variant: str) -> tuple[State, State]:
        """Return the final features of the expert and a variant on one batch."""
        return self._features_after(batch, variant, len(self.pool.chain.layers))

    @staticmethod
    def _features_after(batch: CachedBatch, variant: str, index: int) -> tuple[State, State]:
        """Return the features of the expert and a variant after a layer; both read the same inputs, number 0."""
        return batch.get(f"expert-{index}"), batch.get(f"merged-{variant}-{index}" if index else "expert-0")

    def final_drift(self, batch: CachedBatch, variant: str) -> State:
        """Return the final drift e_L of a batch, the covector for attribution of the final drift."""
        expert, merged = self.ends(batch, variant)
        return subtract_states(merged, expert)

    def steps(self, covectors: Mapping[tuple[int, str], State]) -> Iterator[BackwardStep]:
        """Yield the backward steps of all layers, batches and variants, from the last layer to the first.

        `covectors` at the final feature, by start of the batch and variant, are stacked along a new first axis.
        """
        covectors, first_start = dict(covectors), next(iter(self.batches))
        # A layer needs about as many nodes as the one after it. Twice as many square the error, roughly.
        nodes, is_precise, enough = self.settings.nodes, False, self.settings.tolerance**2
        for layer in reversed(self.pool.chain.layers):
            maps = {name: self.pool.layer_map(name, layer, self.task) for name in self.variants}
            if is_precise:
                nodes = max(self.settings.nodes, nodes // 2)
            is_precise = True
            for start, batch in self.batches.items():
                for variant in self.variants:
                    step = self._backward_step(layer, variant, batch, maps[variant], covectors[start, variant])
                    yield step
                    # Inputs are the same for all models: no drift enters layer 1.
                    if layer.index == 1:
                        continue
                    # A check repeats the products with twice the nodes until they suffice: one batch is enough.
                    if start == first_start:
                        sensitivity, pulled = step.sensitivity_and_pullback(self.settings, nodes)
                        self.sensitivities[variant, layer.index] = sensitivity
                        nodes = sensitivity.nodes
                        is_precise &= not sensitivity.error.sum() > enough * sensitivity.size.sum()
                    else:
                        pulled = step.operator(nodes).products({}, step.covectors)[1]
                    covectors[start, variant] = pulled
            # Before the next layer is read, so that one layer's weights are in memory at a time.
            maps.clear()

    def _backward_step(
        self, layer: Layer, variant: str, batch: CachedBatch, layer_map: LayerMap, covectors: State
    ) -> BackwardStep:
        mismatch = batch.get(f"mismatch-{variant}-{layer.index}")
        expert_out, merged_out = self._features_after(batch, variant, layer.index)
        expert_in, merged_in = self._features_after(batch, variant, layer.index - 1)
        return BackwardStep(
            layer=layer,
            variant=variant,
            batch=batch,
            layer_map=layer_map,
            routes=self._routes.get((variant, batch.start, layer.index)),
            expert_in=expert_in,
            merged_in=merged_in,
            local_mismatch=mismatch,
            propagation=subtract_states(subtract_states(merged_out, expert_out), mismatch),
            covectors=covectors,
        )


@diagnostic(
    "prefix",
    columns=LAYERS.select_columns(*(name for name in LAYERS.names if name.startswith("prefix_share"))),
    needs="jacobian",
)
@dataclass
class PrefixSwaps:
    """Attribution without derivatives: the change of the final feature as one more expert layer runs first.

    c_l = S_{l-1}(h_{l-1}) - S_l(h_l), where h are the expert's features and S_l runs the merged layers after l. The sum
    over l telescopes to e_L exactly. It equals the Jacobian split when the merged suffix is linear; the difference is
    nonlinearity.
    """

    batch: CachedBatch
    variant: str
    seen: int = field(default=0, init=False)
    ends: tuple[State, State] = field(default=({}, {}), init=False)

    def add(self, view: LayerView) -> None:
        """Run the merged layer on the features of every expert prefix, and start the next prefix."""
        self.seen = view.layer.index
        for prefix in range(1, self.seen - 1):
            self.batch.put(self.prefix_key(prefix), view.crossed_layer(self.batch.get(self.prefix_key(prefix))))
        # The walk has run the merged layer after the expert's prefix already.
        if self.seen > 1:
            self.batch.put(self.prefix_key(self.seen - 1), view.crossed_out)
        self.ends = view.merged_out, view.expert_out

    def prefix_key(self, prefix: int) -> str:
        """Return the cache key of the features that start from the expert's first `prefix` layers."""
        return f"prefix-{self.variant}-{prefix}"

    def swapped_features(self) -> list[State]:
        """Return the latest features with the first l layers the expert's and the rest merged, for every l."""
        merged, expert = self.ends
        return [merged, *(self.batch.get(self.prefix_key(prefix)) for prefix in range(1, self.seen)), expert]

    def shares(self) -> Tensor:
        """Return the contribution <c_l, e_L> of each layer and sample, [L, n]; their sum is |e_L|^2."""
        finals = self.swapped_features()
        drift = subtract_states(finals[0], finals[-1])
        return torch.stack(
            [inner_products(subtract_states(before, after), drift) for before, after in pairwise(finals)]
        )


def _spectral_norm_and_residual(operator: PathJacobian, start: State, iterations: int = 30) -> tuple[Tensor, Tensor]:
    """Estimate the spectral norm per sample by power iteration on A'A, and its residual, [n] each."""
    vector = _normalize_per_sample(start)
    for _ in range(iterations):
        image = operator.vjp(operator.jvp(vector))
        vector, before = _normalize_per_sample(image), vector
    squared = inner_products(before, image)
    # A small residual shows that the iteration has converged to a singular vector, not necessarily the largest.
    residual = state_norms(
        {name: leaf - _broadcast_per_sample(squared, leaf) * before[name] for name, leaf in image.items()}
    )
    return squared.clamp_min(0).sqrt(), residual / squared


def _normalize_per_sample(state: State) -> State:
    size = state_norms(state)
    return {name: leaf / _broadcast_per_sample(size, leaf) for name, leaf in state.items()}


def _broadcast_per_sample(per_sample: Tensor, leaf: Tensor) -> Tensor:
    return per_sample.view(-1, *[1] * (leaf.dim() - 1))
