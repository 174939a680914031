"""States as one vector per sample, similarity measures, path-averaged Jacobians, and integrals along lines of scores.

A state is a dict of tensors whose first axis is the sample. Only floating leaves are differentiated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from driftlens.utils.errors import NotDifferentiableError

State = dict[str, Tensor]

# Largest size in bytes, over all nodes, for one pass with all nodes; small layers are bound by the number of calls.
TOGETHER = 4 << 20

NODES = 8
# Largest change of score differences over a panel: eight nodes err below 1e-11 (for 4.0, up to 8e-9).
PANEL = 2.0
# Number of scores that are integrated at a time.
_SCORES = 1 << 18


def floating_leaves(state: State) -> State:
    """Return the floating-point tensors of a state; only these can drift."""
    return {name: leaf for name, leaf in state.items() if leaf.is_floating_point()}


def subtract_states(left: State, right: State) -> State:
    """Return the difference left - right of two states, over floating-point tensors only."""
    return {name: leaf - right[name] for name, leaf in left.items() if leaf.is_floating_point()}


def add_states(left: State, right: State) -> State:
    """Return the sum left + right of two states with the same tensors."""
    return {name: leaf + right[name] for name, leaf in left.items()}


def inner_products(left: State, right: State) -> Tensor:
    """Return the inner product of two states per sample, over all tensors and tokens, [n]."""
    products = [(leaf * right[name]).flatten(1).sum(dim=1) for name, leaf in left.items()]
    return torch.stack(products).sum(dim=0)


def state_norms(state: State) -> Tensor:
    """Return the Euclidean norm of a state per sample, over all tensors and tokens, [n]."""
    norms = [row_norms(leaf.flatten(1)) for leaf in state.values()]
    return norms[0] if len(norms) == 1 else row_norms(torch.stack(norms, dim=1))


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of [n, k], [n], without overflow or underflow in float32."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    scale = power_of_two_scale(torch.linalg.vector_norm(rows, ord=math.inf, dim=1))
    return torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale


def power_of_two_scale(sizes: Tensor) -> Tensor:
    """Return a power of two near each size, as an exact divisor; 1 where the size is 0 or not finite."""
    half = sizes / 2  # so that the power is finite
    power = (half / torch.frexp(half).mantissa).clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.where((half > 0) & half.isfinite(), power, 1)


def relative_error(estimate: State, exact: State) -> Tensor:
    """Return the sum over samples of |estimate - exact| divided by that of |exact|; NaN if that is zero."""
    size = state_norms(exact).sum()
    error = state_norms(subtract_states(estimate, exact)).sum()
    return torch.where(size > 0, error / size, torch.nan)


def expert_cosine(left: Tensor, right: Tensor) -> Tensor:
    """Return the cosine of matching rows [n, d], [n] in [-1, 1]; NaN if a row is zero."""
    # Unit rows first: the product of two norms would overflow float32 for features near 1e19.
    return (_unit_rows(left) * _unit_rows(right)).sum(dim=1).clamp(-1, 1)


def _unit_rows(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(dim=1, keepdim=True)
    scaled = rows / scale
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)


def linear_cka(left: Tensor, right: Tensor) -> Tensor:
    """Return the debiased linear CKA of two sets of features of the same samples.

    It is 1 for features equal up to rotation and scale, 0 on average for unrelated ones. With K = left left' and M =
    right right', both with zero diagonals, it is HSIC(K, M) / sqrt(HSIC(K, K) HSIC(M, M)), where HSIC is the unbiased
    estimator [tr(K M) + 1'K1 1'M1 / ((n-1)(n-2)) - 2 1'K M 1 / (n-2)] / (n (n-3)).

    Source: Kornblith et al. (arXiv:1905.00414), with the HSIC estimator of Song et al. (JMLR 2012).

    Args:
        left: [n, d].
        right: [n, k]; the widths may differ.

    Returns:
        A number in float32 or wider, at most 1 up to rounding and possibly slightly negative; NaN when n < 4 or one
        side does not vary.
    """
    if len(left) < 4:
        return left.new_tensor(float("nan"))
    gram_left, gram_right = _centred_gram_zero_diagonal(left), _centred_gram_zero_diagonal(right)
    # Unbiased estimates can be negative, which gives NaN: similarity is undefined then.
    energy = _unbiased_hsic(gram_left, gram_left) * _unbiased_hsic(gram_right, gram_right)
    return _unbiased_hsic(gram_left, gram_right) / energy.sqrt()


def _centred_gram_zero_diagonal(features: Tensor) -> Tensor:
    # Products of float16 features overflow.
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    # The estimator is translation invariant; centring keeps it accurate.
    centred = features - features.mean(dim=0)
    gram = centred @ centred.mT
    return gram.fill_diagonal_(0)


def _unbiased_hsic(left: Tensor, right: Tensor) -> Tensor:
    n = len(left)
    total = left.sum() * right.sum() / ((n - 1) * (n - 2))
    mixed = torch.dot(left.sum(dim=0), right.sum(dim=0)) * 2 / (n - 2)
    return ((left * right).sum() + total - mixed) / (n * (n - 3))


def embedding_similarity(queries: Tensor, others: Tensor, how: str = "cosine", *, paired: bool = False) -> Tensor:
    """Return similarities [n, m] of embeddings by a sentence-transformers measure, or [n] if `paired`."""
    if how in ("euclidean", "manhattan"):
        order = 2.0 if how == "euclidean" else 1.0
        return (
            -torch.linalg.vector_norm(queries - others, ord=order, dim=1)
            if paired
            else -torch.cdist(queries, others, p=order)
        )
    if how == "cosine":
        queries, others = (F.normalize(side, dim=1) for side in (queries, others))
    return (queries * others).sum(dim=1) if paired else queries @ others.mT


DEEPEST = 10
"""Number of ranks that are scored."""


def _ndcg(hits: Sequence[bool], relevant: int) -> float:
    """Return binary NDCG of the hits relative to an ideal ranking."""
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(relevant, DEEPEST) + 1))
    return sum(hit / math.log2(rank + 1) for rank, hit in enumerate(hits, 1)) / best if best else 0.0


RANKINGS: dict[str, Callable[[Sequence[bool], int], float]] = {
    "ndcg@10": _ndcg,
    "accuracy@1": lambda hits, relevant: float(any(hits[:1])),
    "precision@5": lambda hits, relevant: sum(hits[:5]) / 5,
    "mrr@10": lambda hits, relevant: next((1 / rank for rank, hit in enumerate(hits, 1) if hit), 0.0),
}
"""Metric -> (hits by rank, number of relevant passages) -> the score of one query."""


@cache
def gauss_legendre(nodes: int) -> tuple[tuple[float, float], ...]:
    """Return the (node, weight) pairs of Gauss-Legendre quadrature on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return tuple((float(t), float(w)) for t, w in zip((points + 1) / 2, weights / 2, strict=True))


@dataclass(frozen=True)
class PathJacobian:
    """The path-averaged Jacobian A = integral over t in [0, 1] of J layer(start + t (end - start)) dt.

    By the mean-value identity A (end - start) = layer(end) - layer(start), which is what `closure` checks.
    Source: FeatCal (arXiv:2605.13030), Eq. 19; for a residual layer A = I + R with R of Eq. 31.

    Attributes:
        layer_call: the map, state to state.
        start: state at t = 0, the expert's input for reference "expert".
        end: state at t = 1, the merged model's input.
        nodes: quadrature nodes; the products cost that many derivative passes.
    """

    layer_call: Callable[[State], State]
    start: State
    end: State
    nodes: int

    def jvp(self, vector: State) -> State:
        """Return A v for one vector v, a state at the layer's input."""
        return state_from_stack(self.products(stack_states([vector]), {})[0], 0)

    def vjp(self, covector: State) -> State:
        """Return A' u for one covector u, a state at the layer's output."""
        return state_from_stack(self.products({}, stack_states([covector]))[1], 0)

    def products(self, vectors: State, covectors: State) -> tuple[State, State]:
        """Return A v for several vectors and A' u for several covectors, each stacked along a new first axis.

        All share the undifferentiated pass at each node. Either stack may be empty.
        """
        nbytes = sum(leaf.nbytes for stack in (vectors, covectors) for leaf in stack.values())
        nodes = gauss_legendre(self.nodes)
        # Large layers take node by node, to bound memory.
        together = self.nodes if nbytes * self.nodes <= TOGETHER else 1
        totals: tuple[State, State] = {}, {}
        with forward_mode_attention():
            for start in range(0, self.nodes, together):
                some = nodes[start : start + together]
                points = stack_states([self._point_on_segment(t) for t, _ in some])
                products = vmap(self._jacobian_products_at, in_dims=(0, None, None))(points, vectors, covectors)
                for total, of_nodes in zip(totals, products, strict=True):
                    for index, (_, weight) in enumerate(some):
                        _add_weighted_state(total, state_from_stack(of_nodes, index), weight)
        return totals

    def closure(self) -> Tensor:
        """Return the closure error |A (end - start) - change| / |change| of the layer's output."""
        exact = subtract_states(self.layer_call(self.end), self.layer_call(self.start))
        change = self.jvp(subtract_states(self.end, self.start))
        return relative_error(change, exact)

    def _jacobian_products_at(self, point: State, vectors: State, covectors: State) -> tuple[State, State]:
        pushed: State = {}
        if vectors:
            # Weights are constants of the path. Pulling back needs no such rules: torch computes no gradient of them.
            with FixedWeights():
                pushed = vmap(lambda v: jvp(self._call_on_floating_leaves, (point,), (v,))[1])(vectors)
        return pushed, vmap(vjp(self._call_on_floating_leaves, point)[1])(covectors)[0] if covectors else {}

    def _point_on_segment(self, t: float) -> State:
        """Return the state at t on the segment from `start` to `end`; floating-point tensors only."""
        start, end = floating_leaves(self.start), floating_leaves(self.end)
        return {name: torch.lerp(start[name], end[name], t) for name in start}

    def _call_on_floating_leaves(self, state: State) -> State:
        fixed = {name: leaf for name, leaf in self.start.items() if not leaf.is_floating_point()}
        return floating_leaves(self.layer_call({**fixed, **state}))


@contextmanager
def forward_mode_attention() -> Iterator[None]:
    """Use attention kernels with forward-mode derivatives, inside the context; raise if a layer has none."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # On first use torch.func.jvp scripts its decompositions and warns that scripting is deprecated.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
        # Pooling over space has no batching rule in torch, which warns; there is no other way.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        try:
            yield
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            undifferentiable = ("vmap: ", "In order to use an autograd.Function")
            # Other errors, out of memory for instance, keep their type.
            if not isinstance(error, NotImplementedError) and not text.startswith(undifferentiable):
                raise
            raise NotDifferentiableError(
                f"a layer can't be differentiated: {text[:160]}",
                hint="Set `metrics: {jacobian: false}` in a spec, jacobian=None in Python.",
            ) from error


def stack_states(states: Sequence[State]) -> State:
    """Stack states along a new first axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def state_from_stack(stack: State, index: int) -> State:
    """Return one state of a stack of states."""
    return {name: leaf[index] for name, leaf in stack.items()}


def _add_weighted_state(total: State, part: State, weight: float) -> None:
    for name, leaf in part.items():
        total[name] = total[name].add_(leaf, alpha=weight) if name in total else weight * leaf


def softmax_change(scores: Tensor, change: Tensor) -> Tensor:
    """Return the softmax change p(z + d) - p(z), [n, classes], as an integral along the line.

    Source: FeatCal (arXiv:2605.13030), appendix on the output-drift bridge, softmax probability bridge.
    """
    total = torch.zeros_like(scores)
    for into, z, d in _row_chunks(total, scores, change):
        for t, weight in quadrature_nodes(d):
            p = (z + t * d).softmax(dim=1)
            into += weight * p * (d - (p * d).sum(dim=1, keepdim=True))
    return total


def cross_entropy_change(scores: Tensor, change: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy change CE(y, z + d) - CE(y, z), [n], as an integral along the line.

    Source: FeatCal (arXiv:2605.13030), Eq. 41 with the cross-entropy as loss.

    Args:
        scores: z, [n, classes].
        change: d, [n, classes].
        labels: y, [n].
    """
    label_change = change.gather(1, labels[:, None])[:, 0]
    total = torch.zeros_like(label_change)
    for into, z, d, label_d in _row_chunks(total, scores, change, label_change):
        for t, weight in quadrature_nodes(d):
            p = (z + t * d).softmax(dim=1)
            into += weight * ((p * d).sum(dim=1) - label_d)
    return total


def _row_chunks(*parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all tensors into chunks of rows that fit into the processor's caches; yield them together."""
    rows = max(1, _SCORES // max(1, parts[1].shape[1]))
    return zip(*(torch.split(part, rows) for part in parts), strict=True)


def quadrature_nodes(change: Tensor, panels: int | None = None) -> Iterator[tuple[float, float]]:
    """Yield (node, weight) pairs of composite quadrature on [0, 1]: eight per panel."""
    if panels is None:
        # Softmax depends on differences of scores only.
        spread = (change.amax(dim=1) - change.amin(dim=1)).max().item() if change.numel() else 0.0
        panels = max(1, math.ceil(spread / PANEL))
    for panel in range(panels):
        for t, weight in gauss_legendre(NODES):
            yield (panel + t) / panels, weight / panels


class FixedWeights(TorchFunctionMode):
    """Context in which forward-mode derivatives treat weights of `linear` and `layer_norm` as constants.

    Under `vmap(jvp(...))`, torch's own rules compute, for every vector, what depends on the point alone. Here, pushing
    many vectors through a block costs about as much as that many forward passes.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Apply the rules below instead of torch's own."""
        if function in _BY_NUMBER and not kwargs:
            tensor, other = args
            if isinstance(tensor, Tensor) and isinstance(other, int | float):
                return _BY_NUMBER[function](tensor, other)
        rule: Callable[..., Any] = _RULES.get(function, function)
        return rule(*args, **(kwargs or {}))


class _FixedLinear(torch.autograd.Function):
    """A linear map x W' + b whose forward-mode derivative treats W and b as constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        weight = inputs[1]
        ctx.set_materialize_grads(False)  # or every call allocates zeros as large as the weight
        ctx.save_for_forward(weight)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (weight,) = ctx.saved_tensors
        return F.linear(tangent, weight)


class _FixedLayerNorm(torch.autograd.Function):
    """A layer norm over the last axis whose forward-mode derivative treats scale and shift as constants.

    dz = (v - mean(v) - z mean(z v)) / sqrt(var + eps), a symmetric map.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None, float], output: Tensor) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        z, scale = _standardise_last_axis(x, ctx.eps)
        return _layer_norm_projection(tangent, z) * _multiply_by_weight(scale, weight)


class _Gelu(torch.autograd.Function):
    """GELU with a forward-mode derivative that uses torch's own backward function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, approximate: str) -> Tensor:
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        x, ctx.approximate = inputs
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gelu_derivative(x, ctx.approximate) * tangent


def _standardise_last_axis(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x standardised over the last axis, and 1 / sqrt(var + eps)."""
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (x - mean) * scale, scale


def _layer_norm_projection(vector: Tensor, z: Tensor) -> Tensor:
    """Return v - mean(v) - z mean(z v), the derivative of standardisation up to its scale."""
    along = torch.linalg.vecdot(z, vector).unsqueeze(-1) / z.shape[-1]
    return torch.addcmul(vector - vector.mean(dim=-1, keepdim=True), z, along, value=-1)


def _multiply_by_weight(factor: Tensor, weight: Tensor | None) -> Tensor:
    return factor if weight is None else factor * weight


def _gelu_derivative(x: Tensor, approximate: str) -> Tensor:
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
    return slope


# Same signatures as torch's functions.


def _linear_forward_mode(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _FixedLinear.apply(input, weight, bias)


def _layer_norm_forward_mode(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _FixedLayerNorm.apply(input, weight, bias, eps)


def _gelu_forward_mode(input: Tensor, *, approximate: str = "none") -> Tensor:
    return _Gelu.apply(input, approximate)


_RULES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear_forward_mode,
    F.layer_norm: _layer_norm_forward_mode,
    F.gelu: _gelu_forward_mode,
}
# Operators for a tensor and a plain number.
_BY_NUMBER: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), torch.ops.aten.mul.Scalar),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), torch.ops.aten.div.Scalar),
}
