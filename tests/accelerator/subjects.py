"""The models that calibrations are tried on, and what of two runs is to be equal."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.engine.pool import ModelPool
from tests.calibration.helpers import Subject, subject


@functools.cache
def models() -> Subject:
    return subject("open_clip_vit")


def pool_on(models: Subject, device: torch.device, dtype: torch.dtype = torch.float32) -> ModelPool:
    """The same models, in float32 unless another dtype is named."""
    sources = {name: models.pool.source(name) for name in models.pool.names}
    return ModelPool(models.pool.chain, models.modules["base"], sources, device=device, dtype=dtype)


def small(name: str) -> Calibrator:
    """A calibrator with little to do."""
    few = {"steps": 2, "epochs": 1, "folds": 2, "mu": 0.5}
    known = calibrators[name].__init__.__annotations__
    return calibrators[name](**{key: value for key, value in few.items() if key in known})


def same(found: Tensor, expected: Tensor) -> bool:
    """Of one dtype and shape, every number equal or not a number on both sides."""
    return found.dtype == expected.dtype and torch.equal(found.cpu().nan_to_num(), expected.nan_to_num())


def tables(run: Path) -> dict[str, pd.DataFrame]:
    """All of a run but what was used."""
    files = sorted((run / "tables").glob("*.parquet"))
    tables = {file.stem: pd.read_parquet(file) for file in files if file.stem != "resources"}
    return {name: table.drop(columns="seconds", errors="ignore") for name, table in tables.items()}
