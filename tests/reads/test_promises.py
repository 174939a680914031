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

from driftlens.base.errors import harmless
from driftlens.runs.layout import begun_calibration
from driftlens.runs.run import DriftRun
from tests.cli.conftest import Result, run_cli
from tests.pipeline.fixtures import light, world
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
        assert len(result.err.splitlines()) < 70 and harmless(result.err) == result.err
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


SCALARS = ('!!int ""', "!!bool x", HUGE, "1e30", "-1", "2020-13-45", "!!float x", "0x" + "f" * 5000)


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: value[:12])
def test_scalars_of_yaml(assert_refused: Refused, spec: Spec, value: str) -> None:
    assert_refused("validate", spec(), "--set", f"data.defaults.seed={value}", says="seed|YAML")
    file = spec()
    file.write_text(file.read_text() + f"\nseed: {value}\n")
    assert_refused("validate", file, says="seed|not a value of|more than 64 bits")


def test_a_number_with_underscores_is_one_as_in_python(run_cli: Cli, spec: Spec) -> None:
    """`1_` once ended in a traceback; YAML 1.1 reads it as 1."""
    assert run_cli("validate", spec(), "--set", "data.defaults.seed=1_").code == 0
    assert run_cli("validate", spec(), "--set", "data.defaults.seed=_").code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["~nobody-of-that-name/x", "x" * 300, "a/" * 3000 + "x"], ids=lambda path: path[:6]
)
def test_paths_that_no_file_can_have(assert_refused: Refused, spec: Spec, run: Path, path: str) -> None:
    for line in (
        ("show", path),
        ("validate", path),
        ("analyze", spec(), "--out", path),
        ("merge", spec(), "--method", "average", "--out", path),
        ("report", run, "--format", "md", "--out", path),
    ):
        assert_refused(*line, says=path[:60] if path[0] != "a" else "a/a/a/a")


def test_a_path_with_a_zero_byte(spec: Spec, assert_refused: Refused, world: World) -> None:
    assert_refused("validate", spec(base={"weights": "a\x00b"}), says=r"base\.weights")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["FILE/below", "/proc/below", "/dev/null/below", "FILE"])
@pytest.mark.parametrize(
    "line",
    [
        "analyze SPEC",
        "merge SPEC --method average",
        "report RUN --format md",
        "export RUN --figure drift",
        "init",
    ],
    ids=lambda line: line.split()[0],
)
def test_out_where_no_folder_can_be(
    assert_refused: Refused, spec: Spec, run: Path, tmp_path: Path, line: str, place: str
) -> None:
    if line == "merge SPEC --method average" and place == "FILE":
        pytest.skip("a file is what it writes")
    file = tmp_path / "file"
    file.write_text("mine")
    stands = {"SPEC": str(spec()), "RUN": str(run)}
    words = [stands.get(word, word) for word in line.split()]
    assert_refused(
        *words,
        "--out",
        place.replace("FILE", str(file)),
        says=place.replace("FILE", str(file)).split("/below")[0],
    )
    assert file.read_text() == "mine"


def test_junit_on_a_folder(assert_refused: Refused, run: Path, tmp_path: Path) -> None:
    assert_refused("check", run, "--junit", tmp_path, codes=(3, 4), says=tmp_path.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", ["²", "1-²", HUGE, "-1", "99", "1e30", "٣٣"], ids=lambda layers: layers[:5]
)
def test_layers_that_are_no_numbers(assert_refused: Refused, run: Path, layers: str) -> None:
    assert_refused("calibrate", run, "--name", "a", f"--layers={layers}", says="layer")
    assert_refused("calibrate", run, "--name", "a", f"--sites={layers}", says="site|module")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [str(2**63), str(2**64), HUGE, "-1", "1e30", "0.5"], ids=lambda seed: seed[:6]
)
def test_seeds_beyond_64_bits(assert_refused: Refused, spec: Spec, run: Path, seed: str) -> None:
    assert_refused("analyze", spec(), "--out", "out", "--set", f"data.defaults.seed={seed}", says="seed")
    assert_refused("demo", "--out", "out", f"--seed={seed}", says="seed")
    assert_refused(
        "calibrate", run, "--name", "a", "--method", "surgery", "--set", f"seed={seed}", says="seed"
    )


@pytest.mark.parametrize("seeds", ["1e30", HUGE, str(10**30), "0", "1000000000"], ids=lambda seeds: seeds[:5])
def test_draws_without_end(assert_refused: Refused, run: Path, seeds: str) -> None:
    assert_refused("sweep", run, "--param", "lam=0.1", "--seeds", seeds, says="seeds")
    assert_refused("sweep", run, "--param", f"n={seeds}", says="n is|n=|integer|n ")


@pytest.mark.parametrize("device", ["meta", "cuda:99", "quantum", "mps", "\x1b[31m"])
def test_devices_that_compute_nothing(assert_refused: Refused, spec: Spec, device: str) -> None:
    assert_refused("analyze", spec(), "--out", "out", "--device", device, says="device")
    assert_refused("validate", spec(), "--device", device, says="device")


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


@pytest.mark.parametrize("change", ["encrypted", "compression", "version"])
def test_arrays_in_odd_archives(
    assert_refused: Refused, world: World, spec: Spec, tmp_path: Path, change: str
) -> None:
    content = bytearray(world.data(world.tasks[0]).read_bytes())
    at = 0
    # Every entry of the directory, and what stands before it.
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        local = int.from_bytes(content[at + 42 : at + 46], "little")
        if change == "encrypted":
            content[at + 8] |= 1
            content[local + 6] |= 1
        elif change == "compression":
            content[at + 10], content[local + 8] = 99, 99
        else:
            content[at + 6] = 200
        at += 4
    file = tmp_path / "a.npz"
    file.write_bytes(content)
    data = {"defaults": {"n": 4, "n_diagnosis": 5}, world.tasks[0]: {"kind": "npz", "file": str(file)}}
    assert_refused(
        "analyze", spec(data=data), "--out", tmp_path / "out", "--progress", "none", says=r"a\.npz"
    )


DEEP = "[" * 5000


@pytest.mark.parametrize(
    "text", [DEEP, '{"a":' * 5000, f'{{"weight_map": {DEEP}}}', f'{{"n": {HUGE}}}', "\ud800"], ids=range(5)
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
    file = run / begun_calibration("a")
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


WRONG: dict[str, tuple[Any, ...]] = {
    "created": (5, None, "yesterday", "2026-13-45T99:00:00Z", []),
    "finished": (5, "x", {}),
    "schema_version": (1, "x", "1", "1.x", "²", None, "99999999999999999999.0"),
    "seeds": ([], {"samples": "x"}, None),
    "variants": ("merged", {}, [5], None),
    "tasks": (5, [None], [""], ["../.."]),
    "layers": (None, [5], [{"index": "x"}], [{}]),
    "files": ([], {"a": 5}, {"../../x": {"sha256": "", "bytes": "x", "rows": []}}),
    "phases": ([], {"merge": 5}, {"merge": {"state": 5, "seconds": "x", "started": 7}}),
    "calibrations": ([], {"a": 5}, {"a": {}}),
    "models": ([], {"base": 5}),
    "precision": ({"flowers": "x"}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_dates_and_numbers_of_the_wrong_kind_in_a_manifest(
    assert_answered: Callable[..., None], run: Path, name: str
) -> None:
    file = run / "manifest.json"
    right = json.loads(file.read_text())
    for value in WRONG[name]:
        file.write_text(json.dumps(right | {name: value}))
        report = ("report", run, "--format", "md", "--out", run.parent / "out")
        assert_answered(("show", run), ("ls", run.parent), ("check", run), report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *({"state": bad} for bad in (5, "x", None)),
        *({"heartbeat": bad} for bad in (5, "x", "2026-01-01", "2026-13-01T00:00:00Z")),
        *({"seconds": bad} for bad in ("x", 1e400, True)),
        *({"pid": bad} for bad in (-1, 2**70, "1", 0.5)),
        *({"done": bad} for bad in (-1, "x")),
        {"metrics": {"a": "x"}},
        {"error": {"type": 5}},
    ],
    ids=str,
)
def test_dates_and_numbers_of_the_wrong_kind_in_a_status(
    assert_answered: Callable[..., None], run: Path, change: dict[str, Any]
) -> None:
    file = run / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert_answered(("show", run), ("ls", run.parent), ("analyze", run))


UNREASONABLE = {
    "hidden_size": 2**31,
    "intermediate_size": 2**31,
    "image_size": 2**24,
    "num_hidden_layers": 2**63,
    "projection_dim": 2**40,
    "num_labels": 2**31,
}


@pytest.mark.slow
@pytest.mark.parametrize("key", UNREASONABLE)
@pytest.mark.parametrize("loader", ["hf-clip", "hf-auto"])
def test_configurations_that_ask_for_too_much(
    assert_refused: Refused, spec: Spec, world: World, tmp_path: Path, key: str, loader: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(world.weights("base", "hf"), folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("vision_config", {})):
        part[key] = UNREASONABLE[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused("validate", spec(architecture={"loader": loader, "source": str(folder)}), says="model")


@pytest.mark.slow
def test_names_that_steer_a_terminal(assert_refused: Refused, run_cli: Cli, spec: Spec, run: Path) -> None:
    steering = "\x1b]0;owned\x07\x9b2J\u202e"
    assert_refused("validate", spec(experts={steering: {"weights": "x.pt"}}), says="owned")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"name": steering, "warnings": [steering]}))
    for line in (("show", run), ("ls", run.parent), ("-v", "show", run), ("check", run)):
        result = run_cli(*line)
        assert harmless(result.out + result.err) == result.out + result.err, line
