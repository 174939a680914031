"""Path-averaged Jacobians, contributions and prefix swaps of one task, as columns of the layer and sample tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from driftlens.data.samples import SampleSet
from driftlens.diagnostics import attribution
from driftlens.diagnostics.drift import share_intervals
from driftlens.engine.walk import LayerView, decompose, smooth_split, walk
from driftlens.experiment.study import Study
from driftlens.linalg.state import State, inner, norm, subtract
from driftlens.models.chain import pooled
from driftlens.models.heads import class_rows
from driftlens.runs.schema import GROUP_CONTRIBUTIONS
from driftlens.utils.devices import moved
from driftlens.utils.progress import Reporter, TaskMeter
from driftlens.utils.variants import expert_of

Nodes = Mapping[int, int]
"""Layer -> nodes of its path-averaged Jacobian."""

K = TypeVar("K")

BATCH = 8
"""Samples per batch, a small one: every vector carried so far is alive at once, or every state for the way back."""


@dataclass
class Explanation:
    """Where the drift of some variants on one task comes from: keys and columns of tables, and what may spoil them."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    adjoint: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def attribution_of(
    study: Study, task: str, variants: Sequence[str], reporter: Reporter
) -> Explanation | None:
    """Attribute these variants' drift to layers, as the settings ask for it; None except in the main process."""
    return study.of_task(task, partial(_explained, study, task, variants, reporter))


def _explained(study: Study, task: str, variants: Sequence[str], reporter: Reporter) -> Explanation:
    followed = _followed(study, task, variants, reporter)
    explanation, ids = Explanation(), study.tasks[task].diagnosis.ids
    for variant in variants:
        rows, final_shares = _columns(study, followed[variant])
        for layer in sorted(study.settings.stored_layers):
            key = {"task": task, "variant": variant, "layer": layer}
            explanation.layers.append(key | rows[layer])
            shares = final_shares[layer - 1]
            explanation.samples.append(key | {"sample_id": list(ids[: len(shares)]), "final_share": shares})
        explanation.warnings += _unconverged(study, task, variant, rows)
        nodes = {layer: int(row["nodes"]) for layer, row in rows.items() if "nodes" in row}
        if "groups" in study.settings.options:
            explanation.groups += group_rows(study, task, variant, nodes)
        if "adjoint" in study.settings.options:
            explanation.adjoint += adjoint_columns(study, task, variant, nodes)
    return explanation


def _unconverged(
    study: Study, task: str, variant: str, rows: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """Says where the quadrature missed its tolerance with all the nodes it may use, as it does on kinks."""
    settings = study.settings.jacobian
    assert settings is not None
    errors = {layer: row.get("jacobian_error", 0.0) for layer, row in rows.items()}
    missed = {layer: error for layer, error in errors.items() if error > settings.tolerance}
    if missed:
        worst = max(missed, key=lambda layer: missed[layer])
        yield (
            f"task {task}, {variant}: the path-averaged Jacobian misses the tolerance {settings.tolerance:g} in "
            f"{len(missed)} of {len(errors)} layers after {rows[worst]['nodes']} nodes, most in layer {worst} (error "
            f"{missed[worst]:.1e}). A kinked activation or a large drift converges slowly: raise "
            "metrics.jacobian.max_nodes, or read contributions with their remainder."
        )


@dataclass(frozen=True)
class _Followed:
    """What some samples say of one variant: numbers by name and layer, samples along the last axis, and nodes by layer.

    Those of all layers together are of layer 0: `energy` |e_L|^2, [n], and where they were asked for `final_share` and
    `prefix_share`, the layers' parts of it, [L, n].
    """

    numbers: dict[tuple[str, int], NDArray[np.float64]]
    nodes: dict[int, int]


@torch.no_grad()
def _followed(study: Study, task: str, variants: Sequence[str], reporter: Reporter) -> dict[str, _Followed]:
    """Return why each variant's features drift on the first samples of one task."""
    settings = study.settings.jacobian
    assert settings is not None
    samples = _first_samples(study, task)
    num_layers = len(study.pool.chain.layers)
    meter = TaskMeter(reporter, "explain", dict.fromkeys(study.tasks, num_layers * len(variants)), task)
    results = dict[str, _Followed]()
    for number, variant in enumerate(variants):
        batches = [
            (attribution.Contributions(settings), attribution.PrefixSwaps())
            for _ in range(samples.num_batches)
        ]
        views = walk(study.pool, task, [variant], samples.batches(), ids=samples.ids)
        for view, (carried, swaps) in zip(views, itertools.cycle(batches), strict=False):
            layer = view.layer.index
            meter.step(number * num_layers + layer - 1, f"causes, layer {layer} of {num_layers}")
            carried.add(view)
            if settings.prefix:
                swaps.add(view)
        results[variant] = _joined(batches)
    meter.finish()
    return results


def _joined(
    batches: Sequence[tuple[attribution.Contributions, attribution.PrefixSwaps]],
) -> _Followed:
    """Return what was found of all batches of a variant."""
    parts: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    nodes: dict[int, int] = {}
    for carried, swaps in batches:
        parts["energy", 0].append(carried.energy())
        if carried.settings.contributions:
            parts["final_share", 0].append(carried.shares())
        if carried.settings.prefix:
            parts["prefix_share", 0].append(swaps.shares())
        for layer, sensitivity in carried.sensitivities.items():
            nodes[layer] = max(sensitivity.nodes, nodes.get(layer, 0))
            for name in ("error", "size", "random_gain", "spectral_norm", "spectral_residual"):
                if (number := getattr(sensitivity, name)) is not None:
                    parts[name, layer].append(number)
    return _Followed(_numbers(parts), nodes)


def _numbers(parts: Mapping[K, Sequence[Tensor]]) -> dict[K, NDArray[np.float64]]:
    """Return the parts of each, joined along the last axis."""
    return {key: torch.cat([*tensors], dim=-1).cpu().double().numpy() for key, tensors in parts.items()}


def _first_samples(study: Study, task: str) -> SampleSet:
    """The diagnosis samples that are followed, in small batches."""
    assert study.settings.jacobian is not None
    samples = study.tasks[task].diagnosis
    return dataclasses.replace(samples, ids=samples.ids[: study.settings.jacobian.samples], batch_size=BATCH)


def _columns(study: Study, whole: _Followed) -> tuple[dict[int, dict[str, float | int]], NDArray[np.float64]]:
    """Columns of the layer table by layer, and `final_share` per sample [L, n] of the samples that were followed."""
    numbers, energy = whole.numbers, whole.numbers["energy", 0]
    num_layers, count = len(study.pool.chain.layers), len(energy)
    layers: dict[int, dict[str, float | int]] = {
        index: {"jacobian_samples": count} for index in range(1, num_layers + 1)
    }
    for index, nodes in whole.nodes.items():
        of_layer = {name: values for (name, layer), values in numbers.items() if layer == index}
        layers[index] |= _sensitivity_columns(of_layer) | {"nodes": nodes}
    per_sample = np.full((num_layers, count), np.nan)
    if ("final_share", 0) in numbers:
        shares = numbers["final_share", 0]
        _fill(layers, "final_share", shares, energy)
        layers[num_layers]["remainder_share"] = 1 - sum(layers[index]["final_share"] for index in layers)
        per_sample = np.divide(shares, energy, out=per_sample, where=energy > 0)
    if ("prefix_share", 0) in numbers:
        _fill(layers, "prefix_share", numbers["prefix_share", 0], energy)
    return layers, per_sample


def _fill(
    layers: dict[int, dict[str, float | int]],
    column: str,
    shares: NDArray[np.float64],
    energy: NDArray[np.float64],
) -> None:
    """Ratios of sums over samples with their intervals; NaN without drift."""
    total = float(energy.sum())
    low, high = share_intervals(shares, energy)
    for index in layers:
        layers[index][column] = float(shares[index - 1].sum()) / total if total > 0 else np.nan
        layers[index] |= {f"{column}_low": low[index - 1], f"{column}_high": high[index - 1]}


def _sensitivity_columns(numbers: Mapping[str, NDArray[np.float64]]) -> dict[str, float | int]:
    error, size = numbers["error"], numbers["size"]
    columns: dict[str, float | int] = {
        "jacobian_error": float(error.sum() / size.sum()) if size.sum() > 0 else np.nan
    }
    if "random_gain" in numbers:
        columns["random_gain_mean"] = float(numbers["random_gain"].mean())
    if "spectral_norm" in numbers:
        columns["spectral_norm_mean"] = float(np.nanmean(numbers["spectral_norm"]))
        columns["spectral_residual_max"] = float(np.nanmax(numbers["spectral_residual"]))
    return columns


@torch.no_grad()
def adjoint_columns(study: Study, task: str, variant: str, nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Yield columns of the `adjoint` table of a variant, by target and layer.

    `nodes` are those that sufficed for its forward pass.
    """
    passes = list(_taken_back(study, task, variant, nodes))
    measured: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    ends = [views[-1] for views, _ in passes]
    for (_, steps), last, targets in zip(passes, ends, _targets(study, ends), strict=True):
        for name, target in targets.items():
            covector = {last.layer.stream: target.covector}
            measured[name, "parts"].append(attribution.adjoint_parts(steps, covector))
            measured[name, "change"].append(target.change)
    numbers = _numbers(measured)
    for name in (name for name, quantity in measured if quantity == "parts"):
        parts, change = numbers[name, "parts"], numbers[name, "change"]
        of_target = {"sample_id": list(study.tasks[task].diagnosis.ids[: len(change)]), "change": change}
        for layer, part in enumerate(parts, start=1):
            key = {"task": task, "variant": variant, "target": name, "layer": layer}
            remainder = {"remainder": change - parts.sum(axis=0)} if layer == len(parts) else {}
            yield key | of_target | {"part": part} | remainder


@torch.no_grad()
def group_rows(study: Study, task: str, variant: str, nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Yield rows of the table of module groups; arguments as for `adjoint_columns`."""
    measured: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    for views, steps in _taken_back(study, task, variant, nodes):
        for layer, group, numbers in _group_numbers(study, views, steps):
            measured[layer, group].append(numbers)
    for key, per_sample in _numbers(measured).items():
        sums = per_sample.sum(axis=1)
        ratios = sums[:3] / np.where(sums[3:] > 0, sums[3:], np.nan)
        yield dict(zip(GROUP_CONTRIBUTIONS.names, (task, variant, *key, *ratios), strict=True))


def _group_numbers(
    study: Study, views: Sequence[LayerView], steps: Sequence[attribution.Step]
) -> Iterator[tuple[int, str, Tensor]]:
    """Of one batch, layer and group of modules what its share of mismatch and drift is made of, [6, n]."""
    last = views[-1]
    drift = {last.layer.stream: decompose(last).drift[last.layer.stream]}
    for view, (step, pulled) in zip(reversed(views), attribution.pulled_back(steps, drift), strict=True):
        if view.layer.index not in study.settings.stored_layers:
            continue
        expert, merged = (
            study.pool.layer_map(name, view.layer, view.task) for name in (expert_of(view.task), view.variant)
        )
        parts = attribution.group_mismatches(expert, merged, view.expert_in, view.side)
        whole = step.local_mismatch
        if view.routes:  # what going elsewhere changes is no module's
            parts["routing"] = subtract(whole, decompose(view).local_mismatch)
        rest = {name: leaf - sum(part[name] for part in parts.values()) for name, leaf in whole.items()}
        common = norm(rest), inner(whole, whole), inner(drift, drift), norm(whole)
        for group, part in parts.items():
            numbers = torch.stack([inner(part, whole), inner(part, pulled), *common])
            yield view.layer.index, group, numbers


def _taken_back(
    study: Study, task: str, variant: str, nodes: Nodes
) -> Iterator[tuple[list[LayerView], list[attribution.Step]]]:
    """Yield all layers of each batch of the first samples in forward order, as the walk saw them and as steps."""
    settings = study.settings.jacobian
    assert settings is not None
    views: dict[int, list[LayerView]] = defaultdict(list)
    mismatches: dict[int, list[State]] = defaultdict(list)
    for view in walk(study.pool, task, [variant], _first_samples(study, task).batches()):
        mismatches[view.start].append(smooth_split(view).local_mismatch)
        # The view's own layer functions hold the layer's parameters; they are read again on the way back.
        views[view.start].append(dataclasses.replace(view, crossed_layer=_forgotten, variant_along=None))

    def call(view: LayerView, state: State) -> State:
        routes = view.routes["crossed"].given() if view.routes else None
        return study.pool.layer_map(variant, view.layer, task)(state, view.side.along(routes))

    for start, batch_views in views.items():
        steps = [
            attribution.Step(
                call=partial(call, view),
                expert_in=view.expert_in,
                merged_in=view.merged_in,
                local_mismatch=mismatch,
                nodes=nodes.get(view.layer.index, settings.nodes),
            )
            for view, mismatch in zip(batch_views, mismatches[start], strict=True)
        ]
        yield batch_views, steps


def _forgotten(state: State) -> State:
    raise AssertionError("the layer's parameters are read again")


def _targets(study: Study, ends: Sequence[LayerView]) -> list[dict[str, attribution.Target]]:
    """Return what is explained at the last layer of each batch of a variant, by name."""
    task, pooling, stream = ends[0].task, study.settings.pool, ends[0].layer.stream
    pairs = [(last.expert_out[stream], last.merged_out[stream]) for last in ends]
    targets = [{"final_drift": attribution.drift_target(*pair)} for pair in pairs]
    head = study.head(task, ends[0].variant)
    if head is None:
        return targets
    # Scores are of pooled features. Pooling is linear, so a covector behind it is pulled back exactly, from anywhere.
    pools = [partial(pooled, how=pooling, mask=last.side.mask(stream)) for last in ends]
    pulled = [vjp(pool, expert)[:2] for pool, (expert, _) in zip(pools, pairs, strict=True)]
    experts = torch.cat([expert for expert, _ in pulled])
    variants = torch.cat([pool(variant) for pool, (_, variant) in zip(pools, pairs, strict=True)])
    of_scores = {"margin": attribution.margin_target(head, experts, variants)}
    if (labels := study.tasks[task].diagnosis.labels) is not None:
        rows = moved(class_rows(head, labels[: len(experts)]), experts.device)
        of_scores["loss"] = attribution.loss_target(head, experts, variants, rows)
    sizes = [len(expert) for expert, _ in pulled]
    for name, target in of_scores.items():
        parts = (torch.split(part, sizes) for part in (target.covector, target.change))
        for of_batch, (_, pull), covector, change in zip(targets, pulled, *parts, strict=True):
            of_batch[name] = attribution.Target(pull(covector)[0], change)
    return targets
