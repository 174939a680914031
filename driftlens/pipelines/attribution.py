"""Attribution of one task's drift: path-averaged Jacobians, shares of the final drift and prefix swaps, as table rows.

One forward pass stores the features at every layer boundary; one backward pass serves all variants.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from driftlens.diagnostics import attribution
from driftlens.diagnostics.drift import share_intervals
from driftlens.engine.pool import LayerMap
from driftlens.engine.walk import FeatureStore, walk
from driftlens.experiment.study import Study
from driftlens.linalg.state import State, inner, norm, stack_item, stacked, subtract
from driftlens.models.chain import pooled
from driftlens.models.heads import class_rows
from driftlens.runs.schema import GROUP_CONTRIBUTIONS
from driftlens.utils.devices import to_device
from driftlens.utils.errors import NotDifferentiableError
from driftlens.utils.progress import Reporter, TaskMeter
from driftlens.utils.variants import expert_of

# Layer -> columns of the layer table.
LayerRows = dict[int, dict[str, float | int]]

# Samples per batch: small, because the derivatives of a whole layer are in memory at once.
BATCH = 8


@dataclass
class Explanation:
    """The attribution of some variants' drift on one task: rows of tables, warnings and notices."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    adjoint: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@torch.no_grad()
def attribution_of(
    study: Study, task: str, variants: Sequence[str], spill: Path, reporter: Reporter
) -> Explanation:
    """Compute the attribution of variants' drift to layers; features beyond the budget go to the folder `spill`."""
    settings, samples, explanation = study.settings.jacobian, study.tasks[task].diagnosis, Explanation()
    assert settings is not None
    if not variants:
        return explanation
    samples = dataclasses.replace(samples, ids=samples.ids[: settings.samples], batch_size=BATCH)
    ids, num_layers = list(samples.ids), len(study.pool.chain.layers)
    meter = TaskMeter(reporter, "explain", dict.fromkeys(study.tasks, 2 * num_layers), task)
    with FeatureStore(study.settings.feature_budget, spill) as store:
        # All tasks, also those of other processes, share the spill folder, so file names begin with the task's
        # number.
        prefix = f"{list(study.tasks).index(task)}-"
        pull_back = attribution.PullBack(study.pool, task, variants, settings, store, prefix)
        swaps: dict[tuple[str, int], attribution.PrefixSwaps] = {}
        for view in walk(study.pool, task, variants, samples.batches(), ids=ids):
            meter.step(view.layer.index - 1, f"causes, layer {view.layer.index} of {num_layers}")
            pull_back.add(view)
            if settings.prefix:
                new = attribution.PrefixSwaps(pull_back.batches[view.start], view.variant)
                swaps.setdefault((view.variant, view.start), new).add(view)
        prefixes: dict[str, list[Tensor]] = defaultdict(list)
        for (variant, _), swap in swaps.items():
            prefixes[variant].append(swap.shares())
        # All targets of a variant are pulled back together: a layer's linearization is the costly part.
        targets = {variant: _targets(study, pull_back, variant) for variant in variants}
        try:
            traced = _traced(
                study,
                pull_back,
                targets,
                lambda layer: meter.step(2 * num_layers - layer, f"causes, back from layer {layer}"),
            )
        except NotDifferentiableError as error:
            # Prefix swaps need no derivative and are kept.
            traced = _Traced()
            explanation.notices.append(f"the drift is not attributed to layers: {error}")
    meter.finish()
    for variant in variants:
        energy = _joined(target.energy for target in targets[variant])
        rows: LayerRows = {index: {"jacobian_samples": len(ids)} for index in range(1, num_layers + 1)}
        for (name, index), sensitivity in traced.sensitivities.items():
            if name == variant:
                rows[index] |= _sensitivity_columns(sensitivity)
        final_shares = np.full((num_layers, len(ids)), np.nan)
        if traced.parts and settings.contributions:
            shares = traced.parts[variant][:, 0]
            _fill(rows, "final_share", shares, energy)
            # Reported, never distributed over layers, so that shares and remainder sum to 1.
            rows[num_layers]["remainder_share"] = 1 - sum(row["final_share"] for row in rows.values())
            # Samples without drift keep NaN.
            np.divide(shares, energy, out=final_shares, where=energy > 0)
        if settings.prefix:
            _fill(rows, "prefix_share", _joined(prefixes[variant]), energy)
        for layer in sorted(study.settings.stored_layers):
            key = {"task": task, "variant": variant, "layer": layer}
            explanation.layers.append(key | rows[layer])
            explanation.samples.append(key | {"sample_id": ids, "final_share": final_shares[layer - 1]})
        explanation.warnings += _unconverged(settings, task, variant, rows)
        if traced.parts and "adjoint" in study.settings.options:
            of_variant = {"task": task, "variant": variant}
            explanation.adjoint += _adjoint_columns(of_variant, ids, targets[variant], traced.parts[variant])
    explanation.groups += [{"task": task, **row} for row in traced.groups]
    return explanation


def _joined(parts: Iterable[Tensor]) -> NDArray[np.float64]:
    """Join parts along the last axis."""
    return torch.cat([*parts], dim=-1).cpu().double().numpy()


def _unconverged(
    settings: attribution.JacobianSettings, task: str, variant: str, rows: LayerRows
) -> Iterator[str]:
    """Yield a warning if the quadrature misses its tolerance with all allowed nodes."""
    errors = {layer: row.get("jacobian_error", 0.0) for layer, row in rows.items()}
    missed = {layer: error for layer, error in errors.items() if error > settings.tolerance}
    if missed:
        worst = max(missed, key=lambda layer: missed[layer])
        yield (
            f"task {task}, {variant}: the path-averaged Jacobian misses the tolerance {settings.tolerance:g} in "
            f"{len(missed)} of {len(errors)} layers after {rows[worst]['nodes']} nodes, most in layer {worst} (error "
            f"{missed[worst]:.1e}). Kinked activations and large drift converge slowly: raise "
            "metrics.jacobian.max_nodes, or consider the remainder, too."
        )


def _fill(rows: LayerRows, column: str, shares: NDArray[np.float64], energy: NDArray[np.float64]) -> None:
    """Add ratios of sums over samples with their intervals; NaN without drift."""
    total = float(energy.sum())
    low, high = share_intervals(shares, energy)
    for index, row in rows.items():
        row[column] = float(shares[index - 1].sum()) / total if total > 0 else np.nan
        row |= {f"{column}_low": low[index - 1], f"{column}_high": high[index - 1]}


def _sensitivity_columns(sensitivity: attribution.LayerSensitivity) -> dict[str, float | int]:
    error, size = float(sensitivity.error.cpu().double().sum()), float(sensitivity.size.cpu().double().sum())
    columns: dict[str, float | int] = {
        "jacobian_error": error / size if size > 0 else np.nan,
        "nodes": sensitivity.nodes,
    }
    if sensitivity.random_gain is not None:
        columns["random_gain_mean"] = float(sensitivity.random_gain.cpu().double().mean())
    if sensitivity.spectral_norm is not None and sensitivity.spectral_residual is not None:
        columns["spectral_norm_mean"] = float(np.nanmean(sensitivity.spectral_norm.cpu().double()))
        columns["spectral_residual_max"] = float(np.nanmax(sensitivity.spectral_residual.cpu().double()))
    return columns


@dataclass(frozen=True)
class _Targets:
    """The targets of one batch of a variant.

    Attributes:
        energy: |e_L|^2 per sample, [n].
        changes: change of each target [n] by name, the final drift first.
        covectors: stacked in the order of `changes`.
    """

    energy: Tensor
    changes: dict[str, Tensor]
    covectors: State


def _targets(study: Study, pull_back: attribution.PullBack, variant: str) -> list[_Targets]:
    """Return the targets of every batch of a variant."""
    batches, stream = [*pull_back.batches.values()], study.pool.chain.layers[-1].stream
    ends = [pull_back.ends(batch, variant) for batch in batches]
    targets = []
    of_scores = _score_targets(study, pull_back, variant) if "adjoint" in study.settings.options else {}
    for number, (expert, merged) in enumerate(ends):
        drift = subtract(merged, expert)
        energy = inner(drift, drift)
        # The final drift is reported as a share of itself: 1 for every sample, undefined without drift.
        changes, covectors = {"final_drift": torch.where(energy > 0, 1.0, torch.nan)}, [drift]
        for name, of_batches in of_scores.items():
            changes[name] = of_batches[number].change
            # Scores depend on one stream of the state; the gradients of the others are zero.
            rest = {leaf: torch.zeros_like(value) for leaf, value in drift.items()}
            covectors.append(rest | {stream: of_batches[number].covector})
        targets.append(_Targets(energy, changes, stacked(covectors)))
    return targets


def _score_targets(
    study: Study, pull_back: attribution.PullBack, variant: str
) -> dict[str, list[attribution.Target]]:
    """Return margin and loss by batch if the variant has a score map for the task."""
    task, stream = pull_back.task, study.pool.chain.layers[-1].stream
    head = study.head(task, variant)
    if head is None:
        return {}
    batches = [*pull_back.batches.values()]
    ends = [[state[stream] for state in pull_back.ends(batch, variant)] for batch in batches]
    # Scores are functions of pooled features. Pooling is linear, so covectors are pulled back through it exactly.
    pools = [partial(pooled, how=study.settings.pool, mask=batch.side.mask(stream)) for batch in batches]
    pulled = [vjp(pool, expert)[:2] for pool, (expert, _) in zip(pools, ends, strict=True)]
    experts = torch.cat([expert for expert, _ in pulled])
    variants = torch.cat([pool(merged) for pool, (_, merged) in zip(pools, ends, strict=True)])
    whole = {"margin": attribution.margin_target(head, experts, variants)}
    if (labels := study.tasks[task].diagnosis.labels) is not None:
        rows = to_device(class_rows(head, labels[: len(experts)]), experts.device)
        whole["loss"] = attribution.loss_target(head, experts, variants, rows)
    sizes = [len(expert) for expert, _ in pulled]
    return {
        name: [
            attribution.Target(pull(covector)[0], change)
            for (_, pull), covector, change in zip(
                pulled, torch.split(target.covector, sizes), torch.split(target.change, sizes), strict=True
            )
        ]
        for name, target in whole.items()
    }


@dataclass(frozen=True)
class _Traced:
    """Results of the backward pass; empty if a layer can't be differentiated.

    `parts` holds each layer's share of each target, [L, k, n], by variant; of the final drift in squared feature units.
    """

    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    sensitivities: Mapping[tuple[str, int], attribution.LayerSensitivity] = field(default_factory=dict)
    groups: Sequence[dict[str, Any]] = ()


def _traced(
    study: Study,
    pull_back: attribution.PullBack,
    targets: Mapping[str, Sequence[_Targets]],
    report: Callable[[int], None],
) -> _Traced:
    """Pull all targets back through all layers; `report` is called with the layer before each step."""
    covectors = {
        (start, variant): target.covectors
        for variant, of_batches in targets.items()
        for start, target in zip(pull_back.batches, of_batches, strict=True)
    }
    parts: dict[str, dict[int, list[Tensor]]] = {variant: defaultdict(list) for variant in targets}
    groups: dict[tuple[str, int, str], list[Tensor]] = defaultdict(list)
    expert: LayerMap | None = None
    for step in pull_back.steps(covectors):
        layer = step.layer
        report(layer.index)
        parts[step.variant][layer.index].append(step.parts())
        if "groups" in study.settings.options and layer.index in study.settings.stored_layers:
            if expert is None or expert.layer is not layer:
                expert = study.pool.layer_map(expert_of(pull_back.task), layer, pull_back.task)
            drift = pull_back.final_drift(step.batch, step.variant)
            for group, numbers in _group_numbers(expert, step, inner(drift, drift)):
                groups[step.variant, layer.index, group].append(numbers)
    return _Traced(
        {
            variant: np.stack([_joined(of_layers[index]) for index in sorted(of_layers)])
            for variant, of_layers in parts.items()
        },
        pull_back.sensitivities,
        [_group_row(key, _joined(numbers)) for key, numbers in groups.items()],
    )


def _group_numbers(
    expert: LayerMap, step: attribution.BackwardStep, energy: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield numerators and denominators [6, n] of each module group's share of mismatch and drift."""
    parts = attribution.group_mismatches(expert, step.layer_map, step.expert_in, step.batch.side)
    # The change by other routes belongs to no module.
    if step.routes is not None:
        parts["routing"] = step.jump
    whole = step.local_mismatch
    rest = {name: leaf - sum(part[name] for part in parts.values()) for name, leaf in whole.items()}
    common = norm(rest), inner(whole, whole), energy, norm(whole)
    pulled = stack_item(step.covectors, 0)
    for group, part in parts.items():
        yield group, torch.stack([inner(part, whole), inner(part, pulled), *common])


def _group_row(key: tuple[str, int, str], per_sample: NDArray[np.float64]) -> dict[str, Any]:
    sums = per_sample.sum(axis=1)
    ratios = sums[:3] / np.where(sums[3:] > 0, sums[3:], np.nan)
    return dict(zip(GROUP_CONTRIBUTIONS.names[1:], (*key, *ratios), strict=True))


def _adjoint_columns(
    key: Mapping[str, str], ids: Sequence[str], targets: Sequence[_Targets], parts: NDArray[np.float64]
) -> Iterator[dict[str, Any]]:
    """Yield columns of the `adjoint` table of a variant, by target and layer."""
    energy = _joined(target.energy for target in targets)
    for number, name in enumerate(targets[0].changes):
        change, of_layers = _joined(target.changes[name] for target in targets), parts[:, number]
        # As a share, because squared feature units mean nothing to a reader.
        if name == "final_drift":
            of_layers = of_layers / np.where(energy > 0, energy, np.nan)
        for layer, part in enumerate(of_layers, start=1):
            remainder = {"remainder": change - of_layers.sum(axis=0)} if layer == len(parts) else {}
            yield {
                **key,
                "target": name,
                "layer": layer,
                "sample_id": list(ids),
                "change": change,
                "part": part,
                **remainder,
            }
