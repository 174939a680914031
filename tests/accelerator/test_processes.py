"""Several processes, each with an accelerator of its own, of which gloo knows nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftlens as dl
from driftlens.cli import main
from driftlens.runs.manifest import calibration_folder
from driftlens.utils import devices
from tests.accelerator import NAME
from tests.distributed.processes import ended, said, torchrun
from tests.quick import few
from tests.zoo.world import CLASSES, build, write_images

pytestmark = pytest.mark.slow


def test_a_process_takes_the_device_of_its_number(sim: torch.device) -> None:
    for rank, wanted in enumerate((1, 0, 1, 0), start=1):
        devices.set_process_device(rank)
        assert torch.ones(1, device=NAME).device.index == wanted


JOBS = {
    "featcal": ("--method", "featcal"),
    "residual": ("--method", "residual"),
}


@pytest.fixture(scope="module")
def analyzed(pretended: torch.device, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two processes with a device each, started by torchrun, and one of this process."""
    folder = tmp_path_factory.mktemp("analyzed")
    world = build(folder / "models")
    for seed, task in enumerate(world.tasks):
        write_images(world.data(task), CLASSES[task], seed, train=9)
    spec = world.spec(metrics={"jacobian": False})
    spec["data"]["defaults"]["n"] = 8
    file, shared = folder / "run.yaml", folder / "shared"
    file.write_text(yaml.safe_dump(spec), encoding="utf-8")
    words = "analyze", str(file), "--out", str(shared), "--device", NAME
    job = torchrun(2, *words, module="tests.accelerator.worker")
    assert job.returncode == 0, said(job)
    with sdpa_kernel([SDPBackend.MATH]):
        alone = dl.analyze(spec, out=folder / "alone", device=NAME, progress="none").path
    measured = [pd.read_parquet(of / "tables/layers.parquet").query("variant == 'merged'") for of in (shared, alone)]
    pd.testing.assert_frame_equal(*measured, check_exact=True)
    return shared, Path(alone)


@pytest.mark.parametrize("job", few(JOBS, (), some=["residual"]))
def test_a_job_of_processes_with_a_device_each(
    sim: torch.device, analyzed: tuple[Path, Path], tmp_path: Path, job: str
) -> None:
    repair = "--name", "one", "--no-attribution", *JOBS[job], "--device", NAME
    shared, alone = (shutil.copytree(of, tmp_path / of.name) for of in analyzed)
    codes, told = ended(2, "calibrate", str(shared), *repair, module="tests.accelerator.worker")
    assert codes == [0, 0], told
    with pytest.raises(SystemExit) as leaving:
        main(["--progress", "none", "calibrate", str(alone), *repair])
    assert leaving.value.code == 0
    weights = (next((of / calibration_folder("one")).glob("*.safetensors")) for of in (shared, alone))
    ours, theirs = map(load_file, weights)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
