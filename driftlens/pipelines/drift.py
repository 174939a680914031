"""Drift of one task and its attribution, as rows of tables. Entry points: `measure_task`, `compute_attribution`.

`measure_task` compares the first samples with the models' own forward pass and with a float64 pass. Meanwhile
`TracedFeatures` keeps what `compute_attribution` reads, so that it runs backward only; one backward pass serves all
variants.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vjp

from driftlens.data.samples import Batch
from driftlens.diagnostics import attribution
from driftlens.diagnostics.drift_columns import bootstrap_ratio_ci
from driftlens.engine.walk import (
    FeatureStore,
    LayerView,
    LibraryDrift,
    closure_tolerance,
    sample_cache_bytes,
    walk,
)
from driftlens.experiment.study import Study
from driftlens.linalg.state import (
    State,
    inner_products,
    stack_states,
    subtract_states,
)
from driftlens.models.chain import Layer, Pool, pool_features
from driftlens.models.heads import class_indices
from driftlens.pipelines.evaluation import TaskResults
from driftlens.utils.devices import to_device
from driftlens.utils.distributed import ProgressReporter, TaskProgress
from driftlens.utils.errors import NotDifferentiableError, NumericsError, SpecError
from driftlens.utils.registry import Diagnostic, DiagnosticInput
from driftlens.utils.variants import expert_name

Array = NDArray[np.float64]
Row = dict[str, object]
# Layer -> columns of the layer table.
LayerRows = dict[int, dict[str, float | int]]
# Samples of each task whose drift is compared with the library's, and of the first task with float64.
VERIFIED_SAMPLES = 2
# Samples per batch of the attribution: small, because the derivatives of a whole layer are in memory at once.
BATCH = 8


class TracedFeatures:
    """The features of a task's first diagnosis samples at every boundary, which the attribution of drift reads."""

    def __init__(self, study: Study, task: str, variants: Sequence[str], store: FeatureStore) -> None:
        settings, samples = study.settings.jacobian, study.tasks[task].diagnosis
        assert settings is not None
        self.samples = dataclasses.replace(samples, ids=samples.ids[: settings.samples], batch_size=BATCH)
        self.variants = list(variants)
        self.is_complete = False
        self.swaps: dict[tuple[str, int], attribution.PrefixSwaps] = {}
        self._has_swaps = settings.prefix
        # All tasks, also those of other processes, share a folder, so file names begin with the task's number.
        prefix = f"{list(study.tasks).index(task)}-"
        self.pull_back = attribution.BackwardSweep(study.pool, task, variants, settings, store, prefix)

    def add(self, view: LayerView) -> None:
        """Keep the features of a view; views of other samples and variants are ignored."""
        if view.start >= len(self.samples) or view.variant not in self.variants:
            return
        self.pull_back.add(view)
        if self._has_swaps:
            new = attribution.PrefixSwaps(self.pull_back.batches[view.start], view.variant)
            self.swaps.setdefault((view.variant, view.start), new).add(view)

    def forget(self) -> None:
        """Remove all features."""
        self.is_complete = False
        self.swaps.clear()
        self.pull_back.clear()

    def walk(self, step: Callable[[int, str], None]) -> None:
        """Run the samples through all layers and keep their features; report each layer to `step`."""
        pool, task, samples = self.pull_back.pool, self.pull_back.task, self.samples
        num_layers = len(pool.chain.layers)
        for view in walk(pool, task, self.variants, samples.batches(), ids=samples.ids):
            step(view.layer.index - 1, f"forward, layer {view.layer.index} of {num_layers}")
            self.add(view)
        self.is_complete = True


@torch.no_grad()
def measure_task(
    study: Study,
    task: str,
    reporter: ProgressReporter,
    base: Mapping[int, Array] | None = None,
    traced: TracedFeatures | None = None,
) -> TaskResults:
    """Measure every diagnostic of every variant on the diagnosis samples of one task.

    Args:
        study: the models and samples.
        task: the task.
        reporter: receives progress.
        base: the base's drift [n] by layer if it is measured already.
        traced: keeps the features of the first samples, if half of the feature budget holds them.

    Raises:
        NumericsError: the drift differs from that of the models' own library, or of float64.
    """
    diagnosis, data = TaskResults(), study.tasks[task]
    samples, layers, stored = data.diagnosis, study.pool.chain.layers, study.settings.stored_layers
    budget = study.settings.feature_budget
    # As many whole batches at a time as the feature budget holds at one layer boundary, next to kept features.
    models = 1 + len(study.variants)
    per_sample = sample_cache_bytes(study.pool, expert_name(task), samples.load([0]), models)
    length = samples.num_in_budget(per_sample, budget if traced is None else budget // 2)
    if traced is not None:
        traced.forget()
        traced = traced if len(traced.samples) <= length else None
    # The models run in their own library first, on the same first batch, to compare the drift of every layer with.
    first = samples if traced is None else traced.samples
    library = LibraryDrift(study.pool, task, study.variants, first, budget, VERIFIED_SAMPLES)
    recorder = _record_drift(study, task, library, reporter, length, traced)
    diagnosis.features = recorder.features()
    # One task suffices: what lowers the precision is the same for all.
    if task == next(iter(study.tasks)):
        _check_precision(study, task, diagnosis)
    for (variant, index), (tokens, gates) in recorder.routing.items():
        of_layer = {"task": task, "variant": variant, "layer": index}
        for expert, (count, total) in enumerate(zip(tokens, gates, strict=True)):
            mean = total / count if count else math.nan
            diagnosis.tables["routing"].append(of_layer | {"expert": expert, "tokens": int(count), "gate_mean": mean})
    all_columns = recorder.columns()
    labels = samples.labels if samples.labels is not None else [None] * len(samples)
    identified = {"sample_id": list(samples.ids), "label": list(labels)}
    if "base" in study.variants:
        base = {index: all_columns["base", index]["drift_l2"] for index in stored}
    for variant in study.variants:
        for layer in (layer for layer in layers if layer.index in stored):
            seen = DiagnosticInput(
                diagnosis.features[variant, layer.index],
                diagnosis.features["expert", layer.index],
                all_columns[variant, layer.index],
                None if base is None else {"drift_l2": base[layer.index]},
                study.head(task, variant),
                data.head,
                samples.labels,
            )
            of_task: Row = {"task": task, "variant": variant}
            key = of_task | {"layer": layer.index}
            is_of: Row = {"role": layer.role, "stream": layer.stream}
            is_of |= {"path": layer.path, "n": len(samples), "reference": "expert"}
            row = key | is_of | {"closure_error": library.error[variant, layer.index]}
            diagnosis.tables["layers"].append(row | _measure_table_columns(study, "layers", seen))
            diagnosis.tables["samples"].append(key | identified | _measure_table_columns(study, "samples", seen))
            if layer is layers[-1] and data.head is not None:
                diagnosis.tables["outputs"].append(
                    of_task | identified | _measure_table_columns(study, "outputs", seen)
                )
    diagnosis.features = {key: array for key, array in diagnosis.features.items() if key[1] in stored}
    return diagnosis


def _record_drift(
    study: Study,
    task: str,
    library: LibraryDrift,
    reporter: ProgressReporter,
    length: int,
    traced: TracedFeatures | None,
) -> _DriftRecorder:
    """Run a task's samples through all layers, `length` at a time; check the first against the library's forward."""
    samples, num_layers = study.tasks[task].diagnosis, len(study.pool.chain.layers)
    meter = TaskProgress(reporter, "analyze", dict.fromkeys(study.tasks, num_layers), task)
    recorder = _DriftRecorder(study.settings.pool, study.variants[0], study.settings.active_diagnostics)
    first = 0 if traced is None else len(traced.samples)
    for start in range(0, len(samples), length):
        stop = min(start + length, len(samples))
        chunk: Iterable[Batch] = samples.batches(max(start, first), stop)
        if traced is not None and not start:
            chunk = itertools.chain(traced.samples.batches(), chunk)
        for view in walk(study.pool, task, study.variants, chunk, ids=samples.ids):
            # All variants of a layer follow each other; one of them counts the layers.
            if view.variant == study.variants[0]:
                index = view.layer.index
                meter.step(index - 1, f"layer {index} of {num_layers}")
            recorder.add(view)
            if view.start == 0:
                library.compare(view.layer, view.variant, view.merged_out, view.expert_out)
            if traced is not None:
                traced.add(view)
                if traced.pull_back.store.held > study.settings.feature_budget // 2:
                    traced.forget()
                    traced = None
    if traced is not None:
        traced.is_complete = True
    meter.finish()
    return recorder


def _check_precision(study: Study, task: str, diagnosis: TaskResults) -> None:
    try:
        diagnosis.precision_error = precision_error(study, task, diagnosis.features)
    except RuntimeError as error:
        # A model's code may require float32.
        reason = str(error).splitlines()[0]
        diagnosis.warnings.append(f"the drift could not be checked against float64: {reason}")
    except NumericsError as error:
        if not any(layer.num_experts for layer in study.pool.chain.layers):
            raise
        tie = "float64 may route tokens near a tie differently"
        diagnosis.warnings.append(f"{error.message}; in mixtures of experts, {tie}")


class _DriftRecorder:
    """Collects per-sample values and pooled features by variant and layer, in sample order."""

    def __init__(self, pool: Pool, first_variant: str, measured: Sequence[Diagnostic]) -> None:
        self._pool = pool
        # Several diagnostics share a function of a view, which is then called once.
        self._per_view = dict.fromkeys(entry.per_view for entry in measured if entry.per_view is not None)
        self._first_variant = first_variant
        self._names: dict[tuple[str, int], list[str]] = {}
        self._columns: defaultdict[tuple[str, int], list[Array]] = defaultdict(list)
        self._features: defaultdict[tuple[str, int], list[NDArray[np.float32]]] = defaultdict(list)
        self.routing: dict[tuple[str, int], Array] = {}

    def add(self, view: LayerView) -> None:
        key = (view.variant, view.layer.index)
        columns: dict[str, Tensor] = {}
        for look in self._per_view:
            columns |= look(view, self._pool)
        self._names[key] = list(columns)
        # Stacked, so that the host synchronizes with the device once per view.
        self._columns[key].append(torch.stack([*columns.values()]).cpu().double().numpy())
        self._add_model_features(key, view, view.merged_out, "merged")
        # The expert's features are the same in the views of all variants.
        if view.variant == self._first_variant:
            self._add_model_features(("expert", view.layer.index), view, view.expert_out, "expert")

    def _add_model_features(self, key: tuple[str, int], view: LayerView, state: State, model: str) -> None:
        """Add pooled features of a model and, for a mixture of experts, the tokens per expert."""
        vectors = view.layer.pool_state(state, view.side, self._pool)
        # A view of one token per sample would keep all tokens of every batch in memory, so copy.
        self._features[key].append(vectors.to("cpu", torch.float32, copy=True).numpy())
        if model in view.routes:
            mask = view.side.mask(view.layer.stream)
            counts = view.routes[model].expert_loads(view.layer.num_experts, mask)
            # In float64, so that the sums do not depend on the batch size.
            self.routing[key] = self.routing.get(key, np.zeros(())) + counts.cpu().double().numpy()

    def columns(self) -> dict[tuple[str, int], dict[str, Array]]:
        return {
            key: dict(zip(self._names[key], np.concatenate(parts, axis=1), strict=True))
            for key, parts in self._columns.items()
        }

    def features(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        return {key: np.concatenate(parts) for key, parts in self._features.items()}


def _measure_table_columns(study: Study, table: str, seen: DiagnosticInput) -> dict[str, Any]:
    """Return the columns of one table from all diagnostics that write to it."""
    columns: dict[str, Any] = {}
    shape = () if table == "layers" else (len(seen.variant),)
    for entry in study.settings.active_diagnostics:
        if entry.table == table:
            values = entry.measure(seen)
            names = {column.name for column in entry.columns} - columns.keys()
            wrong = {name: np.shape(value) for name, value in values.items() if np.shape(value) != shape}
            if wrong or not names >= values.keys():
                raise SpecError(
                    f"diagnostic {entry.name!r} returned {wrong or ', '.join(values)}; expected {shape} by {names}",
                    hint="Return values by column name: a number for `layers`, else one per sample.",
                )
            columns |= values
    return columns


def precision_error(study: Study, task: str, features: Mapping[tuple[str, int], NDArray[np.float32]]) -> float:
    """Return the largest relative error of the first variant's drift on the first samples, against a float64 pass.

    Args:
        study: the opened models and samples.
        task: whose diagnosis samples are read.
        features: pooled features [n, d] by (variant, layer).

    Returns:
        The error; NaN without drift, and for a run computed in float64.

    Raises:
        NumericsError: the error is larger than rounding.
    """
    if study.pool.dtype == torch.float64:
        return math.nan
    dtype = str(study.pool.dtype).removeprefix("torch.")
    samples, exact_pool = study.tasks[task].diagnosis, study.pool.in_float64()
    batches = list(samples.batches(0, min(VERIFIED_SAMPLES, len(samples))))
    worst = math.nan
    # One variant suffices: what lowers the precision is the same for all.
    for view in walk(exact_pool, task, study.variants[:1], batches):
        exact_merged, exact_expert = (
            view.layer.pool_state(state, view.side, study.settings.pool).cpu().double()
            for state in (view.merged_out, view.expert_out)
        )
        exact = (exact_merged - exact_expert).numpy()
        rows = slice(view.start, view.stop)
        merged, expert = (
            features[name, view.layer.index][rows].astype(np.float64) for name in (view.variant, "expert")
        )
        size, scale = np.linalg.norm(exact), np.linalg.norm(expert)
        if not size or not scale:
            continue
        error = float(np.linalg.norm(merged - expert - exact) / size)
        worst = error if math.isnan(worst) else max(worst, error)
        limit = closure_tolerance(dtype, float(size / scale))
        if error > limit:
            raise NumericsError(
                f"the drift of {view.variant} after layer {view.layer.index} ({view.layer.path}), task {task!r}, "
                f"differs from float64: relative error {error:.2g}, at most {limit:.1g} is rounding",
                hint="Products have a lower precision (TF32, bfloat16 or autocast in the model). Switch it off, or "
                "compute in float64.",
                layer=view.layer.index,
                task=task,
                precision_error=error,
                tolerance=limit,
            )
    return worst


@torch.no_grad()
def compute_attribution(
    study: Study,
    task: str,
    variants: Sequence[str],
    spill: Path,
    reporter: ProgressReporter,
    traced: TracedFeatures | None = None,
) -> TaskResults:
    """Attribute the final drift of variants to layers with averaged Jacobians.

    Args:
        study: models, samples and settings.
        task: whose first diagnosis samples are read.
        variants: names in the study's pool.
        spill: folder for features beyond the feature budget.
        reporter: receives progress.
        traced: features kept while the drift was measured; if it has none, the samples run through all layers again.
    """
    settings, explanation = study.settings.jacobian, TaskResults()
    assert settings is not None
    if not variants:
        return explanation
    num_layers = len(study.pool.chain.layers)
    with FeatureStore(study.settings.feature_budget, spill) as store:
        if traced is None or not traced.is_complete or {*traced.variants} != {*variants}:
            num_steps = 2 * num_layers
            traced = TracedFeatures(study, task, variants, store)
        else:
            num_steps = num_layers
        meter = TaskProgress(reporter, "explain", dict.fromkeys(study.tasks, num_steps), task)
        if not traced.is_complete:
            traced.walk(meter.step)
        ids, pull_back, swaps = list(traced.samples.ids), traced.pull_back, traced.swaps
        prefixes: dict[str, list[Tensor]] = defaultdict(list)
        for (variant, _), swap in swaps.items():
            prefixes[variant].append(swap.shares())
        # All targets of a variant are pulled back together: a layer's linearization is the costly part.
        targets = {variant: _attribution_targets(study, pull_back, variant) for variant in variants}
        try:
            parts = _pull_back_targets(
                pull_back, targets, lambda layer: meter.step(num_steps - layer.index, f"backward, layer {layer.index}")
            )
        except NotDifferentiableError as error:
            # Prefix swaps need no derivative and are kept.
            parts = {}
            explanation.notices.append(f"the drift is not attributed to layers: {error}")
    meter.finish()
    for variant in variants:
        energy = _concatenate_to_numpy(target.energy for target in targets[variant])
        rows: LayerRows = {index: {"jacobian_samples": len(ids)} for index in range(1, num_layers + 1)}
        for (name, index), sensitivity in pull_back.sensitivities.items():
            if parts and name == variant:
                rows[index] |= _sensitivity_columns(sensitivity)
        final_shares = np.full((num_layers, len(ids)), np.nan)
        if parts and settings.contributions:
            shares = parts[variant][:, 0]
            _add_share_columns(rows, "final_share", shares, energy)
            # Reported, never distributed over layers, so that shares and remainder sum to 1.
            rows[num_layers]["remainder_share"] = 1 - sum(row["final_share"] for row in rows.values())
            # Samples without drift keep NaN.
            np.divide(shares, energy, out=final_shares, where=energy > 0)
        if settings.prefix:
            _add_share_columns(rows, "prefix_share", _concatenate_to_numpy(prefixes[variant]), energy)
        for layer in sorted(study.settings.stored_layers):
            key = {"task": task, "variant": variant, "layer": layer}
            explanation.tables["layers"].append(key | rows[layer])
            explanation.tables["samples"].append(key | {"sample_id": ids, "final_share": final_shares[layer - 1]})
        explanation.warnings += _quadrature_warnings(settings, task, variant, rows)
        if parts and "adjoint" in study.settings.options:
            of_variant = {"task": task, "variant": variant}
            explanation.tables["adjoint"] += _adjoint_columns(of_variant, ids, targets[variant], parts[variant])
    return explanation


def _concatenate_to_numpy(parts: Iterable[Tensor]) -> NDArray[np.float64]:
    return torch.cat([*parts], dim=-1).cpu().double().numpy()


def _quadrature_warnings(
    settings: attribution.JacobianSettings, task: str, variant: str, rows: LayerRows
) -> Iterator[str]:
    """Yield a warning if the Jacobian quadrature misses its tolerance with all allowed nodes."""
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


def _add_share_columns(rows: LayerRows, column: str, shares: NDArray[np.float64], energy: NDArray[np.float64]) -> None:
    """Add shares of final drift, ratios of sums over samples, with intervals; NaN without drift."""
    total = float(energy.sum())
    low, high = bootstrap_ratio_ci(shares, energy)
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
class _AttributionTargets:
    """Scalar targets of one batch, such as squared drift, their changes [n], and their covectors."""

    energy: Tensor
    changes: dict[str, Tensor]
    covectors: State


def _attribution_targets(
    study: Study, pull_back: attribution.BackwardSweep, variant: str
) -> list[_AttributionTargets]:
    batches, stream = [*pull_back.batches.values()], study.pool.chain.layers[-1].stream
    ends = [pull_back.ends(batch, variant) for batch in batches]
    targets = []
    of_scores = _margin_and_loss_targets(study, pull_back, variant) if "adjoint" in study.settings.options else {}
    for number, (expert, merged) in enumerate(ends):
        drift = subtract_states(merged, expert)
        energy = inner_products(drift, drift)
        # The final drift is reported as a share of itself: 1 for every sample, undefined without drift.
        changes, covectors = {"final_drift": torch.where(energy > 0, 1.0, torch.nan)}, [drift]
        for name, of_batches in of_scores.items():
            changes[name] = of_batches[number].change
            # Scores depend on one stream of the state; the gradients of the others are zero.
            rest = {leaf: torch.zeros_like(value) for leaf, value in drift.items()}
            covectors.append(rest | {stream: of_batches[number].covector})
        targets.append(_AttributionTargets(energy, changes, stack_states(covectors)))
    return targets


def _margin_and_loss_targets(
    study: Study, pull_back: attribution.BackwardSweep, variant: str
) -> dict[str, list[attribution.AttributionTarget]]:
    """Return margin and loss targets by batch, if the task has a classification head."""
    task, stream = pull_back.task, study.pool.chain.layers[-1].stream
    head = study.head(task, variant)
    if head is None:
        return {}
    batches = [*pull_back.batches.values()]
    ends = [[state[stream] for state in pull_back.ends(batch, variant)] for batch in batches]
    # Scores are functions of pooled features. Pooling is linear, so covectors are pulled back through it exactly.
    pools = [partial(pool_features, how=study.settings.pool, mask=batch.side.mask(stream)) for batch in batches]
    pulled = [vjp(pool, expert)[:2] for pool, (expert, _) in zip(pools, ends, strict=True)]
    experts = torch.cat([expert for expert, _ in pulled])
    variants = torch.cat([pool(merged) for pool, (_, merged) in zip(pools, ends, strict=True)])
    whole = {"margin": attribution.margin_target(head, experts, variants)}
    if (labels := study.tasks[task].diagnosis.labels) is not None:
        rows = to_device(class_indices(head, labels[: len(experts)]), experts.device)
        whole["loss"] = attribution.loss_target(head, experts, variants, rows)
    sizes = [len(expert) for expert, _ in pulled]
    return {
        name: [
            attribution.AttributionTarget(pull(covector)[0], change)
            for (_, pull), covector, change in zip(
                pulled, torch.split(target.covector, sizes), torch.split(target.change, sizes), strict=True
            )
        ]
        for name, target in whole.items()
    }


def _pull_back_targets(
    pull_back: attribution.BackwardSweep,
    targets: Mapping[str, Sequence[_AttributionTargets]],
    on_layer: Callable[[Layer], None],
) -> dict[str, NDArray[np.float64]]:
    """Pull all targets back through all layers by vector-Jacobian products; return parts by layer, [L, k, n].

    The first target's parts, of the final drift, are in squared feature units.
    """
    covectors = {
        (start, variant): target.covectors
        for variant, of_batches in targets.items()
        for start, target in zip(pull_back.batches, of_batches, strict=True)
    }
    parts: dict[str, dict[int, list[Tensor]]] = {variant: defaultdict(list) for variant in targets}
    for step in pull_back.steps(covectors):
        layer = step.layer
        on_layer(layer)
        parts[step.variant][layer.index].append(step.parts())
    return {
        variant: np.stack([_concatenate_to_numpy(of_layers[index]) for index in sorted(of_layers)])
        for variant, of_layers in parts.items()
    }


def _adjoint_columns(
    key: Mapping[str, str],
    ids: Sequence[str],
    targets: Sequence[_AttributionTargets],
    parts: NDArray[np.float64],
) -> Iterator[dict[str, Any]]:
    """Yield columns of the `adjoint` table of a variant, by target and layer."""
    energy = _concatenate_to_numpy(target.energy for target in targets)
    for number, name in enumerate(targets[0].changes):
        change, of_layers = (
            _concatenate_to_numpy(target.changes[name] for target in targets),
            parts[:, number],
        )
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
