"""What once broke "one paragraph, and a documented exit code", by name: each through the command line."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from driftlens.runs.manifest import calibration_marker
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import sanitize_text
from tests.cli.conftest import Result, run_cli
from tests.pipelines.fixtures import light, world
from tests.quick import few
from tests.reads.guard import within_bounds
from tests.zoo.world import World

__all__ = ["light", "run_cli", "world"]

Cli = Callable[..., Result]
Refused = Callable[..., Result]
Spec = Callable[..., Path]
HUGE = "9" * 5000
"""More digits than Python reads without being told to."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written by a command that should have been refused lies with the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def assert_refused(run_cli: Cli) -> Refused:
    """Asserts that a command line ends in a paragraph about what is wrong and a documented code, within seconds."""

    def run(*line: object, says: str, codes: tuple[int, ...] = (2, 4)) -> Result:
        with within_bounds():
            result = run_cli(*line)
        assert result.code in codes, (result.code, result.err)
        assert re.search(f"(error: |PROBLEM)(.|\n)*({says})", result.err + result.out), (line, result)
        assert "Traceback" not in result.err and "defect" not in result.err
        assert len(result.err.splitlines()) < 70 and sanitize_text(result.err) == result.err
        return result

    return run


@pytest.fixture
def assert_answered(run_cli: Cli) -> Callable[..., None]:
    """Asserts that command lines end in a result, in a check that fails or in a paragraph about what is wrong."""

    def run(*lines: tuple[object, ...], codes: tuple[int, ...] = (0, 3, 4)) -> None:
        for line in lines:
            with within_bounds():
                result = run_cli(*line)
            assert result.code in codes, (line, result.err)
            assert "Traceback" not in result.err and "defect" not in result.err, (line, result.err)

    return run


@pytest.fixture
def run(light: DriftRun, tmp_path: Path) -> Path:
    """A copy of a finished run to spoil."""
    return Path(shutil.copytree(light.path, tmp_path / "run"))


@pytest.fixture
def spec(world: World, tmp_path: Path) -> Spec:
    """Writes a spec of one task with these sections."""

    def write(**changes: Any) -> Path:
        file = tmp_path / "spec.yaml"
        file.write_text(yaml.safe_dump(world.one_task(metrics={"jacobian": False}, **changes)))
        return file

    return write


@pytest.mark.slow
@pytest.mark.parametrize("seed", [str(2**63), str(2**64), HUGE, "-1", "1e30", "0.5"], ids=lambda seed: seed[:6])
def test_seeds_beyond_64_bits(assert_refused: Refused, spec: Spec, run: Path, seed: str) -> None:
    assert_refused("analyze", spec(), "--out", "out", "--set", f"data.defaults.seed={seed}", says="seed")
    assert_refused("demo", "--out", "out", f"--seed={seed}", says="seed")
    assert_refused("calibrate", run, "--name", "a", "--method", "surgery", "--set", f"seed={seed}", says="seed")


@pytest.mark.parametrize(
    "seeds", few(["1e30", HUGE, str(10**30), "0", "1000000000"], ["1e30", HUGE]), ids=lambda seeds: seeds[:5]
)
def test_draws_without_end(assert_refused: Refused, run: Path, seeds: str) -> None:
    assert_refused("sweep", run, "--param", "lam=0.1", "--seeds", seeds, says="seeds")
    assert_refused("sweep", run, "--param", f"n={seeds}", says="n is|n=|integer|n ")


Entry = tuple[str, bytes]
ARCHIVES: dict[str, Callable[[str, bytes], Entry]] = {
    "no names": lambda name, content: (name.replace("data.pkl", "other.pkl"), content),
    "no folder": lambda name, content: (name.rpartition("/")[2], content),
    "climbing": lambda name, content: (f"../../{name}", content),
    "version": lambda name, content: (name, b"9" * 5000 if name.endswith("version") else content),
    "no version": lambda name, content: (name, b"" if name.endswith("version") else content),
    "byteorder": lambda name, content: (name, b"middle" if name.endswith("byteorder") else content),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives_of_pytorch_with_broken_names_or_versions(
    assert_answered: Callable[..., None], world: World, spec: Spec, tmp_path: Path, kind: str
) -> None:
    """Some are read all the same; then with the numbers that are in them."""
    right, spoiled = tmp_path / "right.pt", tmp_path / "spoiled.pt"
    torch.save(load_file(world.weights("base")), right)
    with zipfile.ZipFile(right) as old, zipfile.ZipFile(spoiled, "w") as new:
        for entry in old.infolist():
            new.writestr(*ARCHIVES[kind](entry.filename, old.read(entry)))
    assert_answered(("validate", spec(base={"weights": str(spoiled)})), codes=(0, 4))
    assert not (tmp_path.parent / "data.pkl").exists()


DEEP = "[" * 5000


@pytest.mark.parametrize(
    "text",
    few([DEEP, '{"a":' * 5000, f'{{"weight_map": {DEEP}}}', f'{{"n": {HUGE}}}', "\ud800"], [DEEP, "\ud800"]),
    ids=range(5),
)
def test_json_that_is_none_in_an_index_or_in_lines(
    assert_refused: Refused, spec: Spec, world: World, tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors.index.json", "config.json"):
        (folder / name).write_text(text, errors="surrogatepass")
    assert_refused("validate", spec(base={"weights": str(folder)}), says="model")
    assert_refused("validate", spec(architecture={"loader": "hf-clip", "source": str(folder)}), says="model")
    lines = tmp_path / "a.jsonl"
    lines.write_text(text + "\n", errors="surrogatepass")
    data = {world.tasks[0]: {"kind": "jsonl", "calibration": str(lines), "test": str(lines)}}
    assert_refused("validate", spec(data=data, heads=None), says=r"a\.jsonl")


SETTINGS = (
    "",
    "{",
    "[]",
    "7",
    "null",
    '{"settings": 7}',
    DEEP,
    '{"method": {"a": 1}, "settings": []}',
    "\udcff",
)


@pytest.mark.slow
@pytest.mark.parametrize("text", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_of_an_interrupted_calibration_that_are_damaged(
    assert_refused: Refused, run: Path, text: str
) -> None:
    file = run / calibration_marker("a")
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert_refused("calibrate", run, "--name", "a", "--resume", "--progress", "none", says="settings|a")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["twice", "missing", "number", "no column"])
@pytest.mark.parametrize("table", ["layers", "accuracy", "samples", "sweeps", "calibration"])
def test_tables_whose_keys_are_not_unique_or_not_there(
    assert_answered: Callable[..., None], run: Path, table: str, change: str
) -> None:
    file = run / f"tables/{table}.parquet"
    if not file.exists():
        pytest.skip("this run has none")
    frame = pd.read_parquet(file)
    key = "task"
    if change == "twice":
        frame = pd.concat([frame, frame])
    elif change == "missing":
        frame[key] = frame[key].astype(object).where(frame.index > 0, None)
    elif change == "number":
        frame[key] = range(len(frame))
    else:
        frame = frame.drop(columns=key)
    frame.to_parquet(file)
    assert_answered(
        ("show", run),
        ("check", run),
        ("report", run, "--format", "md,json", "--out", run.parent / "out"),
        ("calibrate", run, "--name", "a", "--progress", "none"),
        ("sweep", run, "--param", "lam=0.1", "--progress", "none"),
        ("view", run, "--out", run.parent / "view.html"),
    )


@pytest.mark.slow
def test_names_that_steer_a_terminal(assert_refused: Refused, run_cli: Cli, spec: Spec, run: Path) -> None:
    steering = "\x1b]0;owned\x07\x9b2J\u202e"
    assert_refused("validate", spec(experts={steering: {"weights": "x.pt"}}), says="owned")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"name": steering, "warnings": [steering]}))
    for line in (("show", run), ("ls", run.parent), ("-v", "show", run), ("check", run)):
        result = run_cli(*line)
        assert sanitize_text(result.out + result.err) == result.out + result.err, line
