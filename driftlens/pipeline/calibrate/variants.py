"""The models that a calibration makes, written into the run and wherever else the user wants them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from driftlens.engine.pool import attachment_tensors
from driftlens.models.chain import LayerChain, ParameterKey
from driftlens.models.saving import Patched, fused, save_model, save_state_dict
from driftlens.models.sources import InDtypes, OnDemand, StateSource
from driftlens.pipeline.calibrate.plan import CalibrationPlan
from driftlens.pipeline.calibrate.walk import Solution
from driftlens.pipeline.study.opening import OpenModels
from driftlens.pipeline.study.study import Study
from driftlens.records.layout import calibration_attachments
from driftlens.records.manifest import CalibrationInfo
from driftlens.records.writer import RunWriter


@torch.no_grad()
def save_variants(
    writer: RunWriter,
    models: OpenModels,
    study: Study,
    plan: CalibrationPlan,
    solution: Solution,
    info: CalibrationInfo,
) -> None:
    """Write the calibrated model, and its control where there is one, in the base's key names and dtypes.

    Each file lands whole or not at all; its header repeats `info`.

    Raises:
        NumericsError: a solution overflows in the base's dtype.
        RunError: the disk is full.
    """
    pool = study.pool
    merged = pool.source(plan.kept or "merged")
    for variant, relative in plan.weights.items():
        parameters: Mapping[ParameterKey, Tensor] = solution.updates
        if variant == plan.control:
            rho = float(plan.hyperparameters["rho"])
            parameters = anchors(pool.chain, merged, pool.source("base"), rho, solution.updates)
        source = with_parameters(pool.chain, merged, study.like, parameters)
        with writer.file(relative) as path:
            save_model(
                models.architecture, models.own_form, source, path, metadata=weights_metadata(variant, info)
            )

    if solution.attachments:
        with writer.file(calibration_attachments(plan.name)) as path:
            save_state_dict(path, attachment_tensors(solution.attachments))


def weights_metadata(variant: str, info: CalibrationInfo) -> dict[str, str]:
    """What the header of a variant's weights says of it: all that repeating the calibration takes, but the models."""
    return {
        "variant": variant,
        "calibration_method": info.method,
        "calibration_parameters": json.dumps(dict(info.settings)),
        "calibration_preset": info.preset,
        "calibration_layers": json.dumps(list(info.layers)),
        "calibration_sites": json.dumps(list(info.sites)),
        "calibration_samples": json.dumps(dict(info.samples)),
        "calibration_sample_digests": json.dumps(dict(info.sample_digests)),
        "calibration_seed": json.dumps(info.seed),
    }


def with_parameters(
    chain: LayerChain, merged: StateSource, like: StateSource, parameters: Mapping[ParameterKey, Tensor]
) -> StateSource:
    """The merged model with some parameters replaced, in the dtypes of `like`.

    That is the base, or what stands for it: a merged model stored in fewer bits must not round the solution. The new
    values come in the layers' own layout, and are checked as `Patched` does it, when they are read.
    """
    start = InDtypes(merged, {key: header.dtype for key, header in like.headers.items()})
    return Patched(start, fused(chain, parameters, start))


def anchors(
    chain: LayerChain, merged: StateSource, base: StateSource, rho: float, keys: Collection[ParameterKey]
) -> OnDemand[ParameterKey]:
    """rho * merged + (1 - rho) * base (Eq. 11) for the given parameters, in float64.

    With these in place of the solution a calibration becomes its own control: what lambda = infinity would give.
    """

    def anchor(key: ParameterKey) -> Tensor:
        slot = chain.layers[key[0] - 1].parameters[key[1]]
        start, end = (source.read(slot.key, slot.rows).double() for source in (base, merged))
        return slot.own(rho * end + (1 - rho) * start)

    return OnDemand(keys, anchor)
