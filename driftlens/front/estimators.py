"""Calibrators as estimators, in the manner of scikit-learn: settings in the constructor, `fit` on live modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from driftlens.base.progress import CancelToken, ProgressSink, Reporter
from driftlens.calibration import featcal, residual
from driftlens.calibration.calibrator import Calibrator
from driftlens.engine.calibrating import Ground
from driftlens.engine.exactness import exact_products
from driftlens.engine.problems import SiteReport
from driftlens.engine.site_selection import coverage, select_sites, tied_sites
from driftlens.jobs.analyze.diagnosis import check_closure
from driftlens.jobs.analyze.live import live_study
from driftlens.jobs.calibrate.walk import history_rows
from driftlens.models.chain import ParameterKey
from driftlens.models.frames import Mask
from driftlens.models.saving import fused


class Fitting(Calibrator):
    """Adds `fit` to a calibrator.

    Attributes:
        model_: after `fit`, a calibrated copy of the merged module, in eval mode.
        history_: a frame with one row per calibrated module, columns as in the calibration table of a run.
        modules_: the paths of these modules, in forward order.
        notices_: what the user should know: how samples were drawn, what was left out.
    """

    @torch.no_grad()
    @exact_products()
    def fit(
        self,
        merged: nn.Module,
        base: nn.Module | None,
        experts: Mapping[str, nn.Module],
        data: Mapping[str, Any],
        *,
        layers: Sequence[str | int] | None = None,
        sites: Sequence[str] | None = None,
        blocks: str | None = None,
        mask: Mask = None,
        n: int | None = 256,
        seed: int = 0,
        batch_size: int = 32,
        device: str | torch.device | None = None,
        tokenizer: Any = None,
        texts: Mapping[str, Mapping[str, Any]] | None = None,
        on_progress: ProgressSink | None = None,
        cancel: CancelToken | None = None,
    ) -> Self:
        """The estimator itself, after calibrating a copy of a live merged module; no module is modified.

        No file is read or written.

        Args:
            merged: the merged model.
            base: the common base; None without one, and then the anchor has to be the merged model (rho = 1).
            experts: one per task, of the same class and shape.
            data: calibration inputs per task: a tensor, Dataset, DataLoader or iterable of batches; labels are ignored.
            layers: which layers, by pattern or index; all blocks if left out.
            sites: patterns on module paths; linear and norm modules inside blocks if left out.
            blocks: path of the list of blocks, or a pattern of the blocks' own paths (`layer?`), where they can't be
                found by themselves.
            mask: which tokens count, as for `driftlens.jobs.analyze.live.live_study`; padding weighs nothing.
            n: samples per task, drawn at random; None takes all.
            seed: of the samples drawn.
            batch_size: samples per forward pass.
            device: where it is computed; the merged model's own device by default.
            tokenizer: of language models, whose `data` are rows of text then, as for `live_study`.
            texts: per task what its `data` entry in a spec would say of texts.
            on_progress: called with every `ProgressEvent`.
            cancel: asked once per batch whether to stop.

        Raises:
            SpecError: a setting that can't be, or tasks of `experts` and `data` differ.
            NumericsError: the drift is not that of ordinary forward passes; nothing is solved then.
            DriftLensError: see the tree in `driftlens.base.errors`.
        """
        import pandas as pd

        self.check(has_base=base is not None)
        study = live_study(
            merged=merged,
            experts=experts,
            data=data,
            base=base,
            blocks=blocks,
            mask=mask,
            n=n,
            seed=seed,
            batch_size=batch_size,
            device=device,
            tokenizer=tokenizer,
            texts=texts,
            calibration=None if tokenizer is None else data,  # answers may be shown
            n_calibration=n,
        )
        chain, reporter = study.pool.chain, Reporter(on_progress, cancel)
        chosen = select_sites(chain, layers=layers, sites=sites, update=self.update)
        check_closure(study)
        updates: dict[ParameterKey, torch.Tensor] = {}
        reports: list[tuple[int, SiteReport]] = []
        ground = Ground(
            study.pool,
            {task: [at_hand.calibration or at_hand.diagnosis] for task, at_hand in study.tasks.items()},
            chosen,
            base="base" if base is not None else None,
            feature_budget=study.settings.feature_budget,
            on_step=lambda now: reporter.step("calibrate", now.done, now.total, now.label),
        )
        for layer in self.calibrate(ground):
            updates |= {(layer.layer, name): value for name, value in layer.updates.items()}
            reports += [(layer.layer, report) for report in layer.reports]
        reporter.step("calibrate", max(chosen), max(chosen))
        model = copy.deepcopy(merged).eval()
        state = model.state_dict()  # references: writing into them keeps ties, devices and dtypes
        for key, value in fused(chain, updates, study.pool.source("merged")).items():
            state[key].copy_(value)
        self.model_, self.history_ = model, pd.DataFrame(history_rows("", reports)).drop(columns="name")
        self.modules_ = tuple(dict.fromkeys(report.site for _, report in reports))
        self.notices_ = study.notices
        if (tied := tied_sites(chain)) and sites is None:
            self.notices_ += (
                f"left as they are, because their weights serve other places too: {', '.join(tied)}",
            )
        share, text = coverage(chain, study.pool.source("merged"), chosen, self.update)
        self.notices_ += (f"only a part is calibrated: {text}",) if share < 1 else ()
        return self


class FeatCal(featcal.FeatCal, Fitting):
    """Closed-form feature calibration of a merged model (arXiv:2605.13030); settings as in the base class.

        fitted = dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3).fit(merged, base, {"cars": expert}, {"cars": loader})
        fitted.model_

    A run measures before and after, and keeps both: `dl.analyze(...)`, then `run.calibrate(dl.FeatCal(...), name=...)`.
    """


class ResidualCal(residual.ResidualCal, Fitting):
    """Calibration that also repairs what earlier modules left, as far as held-out samples bear it.

    Settings as in the base class, and used like `FeatCal`.
    """
