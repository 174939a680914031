"""Run under torchrun: calibrations by all processes are bit-identical to those of one, which each computes too."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.utils.devices import full_precision_matmul
from driftlens.utils.distributed import ALONE, ProcessGroup, join_process_group
from tests.zoo import mixtures
from tests.zoo.cases import Case, perturbed, pool_of
from tests.zoo.solvable import WORLDS

TASKS = ("a", "b", "c")
METHODS: dict[str, tuple[str, Calibrator]] = {
    "featcal": ("open_clip_vit", FeatCal()),
    "streams": ("t5", FeatCal(update=["linear", "bias"])),  # keys and values of one stream in many layers
    "mixture": ("Mixtral", FeatCal(update=["linear"])),
    "residual": ("open_clip_vit", ResidualCal(folds=2)),
    "metric": ("open_clip_vit", ResidualCal(folds=2, mu=0.9, order="block")),
    "experts": ("Mixtral", ResidualCal(weights="uniform", cv="off")),
}


def models(case: Case) -> dict[str, nn.Module]:
    base = case.build().eval()
    experts = {f"expert:{task}": perturbed(base, seed) for seed, task in enumerate(TASKS, start=1)}
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(dict(e.named_parameters())[name] for e in experts.values()) / len(experts))
    return {"base": base, "merged": merged, **experts}


def samples(case: Case) -> Mapping[str, InMemoryBatches]:
    """Of every task other ones, in one to three batches of unequal sizes."""
    generator = torch.Generator().manual_seed(3)
    batches: dict[str, list[Batch]] = {}
    for number, task in enumerate(TASKS, start=1):
        sizes = [4, 3, 2][:number]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        batches[task] = [
            Batch(start, start + size, case.inputs(generator, size)) for start, size in zip(starts, sizes, strict=True)
        ]
    return {task: InMemoryBatches(lambda task=task: batches[task]) for task in TASKS}  # type: ignore[misc]


def calibrated(world: str, calibrator: Calibrator, team: ProcessGroup, *, num_done: int = 0) -> list[CalibratedLayer]:
    case = WORLDS[world].case if world in WORLDS else mixtures.case(world)
    pool = pool_of(case, models(case))
    sites = select_sites(pool.chain, update=calibrator.update)
    done = {}
    if num_done:
        done = {layer.layer: layer.updates for layer in calibrated(world, calibrator, ALONE)[:num_done]}
    return list(calibrator.calibrate(CalibrationContext(pool, samples(case), sites, team=team, done=done)))


def compare(ours: Sequence[CalibratedLayer], theirs: Sequence[CalibratedLayer]) -> int:
    """Insist on equal layers; return how many tensors were compared."""
    count = 0
    assert [layer.layer for layer in ours] == [layer.layer for layer in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.updates.keys() == other.updates.keys()
        for name, value in other.updates.items():
            assert torch.equal(mine.updates[name], value), (mine.layer, name)
            count += 1
        assert mine.drift_l2_mean == other.drift_l2_mean
        assert list(mine.drift_l2_mean) == list(other.drift_l2_mean)
        assert [report.site for report in mine.reports] == [report.site for report in other.reports]
        for name in ("objective_before", "objective_after", "task_weight_sum"):
            assert [getattr(r, name) for r in mine.reports] == [getattr(r, name) for r in other.reports]
    return count


def main() -> None:
    with join_process_group() as team, full_precision_matmul():
        for name, (world, calibrator) in METHODS.items():
            num_tensors = compare(calibrated(world, calibrator, team), calibrated(world, calibrator, ALONE))
            assert num_tensors, name
            print(f"rank {team.rank} of {team.size}: {name} equal")
        done = calibrated("open_clip_vit", FeatCal(), team, num_done=2)
        compare(done, calibrated("open_clip_vit", FeatCal(), ALONE)[2:])
        print(f"rank {team.rank} of {team.size}: resumed equal")


if __name__ == "__main__":
    main()
