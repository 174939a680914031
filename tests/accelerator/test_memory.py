"""Too little memory for a batch halves the batches, and the numbers stay; too little for one sample is told."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import driftlens as dl
from driftlens.base import devices
from driftlens.base.errors import RunError
from driftlens.runs.run import open_run
from tests.accelerator import turn
from tests.zoo.world import build

pytestmark = pytest.mark.slow


def test_batches_are_halved_until_they_fit(sim: torch.device, tmp_path: Path) -> None:
    world = build(tmp_path / "models")

    def run(name: str, batch_size: int, limit: int = -1) -> Any:
        gc.collect()
        turn(limit=limit)
        devices.reset_peak_memory(sim)
        spec = world.one_task(metrics={"jacobian": False})
        spec["data"]["defaults"] = {"n": 4, "n_diagnosis": 8, "batch_size": batch_size}
        return dl.analyze(spec, out=tmp_path / name, device="sim", progress="none")

    wide = run("wide", 8)
    peaks = {name: pd.read_parquet(tmp_path / name / "tables/resources.parquet") for name in ("wide",)}
    narrow = run("narrow", 2)
    peaks["narrow"] = pd.read_parquet(narrow.path / "tables/resources.parquet")
    high, low = (int(peaks[name]["peak_gpu_bytes"].max()) for name in ("wide", "narrow"))
    assert high > low
    halved = run("halved", 8, (high + low) // 2)
    told = [text for text in halved.manifest.notices if "too little memory" in text]
    assert told and all("goes on with batches of" in text for text in told)
    for found in (wide, narrow):
        pd.testing.assert_frame_equal(
            halved.layers()[["layer", "variant", "drift_l2_mean"]],
            found.layers()[["layer", "variant", "drift_l2_mean"]],
            rtol=1e-5,
        )
    with pytest.raises(RunError, match="too little memory to analyze here") as caught:
        run("none", 2, low // 4)
    assert "--resume" in caught.value.hint and open_run(tmp_path / "none").status.state == "failed"
