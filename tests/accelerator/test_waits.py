"""How often the host waits for a device, phase by phase, whatever the batches, tasks and variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import masking_utils

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.sources import module_source
from driftlens.engine.calibrating import Ground
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import Crossing
from driftlens.jobs.analyze import causes
from driftlens.models.chain import Routes
from driftlens.models.taking_apart import dissection
from driftlens.models.taking_apart.mixtures import _mixture, _Watch
from tests.accelerator import counted
from tests.accelerator.counting import Apart, Waits, of_phases, plant, since, waited
from tests.accelerator.subjects import models, pool_on, small, tables
from tests.calibration.helpers import batched, given, ground
from tests.zoo import mixtures
from tests.zoo.cases import perturbed
from tests.zoo.decoders import MIXTURES
from tests.zoo.suite import spec_of
from tests.zoo.world import DEPTH, World, build

pytestmark = pytest.mark.slow

LAYERS = DEPTH + 2


@pytest.fixture(scope="module")
def world(pretended: torch.device, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("world") / "models")


def read_of_every_batch(patch: pytest.MonkeyPatch) -> None:
    """Plant a value that is read of every batch."""
    plant(patch, Crossing, "take", lambda _, left: left)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    read_of_every_batch(monkeypatch)


# No kink is met so well: nodes are doubled as often as they may be, and every time somebody has to look.
_DOUBLED = {"samples": 4, "nodes": 2, "max_nodes": 8, "tolerance": 1e-12}


def by_phase(world: World, out: Path, batch_size: int, num_baselines: int, **asked: Any) -> dict[str, Waits]:
    """Waits in every phase of an analysis of two tasks with four samples."""
    spec = world.spec(metrics={"jacobian": {"samples": 2, "nodes": 4, "max_nodes": 4}} | asked)
    spec["data"]["defaults"] = {"n": 4, "n_diagnosis": 4, "batch_size": batch_size}
    weights = {"weights": str(world.weights(world.tasks[0]))}
    spec["baselines"] = {f"other{number}": weights for number in range(num_baselines)}
    return of_phases(spec, out)


def test_an_analysis_waits_per_layer(sim: torch.device, world: World, tmp_path: Path) -> None:
    few, narrow, many = (
        by_phase(world, tmp_path / f"{size}", size, num) for size, num in ((4, 1), (1, 1), (2, 3))
    )
    assert narrow == few == many
    for name in world.tasks:
        # Whether features are finite; columns, vectors and how far the library's are off. The first two samples of the
        # first task are also held against float64.
        more = name == world.tasks[0]
        assert few[f"analyze:{name}"] == (LAYERS + more, 3 * LAYERS + more, 0)
        # Whether features are finite, and who is right.
        assert few[f"evaluate:{name}"] == (1, 1, 0)
        # Whether features are finite; numbers by layer, and those of all layers.
        assert few[f"explain:{name}"] == (LAYERS, 2, 0)


EVERYTHING = {"jacobian": _DOUBLED, "adjoint": True, "groups": True}


def test_causes_wait_per_layer_whatever_the_variants(sim: torch.device, world: World, tmp_path: Path) -> None:
    """Also where nodes are added, and for what is taken back: two more walks, targets and groups of modules."""
    few, many = (by_phase(world, tmp_path / f"{num}", 4, num, **EVERYTHING) for num in (1, 3))
    assert few == many
    for name in world.tasks:
        read, copied, sent = few[f"explain:{name}"]
        assert LAYERS < read <= 6 * LAYERS and 2 < copied <= 3 * LAYERS and not sent


def test_variants_are_explained_apart_where_memory_is_too_little(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Path
) -> None:
    """To equal numbers, and more waits."""
    seen, runs = [], [tmp_path / name for name in ("together", "apart")]
    for run in runs:
        seen.append(by_phase(world, run, 4, 1, **EVERYTHING)[f"explain:{world.tasks[0]}"])
        monkeypatch.setattr(causes, "fitting_batch", lambda size: 1)
    assert seen[0][0] < seen[1][0]
    together, apart = map(tables, runs)
    for name, table in together.items():
        pd.testing.assert_frame_equal(table, apart[name], check_exact=True)


def test_a_value_read_of_every_batch_is_found(
    sim: torch.device, world: World, tmp_path: Path, planted: None
) -> None:
    few, many = (by_phase(world, tmp_path / f"{num}", 2, num) for num in (1, 2))
    for phase in ("analyze", "evaluate", "explain"):
        assert few[f"{phase}:{world.tasks[1]}"][0] > LAYERS
        assert few[f"{phase}:{world.tasks[1]}"] < many[f"{phase}:{world.tasks[1]}"]


ASKED: dict[str, dict[str, Any]] = {
    "plain": dict.fromkeys(("contributions", "prefix", "cka", "adjoint", "groups"), True)
    | {"jacobian": _DOUBLED},
    "spectral": {"jacobian": {**_DOUBLED, "samples": 2, "max_nodes": 4, "spectral": True}},
}


@pytest.mark.parametrize("metrics", ASKED.values(), ids=ASKED)
def test_what_is_asked_for_waits_per_layer(
    sim: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    tmp_path: Path,
    metrics: dict[str, Any],
) -> None:
    """Whatever the batches: nodes that are added, contributions, prefixes and groups, and what is taken back."""
    spec, seen, num_samples = world.one_task(metrics=metrics), [], metrics["jacobian"]["samples"]
    for size in (num_samples, 1):
        spec["data"]["defaults"] = {"n": 4, "n_diagnosis": num_samples, "batch_size": size}
        monkeypatch.setattr(causes, "BATCH", size)
        seen.append(of_phases(spec, tmp_path / f"{size}"))
    assert seen[0] == seen[1] and seen[0][f"explain:{world.tasks[0]}"][1] > LAYERS


def waits(method: Calibrator, device: torch.device, batch_size: int, tasks: str) -> Waits:
    """Waits of a calibration on four samples of each task."""
    options: dict[str, Any] = {
        "pool": pool_on(models(), device),
        "parts": {task: given(batched(models().inputs, batch_size)) for task in tasks},
    }
    takes = method.takes_sites
    on = ground(models(), method.update, **options) if takes else ground(models(), **options, sites={})
    before = waited()
    for _ in method.calibrate(on):
        pass
    return since(before)


METHODS: dict[str, Calibrator] = {
    "featcal": FeatCal(),
    "residual": ResidualCal(cv="off"),
    "uniform": ResidualCal(cv="off", weights="uniform"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_calibration_waits_per_layer(sim: torch.device, method: Calibrator) -> None:
    assert waits(method, sim, 4, "a") == waits(method, sim, 1, "ab")


ATTACHED = ("surgery", "prob_surgery")


@pytest.mark.parametrize("name", sorted(set(calibrators) - set(METHODS) - set(ATTACHED)))
def test_a_calibration_waits_whatever_the_batches(sim: torch.device, name: str) -> None:
    assert waits(small(name), sim, 4, "a") == waits(small(name), sim, 1, "ab")


@pytest.mark.parametrize("name", ATTACHED)
def test_what_is_attached_for_a_task_waits_once(sim: torch.device, name: str) -> None:
    for size, tasks in ((4, "a"), (1, "a"), (1, "ab")):
        # For each task: whether features are finite, and the loss.
        assert waits(small(name), sim, size, tasks) == (2 * len(tasks), 0, 0)


@pytest.mark.parametrize("name", sorted(calibrators))
def test_a_calibration_that_reads_of_every_batch_is_found(
    sim: torch.device, name: str, planted: None
) -> None:
    method = METHODS.get(name) or small(name)
    assert waits(method, sim, 4, "a") < waits(method, sim, 1, "a")


MIXED: dict[str, Calibrator] = {
    "featcal": FeatCal(),
    "residual": ResidualCal(cv="off", weights="uniform"),
}


@pytest.mark.parametrize("method", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize(
    ("name", "more", "is_planted"), [("Mixtral", 0, False), ("Llama 4", 1, False), ("Mixtral", 0, True)]
)
def test_of_mixtures_the_librarys_own_forward_alone_reads_of_every_batch(
    sim: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    method: Calibrator,
    name: str,
    more: int,
    is_planted: bool,
) -> None:
    """Where it hands all experts all tokens, as Llama 4 does, `more` is read in a pass that is listened to."""
    case = mixtures.case(name)
    base = case.build().float()
    base.config._experts_implementation = "eager"
    models = {"base": base, "merged": perturbed(base, 9)} | {
        f"expert:{task}": perturbed(base, 1) for task in "ab"
    }
    sources = {model: module_source(module, model) for model, module in models.items()}
    apart, alone = Apart(), Counter[str]()
    chain = case.chain(base)
    chain = replace(chain, start=apart.listening(chain.start, "start"))
    pool = ModelPool(chain, base, sources, device=sim, dtype=torch.float32)
    tokens = torch.randint(4, 40, (4, 12), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": tokens}
    sites = select_sites(pool.chain, update=method.update)

    def as_alone(number: int, again: Callable[[], Any]) -> None:
        before = counted().read
        with torch._C.DisableTorchFunction():
            again()
        alone["read"] += (once_more := counted().read - before)
        assert number in (once_more, once_more + more)

    def rest(size: int, tasks: str) -> int:
        """What is read outside the library's forward of experts, and where batches begin."""
        parts, before = {task: given(batched(inputs, size)) for task in tasks}, counted()
        left_out = apart.read.total()
        for _ in method.calibrate(Ground(pool, parts, sites)):
            pass
        return (counted() - before).read - (apart.read.total() - left_out)

    [experts] = {type(module) for module in base.modules() if _mixture("mixture", module) is not None}
    monkeypatch.setattr(experts, "forward", apart.listening(experts.forward, "experts", as_alone))
    # Before the first layer it looks for texts that are packed into one row, batch by batch.
    packed = "find_packed_sequence_indices"
    monkeypatch.setattr(masking_utils, packed, apart.listening(getattr(masking_utils, packed), packed))
    monkeypatch.setattr(_Watch, "before", apart.listening(_Watch.before, "told"))
    if is_planted:
        read_of_every_batch(monkeypatch)
    assert (rest(4, "a") == rest(1, "ab")) != is_planted
    assert alone["read"] or more


@pytest.mark.parametrize(
    ("name", "is_planted"), [("Mixtral", False), ("Phi-3.5-MoE", False), ("Mixtral", True)]
)
def test_of_mixtures_an_analysis_waits_per_layer_outside_experts_and_routes(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, is_planted: bool
) -> None:
    """Experts wait for their tokens batch by batch; beside them one wait tells whether, and one which, go elsewhere.

    Copies to the host are as many whatever the batches.
    """
    spec = spec_of(MIXTURES[name], tmp_path) | {"metrics": {"jacobian": False}}
    apart, most = Apart(), Counter[str]()
    parts = mixtures.case(name).build().modules()
    [experts] = {type(part) for part in parts if _mixture("mixture", part) is not None}

    def once(called: str) -> Callable[..., None]:
        def check(number: int, _: Any) -> None:
            most[called] = max(most[called], number)

        return check

    if is_planted:
        read_of_every_batch(monkeypatch)
        plant(monkeypatch, Routes, "is_as", lambda given, _: given[0].chosen)
    for owner, called, check in (
        (experts, "forward", None),
        (masking_utils, "find_packed_sequence_indices", None),
        (masking_utils, "_ignore_causal_mask_sdpa", None),
        (dissection.Dissection, "start", None),
        (dissection.Dissection, "stem", None),
        (_Watch, "before", once("told")),
        (Routes, "is_as", once("is_as")),
    ):
        known = {} if check is None else {"check": check}
        monkeypatch.setattr(owner, called, apart.listening(getattr(owner, called), called, **known))
    seen = list[dict[str, tuple[int, int]]]()
    for size in (4, 1):
        spec["data"]["defaults"] = {"n": 4, "n_diagnosis": 4, "batch_size": size}
        seen.append(of_phases(spec, tmp_path / f"run{size}", apart))
    assert (seen[0] == seen[1]) != is_planted and apart.read["forward"]
    assert most == {"told": 1, "is_as": 1 + is_planted}
