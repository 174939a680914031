"""Calibrators as estimators in the style of scikit-learn: settings in the constructor, `fit` on live modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from driftlens.calibration import featcal, residual
from driftlens.calibration.calibrator import Calibrator
from driftlens.config.requests import (
    FitRequest,
    LiveInputs,
    LiveSettings,
    Modules,
    fields_as_keywords,
)
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.sites import parameter_coverage, select_sites, tied_sites
from driftlens.engine.walk import check_closure
from driftlens.experiment.live import open_modules
from driftlens.models.chain import ParameterKey, updated_tensors
from driftlens.utils.devices import full_precision_matmul
from driftlens.utils.distributed import JobArguments, ProgressReporter, QuietJobArguments


class _FittableCalibrator(Calibrator):
    """A calibrator with a scikit-learn style `fit` on modules in memory.

    Attributes:
        model_: after `fit`, a calibrated copy of the merged module, in eval mode.
        history_: a frame with one row per calibrated module, columns as in the calibration table of a run.
        modules_: the paths of these modules, in forward order.
        notices_: notices on the sampling of data and on skipped modules.
    """

    @fields_as_keywords(request=FitRequest, around=QuietJobArguments)
    # In a caller's inference mode no gradient could be taken.
    @torch.inference_mode(False)
    @torch.no_grad()
    @full_precision_matmul()
    def fit(
        self,
        merged: nn.Module,
        base: nn.Module | None,
        experts: Mapping[str, nn.Module],
        data: Mapping[str, Any],
        request: FitRequest,
        around: JobArguments,
    ) -> Self:
        """Calibrate a copy of the merged model and return the estimator; no module is modified.

        Args:
            merged: the merged model.
            base: the common base; None without one, and then the anchor has to be the merged model (rho = 1).
            experts: one per task, of the same class and shape.
            data: calibration inputs per task: a tensor, Dataset, DataLoader or iterable of batches; labels are ignored.
            request: by keywords, the fields of `driftlens.config.requests.FitRequest`: layers, sites, n, seed, ...
            around: by keywords, the fields of `driftlens.utils.distributed.JobArguments`: device, cancel, ...

        Raises:
            SpecError: a setting is not allowed, or tasks of `experts` and `data` differ.
            NumericsError: the drift is not that of ordinary forward passes.
        """
        import pandas as pd

        self.check(has_base=base is not None)
        # With a tokenizer, answers may be shown.
        shown = None if request.tokenizer is None else data
        modules = Modules(merged, experts, data, base, calibration=shown, device=around.device)
        inputs = {name: getattr(request, name) for name in LiveInputs.model_fields}
        live = open_modules(modules, LiveSettings(**inputs, n_calibration=request.n))
        chain, reporter = live.pool.chain, ProgressReporter(around.on_progress, around.cancel)
        chosen = select_sites(chain, layers=request.layers, sites=request.sites, update=self.update)
        parts = {task: samples.calibration or samples.diagnosis for task, samples in live.tasks.items()}
        # The base is only read for its weights, so its drift is not checked.
        library = check_closure(
            live.pool, parts, ("merged",), CalibrationContext.feature_budget, request.closure_samples
        )
        context = CalibrationContext(
            live.pool,
            parts,
            chosen,
            base="base" if base is not None else None,
            on_step=lambda now: reporter.step("calibrate", now.done, now.total, now.label),
            library=library,
        )
        parameters: dict[ParameterKey, Tensor] = {}
        reports: list[dict[str, Any]] = []
        for layer in self.calibrate(context):
            parameters |= {(layer.layer, name): value for name, value in layer.updates.items()}
            reports += [{"layer": layer.layer, **vars(report)} for report in layer.reports]
        reporter.step("calibrate", max(chosen), max(chosen))
        source = live.pool.source("merged")
        self.model_ = copy.deepcopy(merged).eval()
        # A state dict refers to the parameters; writing into them keeps ties, devices and dtypes.
        state = self.model_.state_dict()
        for key, value in updated_tensors(chain, parameters, source).items():
            state[key].copy_(value)
        self.history_ = pd.DataFrame(reports).drop(columns="change")
        self.modules_ = tuple(dict.fromkeys(report["site"] for report in reports))
        share, text = parameter_coverage(chain, source, chosen, self.update)
        self.notices_ = live.notices
        if request.sites is None and (tied := ", ".join(tied_sites(chain))):
            self.notices_ += (f"not calibrated, as their weights are shared: {tied}",)
        if share < 1:
            self.notices_ += (f"only partly calibrated: {text}",)
        return self


class FeatCal(featcal.FeatCal, _FittableCalibrator):
    """FeatCal: closed-form feature calibration of a merged model (arXiv:2605.13030).

        fitted = dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3).fit(merged, base, {"cars": expert}, {"cars": loader})
        fitted.model_

    A run measures before and after, and keeps both: `dl.analyze(...)`, then `run.calibrate(dl.FeatCal(...), name=...)`.
    """


class ResidualCal(residual.ResidualCal, _FittableCalibrator):
    """Residual calibration: also corrects drift propagated from earlier modules, as held-out samples support."""
