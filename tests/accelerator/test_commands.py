"""Every command that computes, on the pretended accelerator and on the CPU: equal tables and weights."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftlens as dl
from driftlens.cli import build_app, main
from driftlens.engine.walk import FeatureStream
from driftlens.utils.errors import RunError
from tests.accelerator import LACKED, NAME, turn
from tests.accelerator.subjects import same, tables
from tests.quick import few
from tests.zoo.world import CLASSES, build, merged_weights, save_transformers, write_images

pytestmark = pytest.mark.slow


def named_models(spec: Path) -> list[Path]:
    """A base, an expert, and its merge with another."""
    return [*(spec.parent / f"models/hf/{name}" for name in ("base", "flowers")), spec.parent / "merged"]


MADE: dict[str, Callable[[Path, Path], Sequence[object]]] = {
    "analyze": lambda spec, run: (spec, "--out", run),
    "merge": lambda spec, run: (spec, "--method", "regmean", "--out", run),
    "why": lambda spec, run: (
        *named_models(spec),
        "--data",
        spec.parent / "models/flowers.npz",
        "--out",
        run,
    ),
    "demo": lambda spec, run: ("--suite", "image", "--out", run),
}
"""Commands that make something, by what they are given: a spec, and the folder to make."""
ADDED: dict[str, Callable[[Path], Sequence[object]]] = {
    "calibrate": lambda run: (run, "--name", "repaired", "--auto"),
    "sweep": lambda run: (run, "--param", "alpha=0.3,0.6"),
}
"""Commands that look at a run, or add to it."""
COMPOSED = {"demo", "sweep"}
"""Made of what the others do."""
ELSEWHERE = {
    "validate": "runs no model",
}
"""Commands that make nothing."""


def test_every_command_that_takes_a_device_is_tried() -> None:
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    computing = {name for name, command in commands.items() if any(each.name == "device" for each in command.params)}
    assert computing == {*MADE, *ADDED, *ELSEWHERE}


def done(command: str, *given: object, device: str) -> None:
    arguments = [command, *map(str, given), "--device", device]
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--progress", "none"])
    assert leaving.value.code == 0, arguments


@pytest.fixture(scope="module")
def spec(pretended: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    made = build(folder / "models")
    save_transformers(merged_weights(made), folder / "merged")
    for seed, task in enumerate(made.tasks):
        write_images(made.data(task), CLASSES[task], seed, train=9)  # what is chosen takes eight samples
    values = made.spec()
    values["data"]["defaults"]["n"] = 8
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(dl.analyze(spec, out=tmp_path_factory.mktemp("run") / "run", progress="none").path)


def equal_tables(folder: Path, other: Path) -> None:
    found, expected = tables(folder), tables(other)
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)


Played = Callable[[str, Path, str], Path]


@pytest.fixture(scope="module")
def played(spec: Path, run: Path) -> Played:
    """Runs a command on a device, and returns the folder that it made or added to."""

    def play(command: str, folder: Path, device: str) -> Path:
        if command in ADDED:
            shutil.copytree(run, folder)
            done(command, *ADDED[command](folder), device=device)
            return folder
        with pytest.MonkeyPatch.context() as patch:  # a smaller suite in the place of the embedded one
            patch.setattr("driftlens.demo.spec_file", lambda _: spec)
            done(command, *MADE[command](spec, folder), device=device)
        return folder

    return play


@pytest.fixture(scope="module", params=[*MADE, *ADDED])
def on_cpu(
    request: pytest.FixtureRequest, played: Played, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A command, and what it makes on the CPU."""
    if request.param in COMPOSED and not os.environ.get("DRIFTLENS_EVERY"):
        pytest.skip("made of what the others do; `make every` runs it")
    with sdpa_kernel([SDPBackend.MATH]):
        return request.param, played(request.param, tmp_path_factory.mktemp("cpu") / "run", "cpu")


@pytest.mark.parametrize(
    ("place", "switches"),
    [
        pytest.param(NAME, {}, id="plain", marks=pytest.mark.every),
        pytest.param(f"{NAME}:1", {"no_double": True, "lacks": LACKED}, id="second_as_apples"),
    ],
)
def test_a_command(
    sim: torch.device,
    on_cpu: tuple[str, Path],
    played: Played,
    tmp_path: Path,
    place: str,
    switches: dict[str, Any],
) -> None:
    command, expected = on_cpu
    turn(**switches)
    found = played(command, tmp_path / "there", place)
    equal_tables(found, expected)
    weights = {file.relative_to(expected) for file in expected.rglob("*.safetensors")}
    assert weights or tables(expected)
    if command == "analyze":
        notices = dl.open_run(found).manifest.notices
        assert len([text for text in notices if "has no cholesky, eigh" in text]) == ("lacks" in switches)
    for file in weights:
        ours, theirs = (load_file(folder / file) for folder in (found, expected))
        assert ours.keys() == theirs.keys()
        assert not [key for key in theirs if not same(ours[key], theirs[key])], file


JOBS: dict[str, Sequence[object]] = {
    "analyze": ("analyze",),
    "calibrate": ("calibrate", "--name", "repaired", "--no-attribution"),
    "auto": ("calibrate", "--name", "repaired", "--auto", "--no-attribution"),
    "methods": ("sweep", "--methods", "featcal,residual:folds=2"),
}
TROUBLE: list[tuple[dict[str, Any], str]] = [
    ({"is_gone": True}, "sim no longer responds"),
    ({"limit": 0}, "sim has too little memory to"),
]


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """How a command ends, and what it says of an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main([*map(str, arguments)])
    assert isinstance(leaving.value.code, int)
    return leaving.value.code, capsys.readouterr().err


@pytest.mark.parametrize("job", few(JOBS, (), some=["analyze", "calibrate"]))
def test_a_job_whose_device_fails_in_the_middle_goes_on(
    sim: torch.device,
    spec: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: str,
) -> None:
    """It vanishes, and when the job goes on it is full."""
    command, *options = JOBS[job]
    take = FeatureStream.take

    def arguments(folder: Path, device: str) -> list[object]:
        if command == "analyze":
            return [command, spec, "--out", folder, "--device", device, "--progress", "none"]
        return [command, folder, *options, "--device", device, "--progress", "none"]

    folders = {device: tmp_path / device for device in ("cpu", NAME)}
    for folder in folders.values():
        if command != "analyze":
            shutil.copytree(run, folder)
    assert told(capsys, *arguments(folders["cpu"], "cpu"))[0] == 0
    more = [] if job == "methods" else ["--resume"]
    for number, (trouble, says) in enumerate(TROUBLE):
        calls = itertools.count()

        def failing(
            self: FeatureStream,
            *given: Any,
            calls: Iterator[int] = calls,
            trouble: Any = trouble,
            **named: Any,
        ) -> Any:
            if next(calls) == 9:
                turn(**trouble)
            return take(self, *given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(FeatureStream, "take", failing)
            code, said = told(capsys, *arguments(folders[NAME], NAME), *(more if number else []))
        error, hint = said.rstrip("\n").rsplit("\n", 1)
        assert code == RunError.exit_code and "\n" not in error.removeprefix("\n")
        assert says in error and hint.startswith("hint: ")
        turn()
    assert told(capsys, *arguments(folders[NAME], NAME), *more)[0] == 0
    equal_tables(folders[NAME], folders["cpu"])
