"""Real processes: started as torchrun and SLURM start them, equal to one process, and one end for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import driftlens as dl
from driftlens.cli import DISTRIBUTED, run_command_line
from driftlens.config.spec import load_spec
from driftlens.runs.manifest import read_manifest, read_status
from driftlens.runs.run import DriftRun, open_run
from tests.distributed.processes import SECONDS, ended, exit_codes, said, started, torchrun
from tests.pipelines.calibrating import TABLES, copied
from tests.quick import few
from tests.zoo.world import World, build

# --- refused, or started otherwise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("command", ["report", "merge", "demo", "validate"])
def test_commands_that_run_in_one_process_are_refused_by_one_voice(
    command: str, rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("driftlens.cli.manner.silent", False)
    assert run_command_line([command, "somewhere"]) == 2
    told = capfd.readouterr().err
    assert (f"{command} runs in one process, and this is one of 4" in told) == (rank == 0)
    assert all(name in told for name in DISTRIBUTED) == (rank == 0)


def test_processes_without_a_meeting_place_are_told_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("driftlens.cli.manner.silent", False)
    assert run_command_line(["sweep", "somewhere"]) == 2
    assert "MASTER_ADDR" in capfd.readouterr().err


@pytest.mark.slow
def test_a_launcher_that_only_sets_variables_is_enough(light: DriftRun, tmp_path: Path) -> None:
    folder = copied(light, tmp_path / "run")
    jobs = started(2, "analyze", str(folder), "--json")
    first, second = (job.communicate(timeout=SECONDS) for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], first[1]
    assert second == ("", "")  # one voice
    rows = pd.DataFrame(json.loads(first[0])["accuracy"])
    assert set(zip(rows["task"], rows["variant"], strict=True)) >= {
        ("flowers", "expert"),
        ("shapes", "merged"),
    }
    pd.testing.assert_frame_equal(open_run(folder).accuracy(), light.accuracy(), check_exact=True)
    assert not (folder / "run.lock").exists() and read_manifest(folder).finished


# --- equal to one process -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three tasks, so that two processes have unequal shares."""
    return build(tmp_path_factory.mktemp("three") / "models", ("birds", "flowers", "shapes"))


@pytest.fixture(scope="module")
def spec(three: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spec") / "run.yaml"
    given = three.spec(metrics={"jacobian": {"samples": 4}, "cka": True, "adjoint": True})
    given["compute"] = {"device": "cpu"}
    file.write_text(load_spec(given).dump())
    return file


@pytest.fixture(scope="module")
def alone(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    """The run in one process."""
    with one_thread():
        return dl.analyze(spec, out=tmp_path_factory.mktemp("alone") / "run", progress="none")


def same_tables(found: DriftRun, wanted: DriftRun) -> None:
    for table in (*TABLES, "adjoint", "calibration"):
        ours, theirs = getattr(found, table)(), getattr(wanted, table)()
        pd.testing.assert_frame_equal(
            ours.drop(columns="seconds", errors="ignore"),
            theirs.drop(columns="seconds", errors="ignore"),
            check_exact=True,
            obj=table,
        )


def same_weights(found: Path, wanted: Path) -> None:
    ours, theirs = load_file(found), load_file(wanted)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", few([2, 4], (), some=[2]))  # of four processes, one has nothing to do
def test_calibrations_are_those_of_one_process(size: int) -> None:
    job = torchrun(size, module="tests.distributed.calibrations")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("resumed equal") == size


@pytest.mark.slow
def test_a_run_of_two_processes_is_that_of_one(spec: Path, alone: DriftRun, tmp_path: Path) -> None:
    one, two = copied(alone, tmp_path / "one"), tmp_path / "two"
    job = torchrun(2, "analyze", str(spec), "--out", str(two))
    assert job.returncode == 0, job.stderr
    same_tables(open_run(two), alone)
    commands: list[list[str]] = [
        ["calibrate", "--name", "featcal"],
        ["calibrate", "--name", "residual", "--method", "residual", "--set", "folds=2", "--no-attribution"],
        ["sweep", "--param", "lam=0.01,0.1", "--seeds", "2"],
        ["sweep", "--methods", "surgery:steps=3,featcal:update=[norm]"],
    ]
    for name, *rest in commands:
        with one_thread():
            assert run_command_line(["--progress", "none", name, str(one), *rest]) == 0
        codes, told = ended(2, name, str(two), *rest)
        assert codes == [0, 0], told
    found, wanted = open_run(two), open_run(one)
    same_tables(found, wanted)
    for file in sorted(one.rglob("*.safetensors")):
        same_weights(two / file.relative_to(one), file)
    assert files(two) == files(one)
    assert found.manifest.phases.keys() == wanted.manifest.phases.keys()


@contextmanager
def one_thread() -> Iterator[None]:
    """As many threads as each of the processes has: products of others differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- one end for all ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_another_number_of_them_resumes(alone: DriftRun, tmp_path: Path) -> None:
    one, many = copied(alone, tmp_path / "one"), copied(alone, tmp_path / "many")
    arguments = ["--name", "featcal", "--no-attribution"]
    job = torchrun(2, "calibrate", str(many), *arguments, module="tests.distributed.worker", fault="killed:1")
    assert job.returncode != 0
    assert said(job).count("error: ") == 1 and "another of the 2 processes was killed" in said(job)
    assert "--resume" in said(job) and exit_codes(job) >= {-9, 4}
    status = read_status(many)
    assert status is not None and status.state == "failed" and status.error is not None
    assert "was killed" in status.error.message and not (many / "run.lock").exists()
    kept = [file.name for file in many.rglob("*.safetensors") if file.stem.isdecimal()]
    assert kept == ["002.safetensors"]  # what was solved before
    codes, told = ended(3, "calibrate", str(many), *arguments, "--resume")
    assert codes == [0, 0, 0], told
    with one_thread():
        assert run_command_line(["--progress", "none", "calibrate", str(one), *arguments]) == 0
    same_weights(*(folder / "calibrations/featcal/weights.safetensors" for folder in (many, one)))
    same_tables(open_run(many), open_run(one))
    assert files(many) == files(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        ("refused:1", "error: picture seven can't be read\nhint: Look at it.", 4),
        ("mistaken:1", "error: KeyError: 'nobody thought of that'", 1),
    ],
)
def test_an_error_of_any_process_is_said_once_with_its_exit_code(
    fault: str, message: str, code: int, light: DriftRun, tmp_path: Path
) -> None:
    folder = copied(light, tmp_path / "run")
    codes, told = ended(2, "calibrate", str(folder), "--name", "mine", module="tests.distributed.worker", fault=fault)
    assert told.count("error: ") == 1 and message in told
    assert code in codes
    status = read_status(folder)
    assert status is not None and status.state == "failed" and status.error is not None
    assert not (folder / "run.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_is_stopped_twice_says_so_once(rank: int, light: DriftRun, tmp_path: Path) -> None:
    folder = copied(light, tmp_path / "run")
    given = ("--progress", "none", "calibrate", str(folder), "--name", "mine", "--no-attribution")
    jobs = started(2, *given, module="tests.distributed.worker", fault=f"stopped:{rank}")
    (_, first), (_, second) = (job.communicate(timeout=SECONDS) for job in jobs)
    assert [job.returncode for job in jobs] == [130, 130], (first, second)
    told = f"{first}{second}"
    assert told.count("cancelled") == 1 and "error: " not in told and "frame #" not in told
    status = read_status(folder)
    assert status is not None and status.state == "cancelled"
    assert open_run(folder).variants == light.variants


@pytest.mark.slow
def test_whoever_is_left_tells_that_the_first_process_is_gone(light: DriftRun, tmp_path: Path) -> None:
    folder = copied(light, tmp_path / "run")
    given = ("--progress", "none", "calibrate", str(folder), "--name", "mine", "--no-attribution")
    jobs = started(2, *given, module="tests.distributed.worker", fault="killed:0")
    _, (_, told) = (job.communicate(timeout=SECONDS) for job in jobs)
    assert [job.returncode for job in jobs] == [-9, 4]
    assert told.count("another of the 2 processes was killed") == 1 and len(told.splitlines()) == 2, told
    # Nobody could write that down; the next command sees it.
    assert run_command_line(["calibrate", str(folder), "--name", "mine", "--no-attribution", "--resume"]) == 0
    assert "calibrated:mine" in open_run(folder).variants
