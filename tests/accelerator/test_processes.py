"""Several processes, each with an accelerator of its own, give the numbers of one on the host."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftlens as dl
from driftlens.base import devices
from driftlens.runs.run import open_run
from tests.accelerator import NAME
from tests.pipeline.calibrating import copied
from tests.team.test_processes import torchrun
from tests.zoo.world import build

pytestmark = pytest.mark.slow


def test_a_process_takes_the_device_of_its_number(sim: torch.device) -> None:
    for rank, wanted in enumerate((0, 1, 0)):
        assert devices.use_device(rank) == torch.device(NAME, wanted)
        assert torch.ones(1, device=NAME).device.index == wanted


def test_two_processes_calibrate_on_two_devices(sim: torch.device, tmp_path: Path) -> None:
    spec = build(tmp_path / "models").spec(metrics={"jacobian": False}, compute={"device": "auto"})
    with sdpa_kernel([SDPBackend.MATH]):
        one = dl.analyze(spec, out=tmp_path / "one", device="cpu", progress="none")
        copied(one, tmp_path / "two")
        one.calibrate(dl.FeatCal(), name="f", device="cpu", progress="none", attribution=False)
    command = ["calibrate", str(tmp_path / "two"), "--name", "f", "--no-attribution", "--progress", "none"]
    job = torchrun(2, *command, module="tests.accelerator.worker")
    assert job.returncode == 0, job.stderr
    runs = open_run(tmp_path / "two"), open_run(tmp_path / "one")
    columns = ["layer", "variant", "drift_l2_mean"]
    pd.testing.assert_frame_equal(*(run.layers()[columns] for run in runs), rtol=1e-5)
    found, expected = (load_file(next(run.path.rglob("calibrations/**/*.safetensors"))) for run in runs)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
