"""Calibration divided among processes: equal to that of one, whatever is divided how."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.base.errors import NumericsError, SingularGramError, SpecError
from driftlens.base.team import MemoryElsewhere, Team
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.data.samples import Batch, SampleSet, fitting_batch, halving_batches
from driftlens.engine.calibrating import Ground, Step
from driftlens.engine.problems import CalibratedLayer, SiteUpdate, StepProblem, WeightedFold
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import Given
from driftlens.linalg.gram import GramPool
from tests.quick import few
from tests.team.threads import teamed
from tests.zoo import mixtures
from tests.zoo.cases import Case, perturbed, pool_of
from tests.zoo.solvable import WORLDS

TASKS = ("a", "b", "c")
Samples = Mapping[str, Sequence[Given]]


def models(case: Case) -> dict[str, nn.Module]:
    base = case.build().double().eval()
    experts = {f"expert:{task}": perturbed(base, seed) for seed, task in enumerate(TASKS, start=1)}
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(dict(e.named_parameters())[name] for e in experts.values()) / len(experts))
    return {"base": base, "merged": merged, **experts}


def case_of(world: str) -> Case:
    return WORLDS[world].case if world in WORLDS else mixtures.case(world)


def samples(case: Case) -> Samples:
    """Of every task other ones, in one to three batches of unequal sizes."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, list[Batch]] = {}
    for number, task in enumerate(TASKS, start=1):
        sizes = [4, 3, 2][:number]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        found[task] = [
            Batch(start, start + size, case.inputs(generator, size))
            for start, size in zip(starts, sizes, strict=True)
        ]
    return {task: [Given(lambda task=task: found[task])] for task in TASKS}  # type: ignore[misc]


def compared(one: list[CalibratedLayer], many: list[list[CalibratedLayer]], tolerance: float) -> None:
    for layers in many:
        assert [layer.layer for layer in layers] == [layer.layer for layer in one]
        for ours, theirs in zip(layers, one, strict=True):
            assert ours.updates.keys() == theirs.updates.keys()
            for name, value in theirs.updates.items():
                assert (ours.updates[name] - value).norm() <= tolerance * value.norm(), (ours.layer, name)
            # Reports keep their places, and drifts those of their tasks.
            assert [report.site for report in ours.reports] == [report.site for report in theirs.reports]
            assert list(ours.drift_l2_mean) == list(theirs.drift_l2_mean)
            assert ours.drift_l2_mean == pytest.approx(theirs.drift_l2_mean, rel=1e-9)
            for name in ("objective_before", "objective_after", "task_weight_sum"):
                mine, other = ([getattr(report, name) for report in of.reports] for of in (ours, theirs))
                assert [value is None for value in mine] == [value is None for value in other]
                assert [value or 0 for value in mine] == pytest.approx(
                    [value or 0 for value in other], rel=1e-8, abs=1e-12
                )


DIVIDED: dict[str, tuple[str, Calibrator]] = {
    "featcal": ("open_clip_vit", FeatCal()),
    "streams": ("t5", FeatCal(update=["linear", "bias"])),  # keys and values of one stream in many layers
    "residual": ("open_clip_vit", ResidualCal(folds=2)),
    "metric": ("open_clip_vit", ResidualCal(folds=2, mu=0.9, order="block")),
    "uniform": ("open_clip_vit", ResidualCal(weights="uniform", cv="off")),
    "experts": ("Mixtral", ResidualCal(weights="uniform", cv="off")),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", DIVIDED)
@pytest.mark.parametrize("size", [2, 4])  # 4: one has nothing to do
def test_several_processes_find_what_one_finds(method: str, size: int) -> None:
    world, calibrator = DIVIDED[method]
    case = case_of(world)

    # Modules are hooked while they run, so every thread has its own.
    pools = [pool_of(case, models(case)) for _ in range(size)]

    def walk(team: Team) -> list[CalibratedLayer]:
        pool = pools[team.rank]
        sites = select_sites(pool.chain, update=calibrator.update)
        # Experts of a mixture, or groups of sites, in runs of one: for these, sums are too large together.
        budget = 1 if team.size > 1 else 1 << 31
        ground = Ground(pool, samples(case), sites, team=team, feature_budget=budget)
        return list(calibrator.calibrate(ground))

    one, many = walk(Team()), teamed(size, walk)
    assert any(layer.updates for layer in one)
    compared(one, many, 1e-9)


@pytest.mark.slow
def test_step_by_step_processes_solve_experts_beside_each_other() -> None:
    class Recording(ResidualCal):
        def solve(self, problem: StepProblem) -> Sequence[SiteUpdate]:
            solved.append((threading.get_ident(), problem.sites[0].expert))
            return super().solve(problem)

    case, solved = mixtures.case("Mixtral"), list[tuple[int, int | None]]()
    pools = [pool_of(case, models(case)) for _ in range(2)]

    def walk(team: Team) -> list[CalibratedLayer]:
        pool = pools[team.rank]
        ground = Ground(pool, samples(case), select_sites(pool.chain, update=["linear"]), team=team)
        return list(Recording(weights="uniform", cv="off").calibrate(ground))

    teamed(2, walk)
    counts = Counter(thread for thread, expert in solved if expert is not None)
    assert len(counts) == 2 and len(set(counts.values())) == 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("method", few(DIVIDED, ["streams", "residual"]))  # the others: above
@pytest.mark.parametrize("size", few([2, 3, 5], quick=[3], some=()))
def test_batches_of_a_task_are_shared_where_tasks_are_too_few(method: str, size: int) -> None:
    world, calibrator = DIVIDED[method]
    case = case_of(world)
    pools = [pool_of(case, models(case)) for _ in range(size)]
    generator = torch.Generator().manual_seed(3)
    counts = {"a": 2, "b": 5, "c": 9}  # in batches of two: most is one task's, and last ones are smaller
    given = {
        task: [
            Batch(at, min(at + 2, count), case.inputs(generator, min(2, count - at)))
            for at in range(0, count, 2)
        ]
        for task, count in counts.items()
    }
    seen: list[tuple[int, str, int]] = []

    def walk(team: Team) -> list[CalibratedLayer]:
        pool = pools[team.rank]
        parts = {
            task: [Given(lambda task=task: given[task], [f"{task}{at}" for at in range(count)], 2)]  # type: ignore[misc]
            for task, count in counts.items()
        }
        sites = select_sites(pool.chain, update=calibrator.update)

        def hear(now: Step) -> None:
            seen.append((team.rank, now.task, now.layer))

        return list(calibrator.calibrate(Ground(pool, parts, sites, team=team, on_step=hear)))

    one = walk(Team())
    seen.clear()
    many = teamed(size, walk)
    compared(one, many, 1e-9)
    steps = [sum(rank == at for rank, *_ in seen) for at in range(size)]
    num_batches = sum(map(len, given.values()))
    assert max(steps) * num_batches <= sum(steps) * -(-num_batches // size)  # as even as whole batches can be
    sharing = {task: {rank for rank, at, _ in seen if at == task} for task in TASKS}
    assert (len(sharing["c"]) > 1) == (size > 2)  # five of nine batches are half of the work


def test_layers_done_before_are_passed_by_all() -> None:
    case = WORLDS["open_clip_vit"].case
    pool, given = pool_of(case, models(case)), samples(case)
    sites = select_sites(pool.chain)
    one = list(FeatCal().calibrate(Ground(pool, given, sites)))
    done = {layer.layer: layer.updates for layer in one[:2]}
    many = teamed(2, lambda team: list(FeatCal().calibrate(Ground(pool, given, sites, done=done, team=team))))
    compared(one[2:], many, 1e-9)


SHORT = list(itertools.product((2, 3), ("featcal", "residual"), ("half", "nothing")))
"""Processes (three share tasks), method, and which batches fit into the memory of one of them."""
QUICK = [(2, "featcal", "nothing"), (3, "residual", "half")]
SOME = [(2, "residual", "half"), (3, "featcal", "nothing")]


@pytest.mark.slow
@pytest.mark.parametrize("short", few(SHORT, QUICK, some=SOME), ids=str)
def test_all_begin_anew_where_one_has_too_little_memory(short: tuple[int, str, str]) -> None:
    size, method, fitting = short
    fits = {"half": 2, "nothing": 0}[fitting]
    world, calibrator = DIVIDED[method]
    case, generator = case_of(world), torch.Generator().manual_seed(3)
    pools = [pool_of(case, models(case)) for _ in range(size)]
    given = {}
    for task, count in {"a": 4, "b": 5, "c": 11}.items():
        inputs, ids = case.inputs(generator, count), tuple(f"{task}{row}" for row in range(count))
        load = functools.partial(lambda inputs, rows: inputs[list(rows)], inputs)
        given[task] = [SampleSet(task, "calibration", ids, None, load, batch_size=4)]

    def walk(team: Team) -> tuple[list[CalibratedLayer], list[str]]:
        told: list[str] = []
        layers: list[CalibratedLayer] = []
        steps = itertools.count()
        pool = pools[team.rank]
        sites = select_sites(pool.chain, update=calibrator.update)

        def hear(now: Step) -> None:
            if team.rank == 1 and fitting_batch(4) > fits and next(steps) % 4 == 3:
                raise torch.OutOfMemoryError("all is in use\nand a page of advice")

        def work() -> None:
            layers[:] = calibrator.calibrate(Ground(pool, given, sites, team=team, on_step=hear))

        with halving_batches(4, told.append, team=team) as done:
            if fits or team.size == 1:
                done(work)
            else:
                error = torch.OutOfMemoryError if team.rank == 1 else MemoryElsewhere
                with pytest.raises(error, match="all is in use") as caught:
                    done(work)
                assert (
                    team.rank == 1 or caught.value.message == "process 1 has too little memory: all is in use"
                )
        return layers, told

    (one, _), many = walk(Team()), teamed(size, walk)
    assert all(told == ["batches of 2", "batches of 1"][: 2 - fits // 2] for _, told in many)
    if fits:
        compared(one, [layers for layers, _ in many], 1e-9)


@pytest.mark.parametrize("spoiled", TASKS)
def test_what_one_process_finds_wrong_all_report(spoiled: str) -> None:
    case = WORLDS["open_clip_vit"].case
    pool, given = pool_of(case, models(case)), samples(case)
    given = {**given, spoiled: [Given(lambda: [Batch(0, 2, torch.full((2, 3, 16, 16), torch.nan))])]}

    def walk(team: Team) -> str:
        with pytest.raises(NumericsError) as caught:
            list(FeatCal().calibrate(Ground(pool, given, select_sites(pool.chain), team=team)))
        assert team.agrees(caught.value)
        return caught.value.message

    first, second = teamed(2, walk)
    assert first == second and f"task {spoiled!r}" in first


def test_a_system_that_one_process_cannot_solve_is_refused_by_all() -> None:
    case = WORLDS["open_clip_vit"].case
    pool, few = pool_of(case, models(case)), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    given = {task: [Given(lambda: [Batch(0, 1, few)])] for task in TASKS}

    def walk(team: Team) -> str:
        with pytest.raises(SingularGramError) as caught:
            sites = select_sites(pool.chain)
            list(FeatCal(anchor="none").calibrate(Ground(pool, given, sites, team=team)))
        assert team.agrees(caught.value)
        return caught.value.message

    first, second = teamed(2, walk)
    assert first == second and first.startswith("layer 2, transformer.resblocks.0.mlp.c_proj: gram is")


class _Own:
    """A fold that a plugin brings, from before there were teams."""

    def __init__(self, inner: WeightedFold) -> None:
        self.add, self.moments, self.mean_bias = inner.add, inner.moments, inner.mean_bias


class _Plugin(FeatCal):
    def fold(self, grams: GramPool) -> Any:
        return _Own(super().fold(grams))


def test_a_fold_that_cannot_be_added_up_is_refused() -> None:
    case = WORLDS["open_clip_vit"].case
    pool, given = pool_of(case, models(case)), samples(case)
    sites = select_sites(pool.chain)
    assert list(_Plugin().calibrate(Ground(pool, given, sites)))

    def walk(team: Team) -> list[Tensor]:
        with pytest.raises(SpecError, match="Calibrate in one process"):
            list(_Plugin().calibrate(Ground(pool, given, sites, team=team)))
        return []

    teamed(2, walk)
