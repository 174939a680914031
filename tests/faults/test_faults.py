"""Kill -9, signals in any number, full and read-only disks, vanished folders, clocks that are set: nothing is lost.

Of every command and fault as many moments as `DRIFTLENS_FAULTS` says (`make faults`: 5, which makes 240), each drawn
from the name of the case. CI draws one of every fifth pair.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from driftlens.runs.run import DriftRun
from tests.faults.essence import differences, essence
from tests.faults.moments import FAULTS
from tests.faults.worker import CAN_BE_ANYBODY, Ended, run
from tests.pipelines.fixtures import light, world
from tests.quick import few, paced
from tests.zoo.world import World

__all__ = ["light", "world"]

Again = Callable[[list[str]], list[str]]


def resumed(line: list[str]) -> list[str]:
    return [*line, "--resume"]


def repeated(line: list[str]) -> list[str]:
    return line


@dataclass(frozen=True)
class Command:
    """A command line, in which FOLDER and SPEC stand for paths, and how it is gone on with."""

    line: str
    again: Again = repeated
    on_run: bool = True


COMMANDS = {
    "analyze": Command("analyze SPEC --out FOLDER --progress none", resumed, on_run=False),
    "calibrate": Command("calibrate FOLDER --name a --progress none", resumed),
    "sweep": Command("sweep FOLDER --param lam=0.1,0.5 --progress none", resumed),
    "merge": Command("merge SPEC --method average --out FOLDER/model --progress none", on_run=False),
    "sweep --methods": Command("sweep FOLDER --methods featcal:lam=0.2,residual --progress none"),
    "report": Command("report FOLDER --format md,json,csv"),
}
DONE_OR_CANCELLED, DONE_OR_REFUSED = frozenset({0, 130}), frozenset({0, 4})
"""Where 0: what came was not looked for any more, or nothing was left to write."""
CODES: dict[str, frozenset[int]] = {
    "kill": frozenset({-9}),
    **dict.fromkeys(("twice", "storm", "hangup"), DONE_OR_CANCELLED),
    **dict.fromkeys(("full", "readonly", "vanished"), DONE_OR_REFUSED),
    "clock": frozenset({0}),
}
PAIRS = [(command, fault) for fault in CODES for command in COMMANDS]
SOME = {pair for at, pair in enumerate(PAIRS) if (at + at // len(COMMANDS)) % 5 == 0}
SOME |= {
    ("calibrate", "kill"),
    ("calibrate", "full"),
    ("merge", "kill"),
    ("merge", "storm"),
    ("merge", "readonly"),
}
"""Every fifth pair of command and fault, in steps through both, and five more."""
MANY = int(os.environ.get("DRIFTLENS_FAULTS", "0"))


def cases() -> Iterator[Any]:
    for command, fault in PAIRS:
        for number in range(MANY or 1):
            marks = () if MANY else paced((command, fault), (), SOME)
            yield pytest.param(command, fault, number, marks=marks, id=f"{command}-{fault}-{number}")


@dataclass
class Bench:
    """Where commands run, what they begin with, and what they reach when nothing goes wrong."""

    folder: Path
    spec: Path
    start: DriftRun
    reached: dict[str, tuple[int, dict[str, Any]]]

    def place(self, command: str, name: str) -> Path:
        """A folder of that name in which the command can begin."""
        place = self.folder / name / "run"
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        if COMMANDS[command].on_run:
            shutil.copytree(self.start.path, place)
        return place

    def line(self, command: str, place: Path) -> list[str]:
        stands = {"FOLDER": str(place), "SPEC": str(self.spec)}
        line = COMMANDS[command].line
        for word, path in stands.items():
            line = line.replace(word, path)
        return line.split()

    def run(self, line: list[str], place: Path, *fault: Any) -> Ended:
        """The command line with a fault, in a process of its own."""
        return run(line, place, self.folder / "moments", *fault)

    def plain(self, command: str) -> tuple[int, dict[str, Any]]:
        """How many moments the command has, and what it reaches."""
        if command not in self.reached:
            place = self.place(command, "case")  # where all cases are: paths are told
            ended = self.run(self.line(command, place), place)
            assert ended.code == 0, ended.err
            self.reached[command] = ended.moments, essence(place)
        return self.reached[command]


@pytest.fixture(scope="module")
def bench(world: World, light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("faults")
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(world.one_task(metrics={"jacobian": False})))
    return Bench(folder, spec, light, {})


def leftovers(place: Path) -> list[str]:
    """What a process that could still put things in order should have removed."""
    found = [path for path in place.parent.rglob("*") if path.name.startswith(".partial-") or path.name == "run.lock"]
    status = place / "status.json"
    running = [f"{status} says running"] if status.exists() and _state(status) == "running" else []
    return [*map(str, found), *running]


def _state(status: Path) -> str:
    return str(json.loads(status.read_text())["state"])


@pytest.mark.parametrize(("command", "fault", "number"), list(cases()))
def test_nothing_is_lost_and_nothing_is_left(bench: Bench, command: str, fault: str, number: int) -> None:
    moments, wanted = bench.plain(command)
    draw = random.Random(f"{command} {fault} {number}")
    at, other = draw.randrange(moments), draw.randrange(1000)
    place = bench.place(command, "case")
    line = bench.line(command, place)
    ended = bench.run(line, place, fault, at, other)
    where = f"{fault} at moment {at} of {moments}, {other}: {ended}"
    assert ended.code in CODES[fault], where
    assert_is_said(ended, where)
    if fault == "vanished":
        assert ended.code == 4 or not place.exists() or not differences(essence(place), wanted), where
        assert command == "merge" or ended.code == 0 or not place.exists(), f"it came back: {where}"
        return
    if fault in ("twice", "storm", "hangup"):
        assert not leftovers(place), where
    is_whole = command == "merge" and (place / "model").exists()
    if ended.code != 0 and not is_whole:
        again = bench.run(COMMANDS[command].again(line), place)
        assert again.code == 0, f"{where}\nthen {again}"
    assert not leftovers(place), where
    assert not (found := differences(essence(place), wanted)), "\n".join([where, *found])
    if (place / "manifest.json").exists():
        verified = bench.run(["check", str(place)], place)
        assert verified.code == 0, verified.out + verified.err


def assert_is_said(ended: Ended, where: str) -> None:
    """A paragraph, and never that it is a defect."""
    assert "Traceback" not in ended.err and "defect" not in ended.err, where
    if ended.code == 4:
        assert "error: " in ended.err and "hint: " in ended.err, where
    if ended.code == 130:
        assert "cancelled" in ended.err, where


def test_every_fault_is_tried() -> None:
    assert {*CODES} == {*FAULTS} - {"nothing"}


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Callable[[int], object]]:
    """A disk of so many bytes over a folder, and what makes it larger; skipped where nothing can be mounted."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("nobody may mount a disk here")
    try:
        yield lambda more: subprocess.run(
            ["mount", "-o", f"remount,size={more}", folder], check=True, capture_output=True
        )
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


LARGE = 1 << 28
REALLY = ("calibrate", "merge", "report")
"""Commands of each kind: one that continues, one that repeats, and one that only reads."""


@pytest.mark.slow
@pytest.mark.parametrize("command", few(COMMANDS, (), some=REALLY))
def test_a_disk_that_is_really_full(bench: Bench, command: str) -> None:
    """The faults above say that it is; here it is, at a share of what the command writes in all."""
    _, wanted = bench.plain(command)
    place = bench.place("analyze", "case")
    line = bench.line(command, place)

    def begun() -> int:
        if COMMANDS[command].on_run:
            shutil.copytree(bench.start.path, place)
        return shutil.disk_usage(place.parent).used

    with disk(place.parent, LARGE):
        before = begun()
        assert bench.run(line, place).code == 0
        after = shutil.disk_usage(place.parent).used
    with disk(place.parent, LARGE) as grow:
        begun()
        grow(before + int((0.8 if command in REALLY else 0.3) * (after - before)))
        ended = bench.run(line, place)
        assert ended.code == 4 and "No space left" in ended.err, ended
        assert_is_said(ended, command)
        # That it failed may find no room either; the next command sees that no process is there.
        assert not [left for left in leftovers(place) if "says running" not in left]
        grow(LARGE)
        again = bench.run(COMMANDS[command].again(line) if place.exists() else line, place)
        assert again.code == 0, again
        assert not leftovers(place) and not differences(essence(place), wanted)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.skipif(not CAN_BE_ANYBODY, reason="root may write anywhere, and can't be kept from it")
@pytest.mark.parametrize("command", few(COMMANDS, (), some=REALLY))
def test_a_folder_that_is_really_read_only(bench: Bench, command: str) -> None:
    _, wanted = bench.plain(command)
    place = bench.place(command, "case")
    line, before = bench.line(command, place), content(place.parent)
    every = [place.parent, *place.parent.rglob("*")]
    for path in every:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        ended = bench.run(line, place)
    finally:
        for path in every:
            path.chmod(path.stat().st_mode | 0o200)
    assert ended.code == 4, ended
    assert_is_said(ended, command)
    assert content(place.parent) == before
    assert bench.run(line, place).code == 0
    assert not differences(essence(place), wanted)
