"""Inputs that once ended in a traceback, a hang or a steered terminal, each with the words of its refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import driftlens.cli as cli
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.spec import load_spec, parse_recipe
from driftlens.config.types import MOST_CHARACTERS, parse_yaml
from driftlens.utils.errors import CheckpointError, DataError, SpecError, sanitize_text
from driftlens.utils.files import parse_json
from driftlens.utils.registry import resolve_settings
from tests.cli.conftest import Result, run_cli
from tests.pipelines.fixtures import light, world
from tests.quick import few
from tests.reads.guard import within_bounds
from tests.zoo.world import World

__all__ = ["light", "run_cli", "world"]

Cli = Callable[..., Result]

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + chr(ord(name) - 1)] * 9)}]\n" for name in "bcdefghi"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('version: !!int ""', "not a value of"),
        ("x: !!bool x", "not a value of"),
        ("x: !!timestamp abc", "not a value of"),
        ("x: 0x" + "f" * 20_000, "more than 64 bits"),
        ("x: " + ":".join(["59"] * 4000), "more than 64 bits"),
        ("a: &a [*a]", "aliases counted in full"),
        (BOMB, "aliases counted in full"),
        ("x: " + "a" * MOST_CHARACTERS, "at most"),
    ],
    ids=["int", "bool", "time", "hexadecimal", "sexagesimal", "cycle", "bomb", "long"],
)
def test_values_that_are_none_are_refused_with_their_place(text: str, words: str) -> None:
    with within_bounds(), pytest.raises(SpecError, match=words):
        parse_yaml(text, "spec")


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "a\x00b", "x" * 300, "\x1b[31m"])
def test_paths_that_no_file_can_have_are_refused(world: World, path: str) -> None:
    with pytest.raises(SpecError, match=r"base\.weights") as refused:
        load_spec(world.spec(base={"weights": f"./{path}" if path[0] != "~" else path}))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("out", few(["~nobody-of-that-name", "~nobody-of-that-name/x"], ["~nobody-of-that-name/x"]))
@pytest.mark.parametrize(
    "line",
    ["analyze SPEC", "merge SPEC --method average", "merge SPEC", "report RUN --format md", "init"],
    ids=lambda line: " ".join(line.split()[:3]),
)
def test_a_home_folder_of_nobodys_is_refused_before_anything_is_done(
    run_cli: Cli,
    world: World,
    light: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    out: str,
) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(world.spec()))
    monkeypatch.chdir(tmp_path)
    stands = {"SPEC": "spec.yaml", "RUN": str(light.path)}
    result = run_cli(*(stands.get(word, word) for word in line.split()), "--out", out)
    assert result.code == 2 and result.message == f"{out}: the home folder does not exist", result.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_home_folder_is_spelled_out_where_no_shell_has_done_so(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli("init", "--out=~/run.yaml").code == 0
    assert (tmp_path / "run.yaml").is_file()


def test_a_run_in_a_folder_that_begins_with_a_tilde_is_read_where_it_was_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~nobody").mkdir()
    (tmp_path / "~nobody/a.safetensors").write_bytes(world.weights("base").read_bytes())
    assert open_checkpoint(Path("~nobody/a.safetensors")).headers


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"merge_method": None}, "merge_method is None"),
        ({"models": []}, "it names no models besides the base"),
        ({"models": ["one"]}, "models is "),
        ({"models": [{"parameters": {"weight": 1}}]}, "the model 'None' is no path"),
        ({"models": [{"model": "one+"}]}, "the model 'one.' is no path"),
        ({"slices": [[{"model": "one"}]]}, "slices is "),
    ],
    ids=["method", "no models", "words", "nameless", "no adapter", "slices"],
)
def test_recipes_of_another_shape_are_refused(made: dict[str, Any], words: str) -> None:
    right = {"merge_method": "linear", "models": [{"model": "one"}, {"model": "two"}]}
    with within_bounds(), pytest.raises(SpecError, match=f"mergekit recipe: {words}"):
        parse_recipe(right | made)


def test_a_spec_of_more_experts_than_anybody_has_is_refused(world: World) -> None:
    with within_bounds(), pytest.raises(SpecError, match="at most 1000"):
        load_spec(world.spec(experts={f"t{number}": {"weights": "x.pt"} for number in range(2000)}, heads={}, data={}))


def test_whole_numbers_beyond_the_machines_are_no_settings() -> None:
    def method(*, seed: int = 0) -> None: ...

    with pytest.raises(SpecError, match="seed is"):
        resolve_settings(method, {"seed": 2**63}, "method")
    assert resolve_settings(method, {"seed": 2**63 - 1}, "method") == {"seed": 2**63 - 1}


def test_json_nested_without_end_is_no_json(tmp_path: Path) -> None:
    deep = "[" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep)
    (tmp_path / "model.safetensors.index.json").write_text(deep)
    with pytest.raises(CheckpointError, match="not an index of shards"):
        open_checkpoint(tmp_path)


def test_a_text_towers_configuration_that_is_not_its_weights_is_refused(
    run_cli: Cli, world: World, tmp_path: Path
) -> None:
    spec = world.one_task(heads={world.tasks[0]: {"templates": ["a {}."]}})
    config = json.loads(Path(spec["architecture"]["source"]).read_text())
    config["model_cfg"]["text_cfg"]["context_length"] += 1
    spec["architecture"]["source"] = str(tmp_path / "model_config.json")
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    result = run_cli("analyze", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert result.code == 4 and "loading state_dict" in result.err, result.err


def test_what_files_say_never_steers_the_terminal(run_cli: Cli, tmp_path: Path, world: World) -> None:
    steering = "\x1b]0;owned\x07\x9b2J\u202e"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(world.spec() | {steering: 1}))
    result = run_cli("validate", file)
    assert result.code == 2 and "unknown key" in result.err
    assert sanitize_text(result.err) == result.err and "\x1b" not in result.err


def test_a_json_document_spells_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    from driftlens.cli.app import print_json

    print_json({"name": "a\x9bb\u202e"})
    written = capsys.readouterr().out
    assert "\x9b" not in written and json.loads(written) == {"name": "a\x9bb\u202e"}


@pytest.mark.slow
def test_messages_end_on_their_first_page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SpecError("\n".join(f"problem {number} {'x' * 5000}" for number in range(20_000)))

    monkeypatch.setattr("driftlens.runs.run.open_run", fail)
    assert cli.run_command_line(["show", "."]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "... and 19,940 more lines" and len(lines) == 61
    assert max(map(len, lines)) < 2100


ODD = "a device, a pipe or a socket"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe that nobody writes to: whoever opens it waits."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def at(pipe: Path, name: str) -> Path:
    """The pipe under another name."""
    pipe.with_name(name).parent.mkdir(exist_ok=True)
    return pipe.rename(pipe.with_name(name))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.bin"])
def test_a_pipe_is_no_weights(pipe: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=ODD):
        open_checkpoint(at(pipe, name))


DATA = (
    "a.npz npz file",
    "a.jsonl jsonl",
    "a.csv table",
    "a.parquet table",
    "a.tar webdataset",
    "a imagefolder",
)


@pytest.mark.parametrize("device", ["/dev/zero", "PIPE"])
@pytest.mark.parametrize("kind", DATA)
def test_devices_and_pipes_are_no_data(world: World, tmp_path: Path, pipe: Path, kind: str, device: str) -> None:
    from driftlens.data.sources import open_split
    from driftlens.utils.distributed import Permissions

    name, source, *key = kind.split()
    place = tmp_path / name
    if source == "imagefolder":
        (tmp_path / "a/cat").mkdir(parents=True)
        place = tmp_path / "a/cat/picture.png"
    place.symlink_to(device.replace("PIPE", str(pipe)))
    keys = key or ["calibration", "test"]
    entry = {"kind": source} | dict.fromkeys(keys, str(tmp_path / name))
    spec = load_spec(world.one_task(data={world.tasks[0]: entry}, heads=None))
    with within_bounds(), pytest.raises(DataError, match=ODD):
        view = open_split(spec.data.tasks[world.tasks[0]], "calibration", Permissions())
        view.read(0)


@pytest.mark.parametrize("name", ["manifest.json", "status.json", "spec.yaml", "tables/layers.parquet"])
def test_a_pipe_in_a_run_is_refused(run_cli: Cli, light: Any, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(light.path, tmp_path / "run"))
    (run / name).unlink()
    os.mkfifo(run / name)
    result = run_cli("analyze" if name == "spec.yaml" else "show", run)
    assert ODD in result.err + result.out and result.code in (0 if name == "status.json" else 4, 2), result


def test_a_recipe_is_no_pipe_but_what_a_shell_hands_down_is(run_cli: Cli, pipe: Path, world: World) -> None:
    result = run_cli("merge", pipe, "--out", pipe.with_name("out"))
    assert result.code == 2 and ODD in result.err, result.err
    reader, writer = os.pipe()
    os.write(writer, yaml.safe_dump(world.spec()).encode())
    os.close(writer)
    assert load_spec(Path(f"/dev/fd/{reader}")).version == 1
    os.close(reader)


@pytest.mark.parametrize("line", [("check", "RUN", "--junit", "FOLDER"), ("show", "x" * 5000)])
def test_the_file_systems_refusals_are_no_defects(
    run_cli: Cli, light: Any, tmp_path: Path, line: tuple[str, ...]
) -> None:
    (tmp_path / "folder").mkdir()
    stands = {"RUN": light.path, "FOLDER": tmp_path / "folder"}
    result = run_cli(*(stands.get(word, word) for word in line))
    assert result.code in (3, 4) and "defect" not in result.err


@pytest.mark.parametrize(
    "place",
    ["calibrations", "tables", "features/flowers", "reports", "scratch", "events.jsonl", "run.lock.guard"],
)
@pytest.mark.parametrize(
    "line",
    [
        "calibrate RUN --name q2 --method featcal",
        pytest.param("report RUN --format md", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_not_written_to_through_a_link_that_leads_out_of_it(
    run_cli: Cli, light: Any, tmp_path: Path, place: str, line: str
) -> None:
    run, outside = Path(shutil.copytree(light.path, tmp_path / "run")), tmp_path / "elsewhere"
    (run / place).rename(outside) if (run / place).exists() else outside.mkdir()
    before = outside.read_bytes() if outside.is_file() else sorted(outside.rglob("*"))
    (run / place).symlink_to(outside)
    result = run_cli(*(str(run) if word == "RUN" else word for word in line.split()))
    assert result.code == 4 and f"{place} is a link that leads out of the run" in result.err, result.err
    assert before == (outside.read_bytes() if outside.is_file() else sorted(outside.rglob("*")))
    assert run_cli("show", run).code == 0


def test_a_run_that_is_a_link_itself_and_links_that_stay_inside_are_written_to(
    run_cli: Cli, light: Any, tmp_path: Path
) -> None:
    real = Path(shutil.copytree(light.path, tmp_path / "real"))
    (real / "figures").mkdir()
    (real / "reports").symlink_to("figures")
    (tmp_path / "run").symlink_to(real)
    result = run_cli("report", tmp_path / "run", "--format", "md")
    assert result.code == 0, result.err
    assert list((real / "figures").iterdir())
