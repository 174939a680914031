"""Estimates by rehearsal: short studies, what is told from them, and a job that takes about that."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from driftlens.base.access import Access
from driftlens.base.errors import NumericsError
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.preflight import rehearsal
from driftlens.jobs.preflight.calibrating import rehearse
from driftlens.jobs.preflight.job import checked
from driftlens.jobs.preflight.jobs import SpecStudy
from driftlens.jobs.preflight.rehearsal import (
    QUADRATIC,
    Extent,
    Measured,
    Share,
    extrapolated,
    features_bytes,
    shares_of,
)
from driftlens.jobs.preflight.shortened import Size, kept_layers, shortened
from driftlens.jobs.study.opening import open_study
from driftlens.runs.run import DriftRun
from driftlens.runs.writer import RunWriter
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest
from tests.pipeline.calibrating import copied, files_of, request
from tests.pipeline.checking import check
from tests.zoo.cases import CASES, family
from tests.zoo.world import DEPTH, World, write_images

DEPTHS, SAMPLES = (1, 2, 4), (8, 64)


@pytest.fixture(autouse=True)
def brief_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short studies of every size, each of which runs once."""
    monkeypatch.setattr(rehearsal, "_PATIENCE", 1e-9)


def by_task(seconds: object) -> list[Measured]:
    """What short studies take whose seconds are a function of blocks and samples."""
    extents = [Extent(blocks, samples) for blocks in DEPTHS for samples in SAMPLES]
    return [Measured(extent, seconds(extent)) for extent in extents]  # type: ignore[operator]


def test_what_is_done_by_block_and_sample_is_multiplied() -> None:
    measured = by_task(lambda at: 0.2 + 0.1 * at.blocks + 0.003 * at.samples + 0.01 * at.blocks * at.samples)
    for blocks, samples in ((12, 512), (32, 64), (24, 8), (1, 4096)):
        wanted = 0.2 + 0.1 * blocks + 0.003 * samples + 0.01 * blocks * samples
        assert extrapolated("analyze", measured, Extent(blocks, samples)) == pytest.approx(wanted, rel=1e-6)


def test_vectors_that_are_carried_through_later_layers_grow_with_the_square_of_the_depth() -> None:
    measured = by_task(lambda at: 0.1 + 0.02 * at.blocks * at.samples + 0.005 * at.blocks**2 * at.samples)
    found = extrapolated(QUADRATIC, measured, Extent(24, 32))
    assert found == pytest.approx(0.1 + 0.02 * 24 * 32 + 0.005 * 24**2 * 32, rel=1e-6)


def test_tasks_and_rounds_are_multiplied_where_they_vary() -> None:
    def seconds(at: Extent) -> float:
        return 0.3 + 0.05 * at.blocks + 0.004 * at.blocks * at.samples + 0.02 * at.blocks * at.tasks

    extents = [Extent(1, 72, 2), Extent(2, 16, 2), Extent(4, 72, 2), Extent(2, 8, 1)]
    measured = [Measured(at, seconds(at)) for at in extents]
    assert extrapolated("calibrate", measured, Extent(12, 2048, 8)) == pytest.approx(
        seconds(Extent(12, 2048, 8)), rel=1e-6
    )
    rounds = [
        Measured(Extent(blocks, 8, 2, number), 0.1 + 0.01 * number * blocks * 2)
        for blocks in (1, 2, 4)
        for number in (4, 16)
    ]
    found = extrapolated("calibrate", rounds, Extent(12, 8, 4, 1000))
    assert found == pytest.approx(0.1 + 0.01 * 1000 * 12 * 4, rel=1e-6)


def test_noise_takes_nothing_back_and_the_quickest_of_equal_runs_counts() -> None:
    noisy = [*by_task(lambda at: 1.0 - 0.01 * at.samples / 64), Measured(Extent(4, 64), 30.0)]
    assert 0.9 < extrapolated("analyze", noisy, Extent(48, 10_000)) < 1.1


@pytest.mark.parametrize("name", CASES)
def test_a_short_chain_keeps_stem_head_and_blocks_of_every_kind(name: str) -> None:
    pool = family(CASES[name]).pool
    headers = pool.source("merged").headers
    layers = pool.chain.layers
    for blocks in (1, 2, 99):
        kept = kept_layers(pool.chain, headers, blocks)
        assert (kept[0], kept[-1]) == (layers[0], layers[-1])
        assert [layer.index for layer in kept] == sorted(layer.index for layer in kept)
        assert {len(layer.parameters) for layer in layers} == {len(layer.parameters) for layer in kept}
    assert kept == list(layers)


def test_a_short_study_is_the_whole_one_where_nothing_is_left_out(world: World) -> None:
    study, models = open_study(load_spec(world.spec(merge=None, merged=world.spec()["base"])))
    short = shortened(study, models, Size(DEPTH, (3, 2), 3))
    assert [*short.study.tasks] == ["0", "1"] and short.blocks == DEPTH
    task = next(iter(study.tasks))
    assert short.study.tasks["1"].diagnosis.ids == study.tasks[task].diagnosis.ids[:2]
    inputs = study.tasks[task].diagnosis.load([0, 1])
    with torch.no_grad():
        pairs = zip(
            study.pool.library_states(study.pool.expert(task), inputs),
            short.study.pool.library_states("expert:0", inputs),
            strict=True,
        )
        for whole, cut in pairs:
            torch.testing.assert_close(cut["hidden"], whole["hidden"])


def test_layers_that_are_stored_are_those_of_the_whole_study(world: World) -> None:
    spec = world.spec(layers={"select": ["*.resblocks.1"]})
    study, models = open_study(load_spec(spec))
    stored = shortened(study, models, Size(2, (2,), 2)).study.settings.stored_layers
    assert stored == {1, 3, 4}  # stem, the second block, head


def rehearsed_on(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[SpecStudy, list[Size]]:
    """A spec that is open, and the sizes of the short studies that its rehearsals use, each of which runs once."""
    sizes: list[Size] = []

    def spied(study: object, models: object, size: Size) -> object:
        sizes.append(size)
        return shortened(study, models, size)  # type: ignore[arg-type]

    monkeypatch.setattr(rehearsal, "shortened", spied)
    _, opened = checked(load_spec(world.spec(metrics={"jacobian": False})), Access())
    assert opened is not None
    return opened, sizes


@pytest.mark.slow
def test_an_analysis_is_rehearsed_by_its_own_phases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sizes = rehearsed_on(world, monkeypatch)
    before = {*world.folder.rglob("*")}
    found = opened.analysis()
    assert [*found.seconds] == ["merge", "digests", "analyze", "evaluate", "params"]
    assert {size.blocks for size in sizes[1:]} == {1, 2, 3} and len({*sizes}) == len(sizes)
    assert found.cost.seconds > 0 and found.cost.memory_bytes > 1e8
    assert {*world.folder.rglob("*")} == before

    shares = shares_of(opened.study)
    twice = {task: share * 100 for task, share in shares.items()}
    assert found.seconds_of(twice) >= found.seconds_of(shares)


@pytest.mark.slow
def test_what_a_job_spends_on_every_sample_is_in_its_estimate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only moves while samples are read, by a second for each."""
    opened, _ = rehearsed_on(world, monkeypatch)
    clock = [0.0]
    begun = RunWriter.create

    def told_time(*given: object, **how: object) -> RunWriter:
        writer = begun(*given, **how)  # type: ignore[arg-type]
        monkeypatch.setattr(writer._board, "clock", lambda: clock[0])
        return writer

    monkeypatch.setattr(RunWriter, "create", told_time)
    plain = opened.study.tasks

    def slow(task: str) -> object:
        at = plain[task]

        def load(positions: object) -> object:
            clock[0] += len(positions)  # type: ignore[arg-type]
            return at.diagnosis.load(positions)  # type: ignore[arg-type]

        return dataclasses.replace(at, diagnosis=dataclasses.replace(at.diagnosis, load=load))

    study = dataclasses.replace(opened.study, tasks={task: slow(task) for task in plain})
    found = dataclasses.replace(opened, study=study).analysis()
    shares = {f"{number}": Share(1000, 1000, 0) for number in range(8)}
    # Once for the walk; a few more are read to see how large one is, whatever their number.
    assert found.phase_seconds("analyze", shares) == pytest.approx(8 * 1000, rel=0.05)
    assert found.phase_seconds("evaluate", shares) == pytest.approx(0, abs=1)


def test_features_wait_within_their_budget(world: World) -> None:
    study, _ = open_study(load_spec(world.spec(merge=None, merged=world.spec()["base"])))
    few = features_bytes(study)
    assert 0 < features_bytes(study, 0.5) < few
    assert features_bytes(study, beside=50) == few + 50
    tight = dataclasses.replace(study, settings=dataclasses.replace(study.settings, feature_budget=100))
    assert features_bytes(tight) == features_bytes(tight, beside=50) == 2 * 100


def test_where_nothing_can_be_rehearsed_there_is_no_estimate_and_it_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise NumericsError("features are NaN")

    monkeypatch.setattr(SpecStudy, "analysis", refuse)
    result = check(world.spec(), estimate=True)
    assert result.cost is None and result.exit_code == 0
    (notice,) = [found for found in result.findings if found.subject == "estimate"]
    assert notice.level == "notice" and "features are NaN" in notice.text


@pytest.mark.slow
def test_disk_agrees_with_a_run(world: World, tmp_path: Path) -> None:
    spec = world.spec(metrics={"jacobian": False})
    for task in world.tasks:
        write_images(tmp_path / f"{task}.npz", ("a", "b", "c"), train=6, test=300)
    spec["data"] = {
        "defaults": {"n": 4, "n_diagnosis": 300, "batch_size": 100},
        **{task: {"kind": "npz", "file": str(tmp_path / f"{task}.npz")} for task in world.tasks},
    }
    spec["heads"] = {task: {**entry, "classes": ["a", "b", "c"]} for task, entry in spec["heads"].items()}
    cost = check(spec, estimate=True).cost
    assert cost is not None
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    used = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert used / 2 < cost.disk_bytes < 2 * used


@pytest.mark.slow
def test_disk_agrees_with_a_calibration(light: DriftRun, tmp_path: Path) -> None:
    folder = copied(light, tmp_path / "run")
    found = rehearse(folder, request())
    calibrate(folder, request())
    new = sum(len(data) for name, data in files_of(folder).items() if name not in files_of(light.path))
    assert found.cost is not None
    assert 0.3 < found.cost.disk_bytes / new < 3
