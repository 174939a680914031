"""What an analysis holds its own drift against: the models' own forward pass, and float64.

Both are measured on a few samples, and both stop the work: numbers that follow from a model taken apart wrongly, or
from products of eight bits, are worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from driftlens.data.samples import Batch
from driftlens.engine.walk import LayerView, on_device, walk
from driftlens.errors import NumericsError
from driftlens.linalg.state import norm, subtract
from driftlens.models.chain import Layer, State, pooled
from driftlens.pipeline.study.study import Study
from driftlens.variants import expert_of

if TYPE_CHECKING:
    import pandas as pd

VERIFIED_SAMPLES = 2
"""Samples of the first task whose drift is computed once more in float64."""

_RELATIVE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""How far two ways to compute one drift may be apart, relative to it: orders above what either dtype rounds."""

_ROUNDING = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The same relative to the features. Drift is their difference, so it inherits rounding of their size, some tens of
machine epsilons after many layers; where models hardly differ, that is all there is to see."""


def tolerance(dtype: str, drift_rel: float) -> float:
    """The largest error, relative to the drift, that rounding explains.

    Args:
        dtype: in which features are computed.
        drift_rel: size of the drift relative to the features.
    """
    return _RELATIVE[dtype] + _ROUNDING[dtype] / drift_rel


class LibraryDrift:
    """Drift of one batch as the models' own library gives it, to hold the walk's drift against.

    Attributes:
        error: |e - e_library| / |e| by variant and layer; NaN where there is no drift.
    """

    def __init__(self, study: Study, task: str, batch: Batch) -> None:
        pool = study.pool
        inputs = on_device(batch.inputs, pool.device, pool.dtype)
        expert = pool.library_states(expert_of(task), inputs)
        self._dtype = str(pool.dtype).removeprefix("torch.")
        self._drift: dict[str, list[State]] = {
            variant: [
                subtract(*pair)
                for pair in zip(pool.library_states(variant, inputs, task), expert, strict=True)
            ]
            for variant in study.variants
        }
        self.error: dict[tuple[str, int], float] = {}

    def compare(self, view: LayerView) -> None:
        """Keep the closure error of the first batch.

        Raises:
            NumericsError: it is larger than rounding explains.
        """
        if view.start != 0:
            return
        ours = subtract(view.merged_out, view.expert_out)
        theirs = self._drift[view.variant][view.layer.index - 1]
        size, features = float(norm(ours).sum()), float(norm(view.expert_out).sum())
        difference = float(norm(subtract(ours, theirs)).sum())
        error = self.error[view.variant, view.layer.index] = difference / size if size > 0 else math.nan
        # Where the walk sees no drift at all, the library must see none either.
        limit = tolerance(self._dtype, size / features) if size > 0 and features > 0 else 0.0
        if error > limit or (size == 0 and difference > _ROUNDING[self._dtype] * features):
            raise _broken(view.layer.index, view.layer.path, view.task, view.variant, error, limit)


def require_closed(layers: pd.DataFrame, dtype: str) -> None:
    """Refuse a run whose drift is not that of ordinary forward passes.

    Args:
        layers: rows of its layer table, with `closure_error` and `drift_rel`.
        dtype: in which its features were computed, as the manifest says.

    Raises:
        NumericsError: names layer, task, error and tolerance.
    """
    for row in layers.to_dict("records"):
        error, drift = row["closure_error"], row["drift_rel"]
        if error > 0 and drift > 0 and error > tolerance(dtype, drift):  # false for NaN: nothing was measured
            limit = tolerance(dtype, drift)
            raise _broken(row["layer"], row["path"], row["task"], row["variant"], error, limit)


def check_closure(study: Study) -> None:
    """Compare one batch of every task with the library's own forward pass, before anything is built on the drift.

    Raises:
        NumericsError: a layer's drift is not that of ordinary forward passes.
    """
    for task, at_hand in study.tasks.items():
        first = next(at_hand.diagnosis.batches())
        library = LibraryDrift(study, task, first)
        for view in walk(study.pool, task, study.variants, [first], ids=at_hand.diagnosis.ids):
            library.compare(view)


def _broken(layer: int, path: str, task: str, variant: str, error: float, limit: float) -> NumericsError:
    return NumericsError(
        f"the drift of {variant} behind layer {layer} ({path}), task {task!r}, is not that of ordinary forward passes: "
        f"closure error {error:.2g}, at most {limit:.1g} is rounding",
        hint="The layers taken apart are not the model: its blocks may hand on more than features, or the mask leave "
        "out tokens that others read. Pass blocks= another list or mask=, or wrap the model.",
        layer=layer,
        task=task,
        variant=variant,
        closure_error=error,
        tolerance=limit,
    )


def precision_error(
    study: Study, task: str, features: Mapping[tuple[str, int], NDArray[np.float32]]
) -> float:
    """Largest relative error of the pooled drift of the first samples against float64, over variants and layers.

    The float64 pass reads the same weights and shares no product with the run, so that products of fewer bits show,
    however they came to be chosen. NaN where there is no drift, and for a run that is computed in float64.

    Args:
        study: whose models are computed once more.
        task: whose samples.
        features: pooled features of the run [n, d] by (variant, layer), the expert's among them.

    Raises:
        NumericsError: the run's drift is further off than its dtype rounds.
    """
    if study.pool.dtype == torch.float64:
        return math.nan
    dtype = str(study.pool.dtype).removeprefix("torch.")
    first = study.tasks[task].diagnosis.batches(0, min(VERIFIED_SAMPLES, len(study.tasks[task].diagnosis)))
    worst = math.nan
    for view in walk(study.pool.in_float64(), task, study.variants, first):
        rows = slice(view.start, view.stop)
        found, expert = (
            features[name, view.layer.index][rows].astype(np.float64) for name in (view.variant, "expert")
        )
        exact = _pooled(study, view, view.merged_out) - _pooled(study, view, view.expert_out)
        size, scale = np.linalg.norm(exact), np.linalg.norm(expert)
        if not size or not scale:
            continue
        error = float(np.linalg.norm(found - expert - exact) / size)
        worst = error if math.isnan(worst) else max(worst, error)
        limit = tolerance(dtype, float(size / scale))
        if error > limit:
            raise _imprecise(view.layer, task, view.variant, error, limit)
    return worst


def _pooled(study: Study, view: LayerView, state: State) -> NDArray[np.float64]:
    stream = view.layer.stream
    vectors: torch.Tensor = pooled(state[stream], study.settings.pool, view.side.mask(stream))
    return vectors.double().cpu().numpy()


def _imprecise(layer: Layer, task: str, variant: str, error: float, limit: float) -> NumericsError:
    return NumericsError(
        f"the drift of {variant} behind layer {layer.index} ({layer.path}), task {task!r}, is {error:.2g} off that "
        f"computed in float64; at most {limit:.1g} is rounding",
        hint="Something computes products in fewer bits than the features have: TF32, bfloat16 or autocast inside the "
        "model. Switch it off, or compute in float64.",
        layer=layer.index,
        task=task,
        precision_error=error,
        tolerance=limit,
    )
