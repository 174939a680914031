"""The models that calibrations are tried on."""

from __future__ import annotations

import functools

import torch

from driftlens.engine.pool import ModelPool
from tests.calibration.helpers import Subject, subject


@functools.cache
def models() -> Subject:
    return subject("open_clip_vit")


def pool_on(models: Subject, device: torch.device) -> ModelPool:
    """The same models in float32."""
    sources = {name: models.pool.source(name) for name in models.pool.names}
    return ModelPool(models.pool.chain, models.modules["base"], sources, device=device, dtype=torch.float32)
