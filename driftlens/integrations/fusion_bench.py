"""FeatCal, residual calibration and the other calibrators as a FusionBench method. Entry point: `DriftLensMethod`.

    method:
      _target_: driftlens.integrations.fusion_bench.DriftLensMethod
      method: residual
      merge: {_target_: fusion_bench.method.TaskArithmeticAlgorithm, scaling_factor: 0.3}
      samples: 64
      out: runs/fusion-bench

The pool needs `_pretrained_`, the experts, and a training set of images or tensors per expert; labels are not read.
`driftlens show` and `driftlens ui` open the run in `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from fusion_bench import BaseAlgorithm, BaseModelPool
from torch import Tensor, nn

import driftlens as dl
from driftlens.utils.errors import DataError

# Samples per task that measure drift. They follow the calibration samples: on those, drift would look too small.
DIAGNOSIS = 64


class DriftLensMethod(BaseAlgorithm):  # type: ignore[misc]
    """FusionBench method that merges a model pool by another method, calibrates the merge, and writes a run.

    Args:
        method: name of a calibrator, see `driftlens doctor --methods`.
        merge: the merging method, as an object or a mapping with `_target_`; Task Arithmetic at 0.3 by default. A
            pool with a model `_merged_` is not merged again.
        preset: name of settings of the calibrator.
        settings: settings of the calibrator, merged over the preset.
        samples: calibration samples per task, from the pool's training sets.
        out: the run directory, which must not exist.
        pool_features: pooling of final features (cls, mean, last), if the model does not define it.
    """

    def __init__(
        self,
        method: str = "residual",
        merge: Any = None,
        preset: str | None = None,
        settings: Mapping[str, Any] | None = None,
        samples: int = 64,
        out: str = "runs/fusion-bench",
        pool_features: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.method, self.merge, self.preset = method, merge, preset
        self.settings, self.samples, self.out = settings, samples, out
        self.pool_features = pool_features

    def run(self, modelpool: Any) -> nn.Module:
        """Merge and calibrate the models of a FusionBench pool; return the calibrated model."""
        pool = modelpool if isinstance(modelpool, BaseModelPool) else BaseModelPool(modelpool)
        base = pool.load_pretrained_model()
        experts = {name: pool.load_model(name) for name in pool.model_names}
        merged = self._load_or_merge_model(pool, base, experts)
        rows = {name: self._training_inputs(pool, name) for name in experts}
        run = dl.analyze(
            base=base,
            merged=merged,
            experts=experts,
            data={name: inputs[self.samples :] for name, inputs in rows.items()},
            out=Path(self.out),
            # Attribution of drift does not change the returned model.
            jacobian=False,
            pool=self.pool_features,
        )
        run = dl.calibrate(
            run,
            name=self.method,
            method=self.method,
            preset=self.preset,
            parameters=dict(self.settings or {}),
            samples=self.samples,
            data={name: inputs[: self.samples] for name, inputs in rows.items()},
        )
        repaired = deepcopy(merged)
        repaired.load_state_dict(run.calibrated_state(self.method), strict=False)
        return repaired

    def _load_or_merge_model(self, pool: Any, base: nn.Module, experts: Mapping[str, nn.Module]) -> nn.Module:
        if getattr(pool, "has_merged", False):
            return pool.load_model("_merged_")
        if self.merge is not None:
            from hydra.utils import instantiate

            method = self.merge if isinstance(self.merge, BaseAlgorithm) else instantiate(self.merge)
            return method.run(pool)
        merged, start = deepcopy(base), base.state_dict()
        # Integer buffers, such as position ids, can't be averaged.
        weights = {
            key: value + 0.3 * sum(expert.state_dict()[key] - value for expert in experts.values())
            if value.is_floating_point()
            else value
            for key, value in start.items()
        }
        merged.load_state_dict(weights)
        return merged

    def _training_inputs(self, pool: Any, name: str) -> Tensor:
        """Return the model inputs of the first samples of a task's training set, [n, ...]."""
        data = pool.load_train_dataset(name)
        count = min(self.samples + DIAGNOSIS, len(data))
        if len(data) <= self.samples:
            raise DataError(
                f"the training set of {name} has {len(data)} samples; expected more than `samples` ({self.samples})",
                hint="Lower `samples`.",
            )
        processor = pool.load_processor() if hasattr(pool, "load_processor") else None
        return torch.stack([_model_input_of_sample(data[index], processor) for index in range(count)])


def _model_input_of_sample(sample: Any, processor: Any) -> Any:
    """Return the model input of one sample; images are preprocessed by the pool's processor."""
    if isinstance(sample, Mapping):
        sample = next((sample[key] for key in ("pixel_values", "image", "img") if key in sample), sample)
    if isinstance(sample, tuple | list):
        sample = sample[0]
    if not isinstance(sample, Tensor) and processor is not None:
        sample = processor(images=[sample], return_tensors="pt")["pixel_values"][0]
    return sample
