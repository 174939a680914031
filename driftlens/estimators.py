"""Calibrators as estimators, in the manner of scikit-learn: settings in the constructor, `fit` on live modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from driftlens.calibration import featcal
from driftlens.pipeline.calibrate.live import fit_modules


class FeatCal(featcal.FeatCal):
    """Closed-form feature calibration of a merged model (arXiv:2605.13030); settings as in the base class.

        fitted = dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3).fit(merged, base, {"cars": expert}, {"cars": loader})
        fitted.model_

    Attributes:
        model_: after `fit`, a calibrated copy of the merged module.
        history_: a frame with one row per calibrated module.
        modules_: the paths of these modules.
    """

    def fit(
        self,
        merged: nn.Module,
        base: nn.Module | None,
        experts: Mapping[str, nn.Module],
        data: Mapping[str, Any],
        **options: Any,
    ) -> Self:
        """The estimator itself, after calibrating a copy of a live merged module; no module is modified.

        Args:
            merged: the merged model.
            base: the common base; None without one, and then rho must be 1.
            experts: one per task.
            data: calibration inputs per task: a tensor, Dataset, DataLoader or iterable of batches.
            **options: those of `driftlens.pipeline.calibrate.live.fit_modules` (layers, sites, blocks, n, ...).

        Raises:
            DriftLensError: see the tree in `driftlens.errors`.
        """
        fitted = fit_modules(self, merged, base, experts, data, **options)
        self.model_, self.history_, self.modules_ = fitted.model, fitted.history, fitted.modules
        self.notices_ = fitted.notices
        return self
