"""Methods that differentiate the scores of whole models: Fisher merging and AdaMerging."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from driftlens.merging.method import MOST_STEPS, StateDict, average_experts, merge_methods
from driftlens.utils.devices import to_float64
from driftlens.utils.errors import NumericsError, SpecError
from driftlens.utils.registry import Bounds

Rows = tuple[int, int] | None
# The exact diagonal takes a backward pass per sample and class: ImageNet is allowed, a vocabulary isn't.
MOST_CLASSES = 2048


@merge_methods.method(
    "fisher",
    title="Fisher Merging",
    source="arXiv:2111.09832",
    laws={"expert_order_free", "equal_experts_are_fixed", "one_expert_is_fixed"},
    reads="samples",
    needs_base=False,
    scores=True,
    held=lambda experts: 5,
    runs=lambda settings, samples, classes: _num_backward_passes(settings, samples, classes),
)
def _merge_fisher(
    base: StateDict,
    experts: Mapping[str, StateDict],
    study: Any,
    *,
    estimator: Annotated[
        Literal["exact", "batch_sqrt"],
        "exact diagonal, or squared gradients of whole batches as in published code",
    ] = "exact",
    batch_size: Annotated[int, Bounds(1), "samples per gradient of batch_sqrt"] = 32,
    normalize: Annotated[bool, "normalize every expert's Fisher information"] = True,
    eps: Annotated[float, Bounds(0, low_open=True), "added to every entry of the Fisher information"] = 1e-6,
) -> Iterator[tuple[str, Tensor]]:
    """Average the experts' parameters, weighted by each expert's diagonal Fisher information.

    The information is that of the scores on the task's calibration samples, under the expert's own distribution over
    classes; labels are not read. Entries that no expert's scores depend on take the mean.
    """
    above: dict[str, Tensor] = {}
    below: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for task, expert in experts.items():
        scored = study.scored_samples(task)
        # `placed` may return the expert's own tensor, which must not become a leaf of the graph.
        weights = {key: scored.to_pool_device(expert[key]).detach().clone().requires_grad_() for key in scored.keys}
        size = None if estimator == "exact" else batch_size
        information = _fisher_diagonal(scored, weights, size)
        norm = torch.stack([torch.linalg.vector_norm(value) for value in information.values()]).norm()
        share = 1 / (norm + eps) if normalize else torch.ones_like(norm)
        for key, value in information.items():
            weight = share * (value + eps)
            above[key] = above.get(key, 0) + weight * weights[key].detach()
            below[key] = below.get(key, 0) + weight
            seen[key] = seen.get(key, False) | (value > 0)
    for key in base:
        mean = average_experts({key: base[key]}, {task: {key: expert[key]} for task, expert in experts.items()})[key]
        if key in seen:
            # Without information `eps` alone would weigh the experts, by the norms of their other entries.
            mean = torch.where(seen.pop(key).cpu(), (above.pop(key) / below.pop(key)).to(mean), mean)
        yield key, mean


def _num_backward_passes(settings: Mapping[str, Any], samples: int, classes: int) -> int:
    if settings["estimator"] != "exact":
        return samples
    if classes > MOST_CLASSES:
        raise SpecError(
            f"the exact Fisher information of {classes:,} classes needs {samples * classes:,} backward passes",
            hint="Set estimator=batch_sqrt, or name the classes in the data's entry: `classes: true`.",
        )
    return samples * classes


def _fisher_diagonal(scored: Any, weights: Mapping[str, Tensor], batch_size: int | None) -> dict[str, Tensor]:
    """Compute an expert's diagonal Fisher information: E of (d log p / d weight)^2 over samples and classes."""
    total = {key: torch.zeros_like(value) for key, value in weights.items()}
    leaves, count = list(weights.values()), len(scored)

    def _add_squared_gradient(value: Tensor, share: float) -> None:
        slopes = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        for sum_so_far, slope in zip(total.values(), slopes, strict=True):
            if slope is not None:
                sum_so_far.addcmul_(slope, slope, value=share / count)

    if batch_size is not None:
        for start in range(0, count, batch_size):
            logs = scored.log_probabilities(range(start, min(start + batch_size, count)), weights)
            # The gradient of the sum of sqrt(p) log p; published code squares it with its cross terms.
            _add_squared_gradient(((logs.detach() / 2).exp() * logs).sum(), 1.0)
        return total
    for row in range(count):
        logs = scored.log_probabilities([row], weights)[0]
        chances = to_float64(logs.detach()).exp()
        # This is the variance of slopes over classes: a class of negligible probability adds nothing.
        rest = chances.sort().values[:-1].sum() if len(chances) > 1 else chances.sum()
        for value, chance in zip(logs, chances, strict=True):
            if chance > torch.finfo(torch.float32).eps * rest:
                _add_squared_gradient(value, float(chance))
    return total


@merge_methods.method(
    "adamerging",
    title="AdaMerging",
    source="arXiv:2310.02575",
    laws={"expert_order_free"},
    reads="samples",
    scores=True,
    held=lambda experts: experts + 3,
    runs=lambda settings, samples, classes: settings["steps"] * min(settings["batch_size"], samples),
)
def _merge_adamerging(
    base: StateDict,
    experts: Mapping[str, StateDict],
    study: Any,
    *,
    granularity: Annotated[
        Literal["layer", "task"],
        "one coefficient per task and parameter tensor, or per task",
    ] = "layer",
    initial: Annotated[float, Bounds(-100, 100), "initial coefficients"] = 0.3,
    steps: Annotated[int, Bounds(0, MOST_STEPS), "steps, each on one batch per task"] = 1000,
    learning_rate: Annotated[float, Bounds(0, low_open=True), "of Adam"] = 1e-3,
    batch_size: Annotated[int, Bounds(1), "calibration samples per task and step"] = 16,
    seed: Annotated[int, Bounds(0), "of the order of samples"] = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Return base + task vectors times coefficients that minimize the entropy of the merged model's scores.

    The sum over tasks of the mean entropy is minimized on calibration samples, without labels; the authors' code uses
    the test samples. Tensors that scores do not depend on keep the initial coefficients.
    """
    by_task = {task: study.scored_samples(task) for task in experts}
    # All tasks are scored on one device, so any of them places the weights.
    placed = next(iter(by_task.values())).to_pool_device
    keys = tuple(dict.fromkeys(key for scored in by_task.values() for key in scored.keys))
    start = {key: placed(base[key]) for key in keys}
    vectors = {task: {key: placed(expert[key]) - start[key] for key in keys} for task, expert in experts.items()}
    parts = tuple(dict.fromkeys(part for scored in by_task.values() for part in scored.parts))
    wide = len(parts) if granularity == "layer" else 1
    coefficients = torch.full((len(experts), wide), initial, device=start[keys[0]].device).requires_grad_()
    adam = torch.optim.Adam([coefficients], lr=learning_rate)
    order = {task: _shuffled_batches(len(scored), batch_size, seed, task) for task, scored in by_task.items()}
    for _ in range(steps):
        weights = _merged_weight_leaves(start, vectors, coefficients, parts)
        coefficients.grad = torch.zeros_like(coefficients)
        for task, scored in by_task.items():
            logs = scored.log_probabilities(next(order[task]), weights)
            loss = -(logs.exp() * logs).sum(dim=-1).mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            by_key = dict(zip(weights, slopes, strict=True))
            # The chain rule by hand: weights are the graph's leaves, and parts of a fused one have own coefficients.
            for place, (key, rows) in enumerate(parts):
                if (slope := by_key[key]) is not None:
                    for row, vector in enumerate(vectors.values()):
                        along = (_select_rows(slope, rows) * _select_rows(vector[key], rows)).sum()
                        coefficients.grad[row, place % wide] += along
        # One NaN would stay in Adam's averages, and with them in every later coefficient.
        if not bool(torch.isfinite(coefficients.grad).all()):
            raise NumericsError(
                "AdaMerging's gradient is NaN or infinite",
                hint="Lower `initial` or `learning_rate`.",
            )
        adam.step()
    weights = _merged_weight_leaves(start, vectors, coefficients, parts)
    for key in base:
        value = weights.pop(key, None)
        if value is None:
            value = base[key] + initial * sum(expert[key] - base[key] for expert in experts.values())
        yield key, value


def _select_rows(value: Tensor, rows: Rows) -> Tensor:
    return value if rows is None else value[slice(*rows)]


@torch.no_grad()
def _merged_weight_leaves(
    start: Mapping[str, Tensor],
    vectors: Mapping[str, Mapping[str, Tensor]],
    coefficients: Tensor,
    parts: Sequence[tuple[str, Rows]],
) -> dict[str, Tensor]:
    weights = {key: value.clone() for key, value in start.items()}
    for place, (key, rows) in enumerate(parts):
        for row, vector in zip(coefficients, vectors.values(), strict=True):
            _select_rows(weights[key], rows).add_(row[place % len(row)] * _select_rows(vector[key], rows))
    return {key: value.requires_grad_() for key, value in weights.items()}


def _shuffled_batches(count: int, size: int, seed: int, task: str) -> Iterator[list[int]]:
    """Yield batches of sample positions without end, each epoch in a new random order."""
    # crc32, because Python's hash of a string differs from process to process.
    generator = torch.Generator().manual_seed(seed + zlib.crc32(task.encode()))
    size = min(size, count)
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        # The incomplete batch at the end is dropped, so that every step averages over as many samples.
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))
