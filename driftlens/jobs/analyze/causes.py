"""Path-averaged Jacobians, contributions and prefix swaps of one task, as columns of the layer and sample tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from driftlens.base.devices import moved
from driftlens.base.progress import Reporter, TaskMeter
from driftlens.base.variants import expert_of
from driftlens.data.samples import SampleSet
from driftlens.diagnostics import attribution
from driftlens.diagnostics.drift import share_intervals
from driftlens.engine.walk import LayerView, decompose, smooth_split, walk
from driftlens.jobs.analyze.diagnosis import fetched
from driftlens.jobs.study.study import Study
from driftlens.linalg.state import State, inner, norm, subtract
from driftlens.models.chain import pooled
from driftlens.models.heads import class_rows
from driftlens.runs.schema import GROUP_CONTRIBUTIONS

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
    """The attribution of these variants' drift to layers, as the study's settings ask for it.

    Processes may share the samples, except for what is taken back; None in all but the first.
    """
    work = partial(_followed, study, task, variants, reporter)
    batches = {name: _first_samples(study, name).num_batches for name in study.tasks}
    return study.divided(task, batches, work, partial(_explained, study, task, variants))


def _explained(
    study: Study, task: str, variants: Sequence[str], pieces: Sequence[Sequence[list[_Followed]]]
) -> Explanation:
    found, ids = Explanation(), study.tasks[task].diagnosis.ids
    for number, variant in enumerate(variants):
        rows, final_shares = _columns(study, [part for piece in pieces for part in piece[number]])
        for layer in sorted(study.settings.stored_layers):
            key = {"task": task, "variant": variant, "layer": layer}
            found.layers.append(key | rows[layer])
            shares = final_shares[layer - 1]
            found.samples.append(key | {"sample_id": list(ids[: len(shares)]), "final_share": shares})
        found.warnings += _unconverged(study, task, variant, rows)
        nodes = {layer: int(row["nodes"]) for layer, row in rows.items() if "nodes" in row}
        if "groups" in study.settings.options:
            found.groups += group_rows(study, task, variant, nodes)
        if "adjoint" in study.settings.options:
            found.adjoint += adjoint_columns(study, task, variant, nodes)
    return found


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
    """What one batch [n] says: |e_L|^2, and by layer [L, n] contributions and prefix swaps, where asked for."""

    energy: Tensor
    sensitivities: dict[int, attribution.LayerSensitivity]
    shares: Tensor | None
    prefix_shares: Tensor | None


@torch.no_grad()
def _followed(
    study: Study, task: str, variants: Sequence[str], reporter: Reporter, first: int, last: int
) -> list[list[_Followed]]:
    """Why each variant's features drift on some batches of the first samples of one task: by variant and batch."""
    settings = study.settings.jacobian
    assert settings is not None
    samples = _first_samples(study, task)
    num_layers = len(study.pool.chain.layers)
    units = dict.fromkeys(study.tasks, num_layers * len(variants))
    meter, part, found = TaskMeter(reporter, "explain", units, task), samples.positions(first, last), []
    for number, variant in enumerate(variants):
        followed = [attribution.Contributions(settings) for _ in range(first, last)]
        swapped = [attribution.PrefixSwaps() for _ in followed]
        batches = samples.batches(part.start, part.stop)
        views = walk(study.pool, task, [variant], batches, ids=samples.ids)
        # The host decides for every batch by itself, as nobody waits there, and holds one batch's products at a time.
        at_once = 1 if study.pool.device.type == "cpu" else len(followed)
        places = itertools.cycle(range(0, len(followed), at_once) if followed else ())
        while seen := list(itertools.islice(views, at_once)):
            layer, place = seen[0].layer.index, next(places)
            meter.step(number * num_layers + layer - 1, f"causes, layer {layer} of {num_layers}")
            attribution.carry_together(followed[place : place + at_once], seen)
            if settings.prefix:
                for swaps, view in zip(swapped[place:], seen, strict=False):
                    swaps.add(view)
        parts = []
        for of, swaps in zip(followed, swapped, strict=True):
            shares = of.shares() if settings.contributions else None
            parts.append(
                _Followed(of.energy(), of.sensitivities, shares, swaps.shares() if settings.prefix else None)
            )
        found.append(parts)
    meter.finish()
    return found


def _first_samples(study: Study, task: str) -> SampleSet:
    """The diagnosis samples that are followed, in small batches."""
    assert study.settings.jacobian is not None
    samples = study.tasks[task].diagnosis
    return dataclasses.replace(samples, ids=samples.ids[: study.settings.jacobian.samples], batch_size=BATCH)


def _columns(
    study: Study, parts: Sequence[_Followed]
) -> tuple[dict[int, dict[str, float | int]], NDArray[np.float64]]:
    """Columns of the layer table by layer, and `final_share` per sample [L, n] of the samples that were followed."""
    energy = _joined([part.energy for part in parts])
    num_layers, count = len(study.pool.chain.layers), len(energy)
    layers: dict[int, dict[str, float | int]] = {
        index: {"jacobian_samples": count} for index in range(1, num_layers + 1)
    }
    for index in parts[0].sensitivities:
        layers[index] |= _sensitivity_columns([part.sensitivities[index] for part in parts])
    per_sample = np.full((num_layers, count), np.nan)
    if there := [part.shares for part in parts if part.shares is not None]:
        shares = _joined(there)
        _fill(layers, "final_share", shares, energy)
        layers[num_layers]["remainder_share"] = 1 - sum(layers[index]["final_share"] for index in layers)
        per_sample = np.divide(shares, energy, out=per_sample, where=energy > 0)
    if there := [part.prefix_shares for part in parts if part.prefix_shares is not None]:
        _fill(layers, "prefix_share", _joined(there), energy)
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


def _sensitivity_columns(parts: list[attribution.LayerSensitivity]) -> dict[str, float | int]:
    error, size = (_joined([getattr(part, name) for part in parts]) for name in ("error", "size"))
    columns: dict[str, float | int] = {
        "jacobian_error": float(error.sum() / size.sum()) if size.sum() > 0 else np.nan,
        "nodes": max(part.nodes for part in parts),
    }
    gains = [part.random_gain for part in parts if part.random_gain is not None]
    if gains:
        columns["random_gain_mean"] = float(_joined(gains).mean())
    norms = [part.spectral_norm for part in parts if part.spectral_norm is not None]
    residuals = [part.spectral_residual for part in parts if part.spectral_residual is not None]
    if norms:
        columns["spectral_norm_mean"] = float(np.nanmean(_joined(norms)))
        columns["spectral_residual_max"] = float(np.nanmax(_joined(residuals)))
    return columns


def _joined(parts: list[Tensor]) -> NDArray[np.float64]:
    return torch.cat(parts, dim=-1).cpu().double().numpy()


@torch.no_grad()
def adjoint_columns(
    study: Study, task: str, variant: str, nodes: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    """Columns of the `adjoint` table, by target and layer; `nodes` sufficed for the forward pass, by layer."""
    taken = list(_taken_back(study, task, variant, nodes))
    ends = [seen[-1] for seen, _ in taken]
    for name, targets in _targets(study, ends).items():
        pulled = [
            attribution.adjoint_parts(steps, {last.layer.stream: target.covector})
            for (_, steps), last, target in zip(taken, ends, targets, strict=True)
        ]
        parts, change = _joined(pulled), _joined([target.change for target in targets])
        of_target = {"sample_id": list(study.tasks[task].diagnosis.ids[: len(change)]), "change": change}
        for layer, part in enumerate(parts, start=1):
            key = {"task": task, "variant": variant, "target": name, "layer": layer}
            remainder = {"remainder": change - parts.sum(axis=0)} if layer == len(parts) else {}
            yield key | of_target | {"part": part} | remainder


@torch.no_grad()
def group_rows(study: Study, task: str, variant: str, nodes: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Rows of the table of module groups; arguments and errors as for `adjoint_columns`."""
    measured: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    for seen, steps in _taken_back(study, task, variant, nodes):
        last = seen[-1]
        drift = {last.layer.stream: decompose(last).drift[last.layer.stream]}
        for view, (step, pulled) in zip(reversed(seen), attribution.pulled_back(steps, drift), strict=True):
            if view.layer.index not in study.settings.stored_layers:
                continue
            expert, merged = (study.pool.layer_map(at, view.layer, task) for at in (expert_of(task), variant))
            parts, whole = (
                attribution.group_mismatches(expert, merged, view.expert_in, view.side),
                step.local_mismatch,
            )
            if view.routes:  # what going elsewhere changes is no module's
                parts["routing"] = subtract(whole, decompose(view).local_mismatch)
            rest = {name: leaf - sum(part[name] for part in parts.values()) for name, leaf in whole.items()}
            common = norm(rest), inner(whole, whole), inner(drift, drift), norm(whole)
            for group, part in parts.items():
                measured[view.layer.index, group].append(
                    torch.stack([inner(part, whole), inner(part, pulled), *common])
                )
    for key, per_sample in fetched(measured, dim=1).items():
        of = per_sample.double().numpy().sum(axis=1)
        ratios = of[:3] / np.where(of[3:] > 0, of[3:], np.nan)
        yield dict(zip(GROUP_CONTRIBUTIONS.names, (task, variant, *key, *ratios), strict=True))


def _taken_back(
    study: Study, task: str, variant: str, nodes: Mapping[int, int]
) -> Iterator[tuple[list[LayerView], list[attribution.Step]]]:
    """Batch by batch of the first samples, all layers in forward order: as the walk saw them, and as steps."""
    settings = study.settings.jacobian
    assert settings is not None
    samples = _first_samples(study, task)
    views: dict[int, list[LayerView]] = defaultdict(list)
    mismatches: dict[int, list[State]] = defaultdict(list)
    for view in walk(study.pool, task, [variant], samples.batches()):
        mismatches[view.start].append(smooth_split(view).local_mismatch)
        # The view's own layer functions hold the layer's parameters; they are read again on the way back.
        views[view.start].append(dataclasses.replace(view, crossed_layer=_forgotten, variant_along=None))

    def call(view: LayerView, state: State) -> State:
        routes = view.routes["crossed"].given() if view.routes else None
        return study.pool.layer_map(variant, view.layer, task)(state, view.side.along(routes))

    for start, seen in views.items():
        steps = [
            attribution.Step(
                call=partial(call, view),
                expert_in=view.expert_in,
                merged_in=view.merged_in,
                local_mismatch=mismatch,
                nodes=nodes.get(view.layer.index, settings.nodes),
            )
            for view, mismatch in zip(seen, mismatches[start], strict=True)
        ]
        yield seen, steps


def _forgotten(state: State) -> State:
    raise AssertionError("the layer's parameters are read again")


def _targets(study: Study, ends: Sequence[LayerView]) -> dict[str, list[attribution.Target]]:
    """By name what is explained, batch by batch; scores are those of all batches at once, so that one wait does."""
    pooling, stream, samples = study.settings.pool, ends[0].layer.stream, study.tasks[ends[0].task].diagnosis
    pairs = [(last.expert_out[stream], last.merged_out[stream]) for last in ends]
    targets = {"final_drift": [attribution.drift_target(*pair) for pair in pairs]}
    head = study.head(ends[0].task, ends[0].variant)
    if head is None:
        return targets
    # Scores are of pooled features. Pooling is linear, so a covector behind it is pulled back exactly, from anywhere.
    pools = [partial(pooled, how=pooling, mask=last.side.mask(stream)) for last in ends]
    pulled = [vjp(pool, expert)[:2] for pool, (expert, _) in zip(pools, pairs, strict=True)]
    befores, pulls = zip(*pulled, strict=True)
    before = torch.cat(befores)
    after = torch.cat([pool(variant) for pool, (_, variant) in zip(pools, pairs, strict=True)])
    scored = {"margin": attribution.margin_target(head, before, after)}
    if samples.labels is not None:
        labels = moved(class_rows(head, samples.labels[: len(before)]), before.device)
        scored["loss"] = attribution.loss_target(head, before, after, labels)
    sizes = [len(of) for of in befores]
    for name, of in scored.items():
        parts = zip(pulls, torch.split(of.covector, sizes), torch.split(of.change, sizes), strict=True)
        targets[name] = [attribution.Target(pull(covector)[0], change) for pull, covector, change in parts]
    return targets
