"""Several processes, each with an accelerator of its own, of which gloo knows nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftlens as dl
from driftlens.base import devices
from driftlens.base.team import Team
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.cli import main
from driftlens.runs import layout
from tests.accelerator import NAME
from tests.accelerator.subjects import models, pool_on
from tests.calibration.helpers import ground, updates_of
from tests.team.processes import ended, said, same_weights, torchrun
from tests.team.threads import teamed
from tests.zoo.world import CLASSES, build, write_images

pytestmark = pytest.mark.slow


def test_a_process_takes_the_device_of_its_number(sim: torch.device) -> None:
    for rank, wanted in enumerate((1, 0, 1, 0), start=1):
        assert devices.use_device(rank) == torch.device(NAME, wanted)
        assert torch.ones(1, device=NAME).device.index == wanted


def test_sums_and_solutions_go_from_device_to_device(sim: torch.device) -> None:
    def work(team: Team) -> list[Tensor]:
        summed, shared, added = (
            torch.full((2, 3), 1.0 + team.rank, device=f"{NAME}:{team.rank}") for _ in range(3)
        )
        team.sum([summed], to=0)
        team.share([shared], of=1)
        team.add([added], of=1, to=0)
        return [summed, shared, added]

    found = teamed(2, work)
    assert [[float(value.mean()) for value in of] for of in found] == [[3.0, 2.0, 3.0], [2.0, 2.0, 2.0]]
    assert [{value.device.index for value in of} for of in found] == [{0}, {1}]


METHODS: dict[str, Calibrator] = {
    "featcal": FeatCal(),
    "residual": ResidualCal(folds=2, weights="uniform"),
    "block": ResidualCal(folds=2, order="block", mu=0.5),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_processes_with_a_device_each_find_what_one_finds(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, method: Calibrator
) -> None:
    """Each solves from moments on its own device, and none what another solves."""
    plain, solved = type(method).solve, dict[int, Counter[str]]()

    def solve(self: Calibrator, problem: Any) -> Any:
        weights = {name: value for name, value in problem.merged.items() if name.endswith(".weight")}
        [rank] = {value.device.index or 0 for value in weights.values()}
        moments = problem.moments if hasattr(problem, "moments") else problem.folds[0]
        own = {value.device for value in vars(moments).values() if isinstance(value, Tensor)}
        assert own == {value.device for value in weights.values()}
        solved.setdefault(rank, Counter()).update(weights.keys())
        return plain(self, problem)

    pools = [pool_on(models(), torch.device(NAME, rank)) for rank in range(2)]

    def walk(team: Team) -> dict[Any, Tensor]:
        return updates_of(method.calibrate(ground(models(), method.update, pool=pools[team.rank], team=team)))

    one = walk(Team())
    monkeypatch.setattr(type(method), "solve", solve)
    many = teamed(2, walk)
    weights = Counter(name for _, name in one if name.endswith(".weight"))
    assert sum(solved.values(), Counter()) == weights
    # Step by step there is one solve at a time, and whoever has it then is the first.
    assert len(solved) == (1 if method is METHODS["residual"] else 2)
    for rank, found in enumerate(many):
        assert found.keys() == one.keys() and {value.device.index for value in found.values()} == {rank}
        for name, value in one.items():
            # Residual calibration adds up float32 products task by task.
            assert (found[name].cpu() - value.cpu()).norm() <= 1e-4 * value.cpu().norm(), name


JOBS = {
    "featcal": ("--method", "featcal"),
    "residual": ("--method", "residual"),
    "auto": ("--method", "featcal", "--auto"),
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
    # In float32, residual calibration adds up rounded products task by task.
    spec["compute"] = {"dtype": "float64"}
    file, shared = folder / "run.yaml", folder / "shared"
    file.write_text(yaml.safe_dump(spec), encoding="utf-8")
    words = "analyze", str(file), "--out", str(shared), "--device", NAME
    job = torchrun(2, *words, module="tests.accelerator.worker")
    assert job.returncode == 0, said(job)
    with sdpa_kernel([SDPBackend.MATH]):
        alone = dl.analyze(spec, out=folder / "alone", device=NAME, progress="none").path
    measured = [
        pd.read_parquet(of / "tables/layers.parquet").query("variant == 'merged'") for of in (shared, alone)
    ]
    pd.testing.assert_frame_equal(*measured, check_exact=True)
    return shared, Path(alone)


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_a_job_of_processes_with_a_device_each(
    sim: torch.device, analyzed: tuple[Path, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    repair = "--name", "one", "--no-attribution", *options, "--device", NAME
    shared, alone = (shutil.copytree(of, tmp_path / of.name) for of in analyzed)
    codes, told = ended(2, "calibrate", str(shared), *repair, module="tests.accelerator.worker")
    assert codes == [0, 0], told
    with pytest.raises(SystemExit) as leaving:
        main(["calibrate", str(alone), *repair, "--progress", "none"])
    assert leaving.value.code == 0
    weights = (next((of / layout.calibration_folder("one")).glob("*.safetensors")) for of in (shared, alone))
    same_weights(*weights)
