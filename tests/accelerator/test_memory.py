"""Too little memory for a batch halves the batches, for moments moves them to the host, and the numbers stay.

Where it is too little for one sample that is told, and the run goes on from there.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import driftlens as dl
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.data.samples import halve_batch_on_oom
from driftlens.engine import walk
from driftlens.runs.run import open_run
from driftlens.utils import devices
from driftlens.utils.errors import RunError
from tests.accelerator import turn
from tests.accelerator.subjects import models, pool_on
from tests.calibration.helpers import batched, context, given, updates_of
from tests.zoo.world import build

pytestmark = pytest.mark.slow


def test_batches_are_halved_until_they_fit(sim: torch.device, tmp_path: Path) -> None:
    world = build(tmp_path / "models")

    def run(name: str, batch_size: int, limit: int = -1, **options: Any) -> Any:
        gc.collect()
        turn(limit=limit)
        devices.reset_peak_memory(sim)
        spec = world.one_task(metrics={"jacobian": False})
        spec["data"]["defaults"] = {"n": 4, "n_diagnosis": 8, "batch_size": batch_size}
        return dl.analyze(spec, out=tmp_path / name, device="sim", progress="none", **options)

    wide = run("wide", 8)
    narrow = run("narrow", 2)
    peaks = [pd.read_parquet(found.path / "tables/resources.parquet") for found in (wide, narrow)]
    high, low = (int(table["peak_gpu_bytes"].max()) for table in peaks)
    assert high > low
    halved = run("halved", 8, (high + low) // 2)
    told = [text for text in halved.manifest.notices if "too little memory" in text]
    assert told and all("continuing with batches of" in text for text in told)
    for found in (wide, narrow):
        pd.testing.assert_frame_equal(
            halved.layers()[["layer", "variant", "drift_l2_mean"]],
            found.layers()[["layer", "variant", "drift_l2_mean"]],
            rtol=1e-5,
        )
    with pytest.raises(RunError, match="too little memory to analyze here") as caught:
        run("none", 2, low // 4)
    assert "--resume" in caught.value.hint and open_run(tmp_path / "none").status.state == "failed"
    pd.testing.assert_frame_equal(run("none", 2, resume=True).layers(), narrow.layers())


def solved(method: Calibrator, sim: torch.device, limit: int = -1) -> tuple[dict[Any, Tensor], list[str], int]:
    """What is solved for within so many bytes, what was told on the way, and how many were in use."""
    gc.collect()
    turn(limit=limit)
    devices.reset_peak_memory(sim)
    updates: dict[Any, Tensor] = {}
    told: list[str] = []

    def work() -> None:
        on = context(models(), method.update, pool=pool_on(models(), sim), parts=models().samples(1))
        updates.update({name: value.cpu() for name, value in updates_of(method.calibrate(on)).items()})

    with halve_batch_on_oom(1, told.append, sums=True) as done:
        done(work)
    return updates, told, devices.peak_memory(sim) or 0


METHODS: dict[str, Calibrator] = {"featcal": FeatCal(), "residual": ResidualCal(folds=2, mu=0.5)}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_moments_that_have_no_room_are_kept_on_the_host(sim: torch.device, method: Calibrator) -> None:
    expected, told, high = solved(method, sim)
    assert not told
    with devices.offload_moments() as move:
        move()
        _, _, low = solved(method, sim)
    assert low < high
    found, told, peak = solved(method, sim, (low + high) // 2)
    assert told == ["moments and solves on the host"] and peak <= (low + high) // 2
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_features_that_have_no_room_wait_on_the_host(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(200, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    parts = {"a": given(batched(inputs, 2))}

    def peak(limit: int = -1) -> tuple[dict[Any, Tensor], int]:
        gc.collect()
        turn(limit=limit)
        devices.reset_peak_memory(sim)
        on = context(models(), pool=pool_on(models(), sim), parts=parts)
        updates = {name: value.cpu() for name, value in updates_of(FeatCal().calibrate(on)).items()}
        return updates, devices.peak_memory(sim) or 0

    expected, high = peak()
    with monkeypatch.context() as patch:
        patch.setattr(walk, "device_memory", lambda device: (0, 0))
        low = peak()[1]
    assert low < 0.8 * high
    found, most = peak((low + high) // 2)  # an error would tell of halved batches
    assert low < most <= (low + high) // 2
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
