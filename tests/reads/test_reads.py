"""Spoiled inputs of ten kinds, drawn at random: no traceback, no hang, no growth, and nothing of them is run.

How many of each kind: `DRIFTLENS_FUZZ`, which `make fuzz` sets to 25,000; the fast tests draw a few. What failed once
is an `@example` here or a case in `test_refused_inputs.py`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from PIL import Image
from safetensors.torch import save_file
from transformers import GPT2Config
from typer.main import get_command

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.cli import build_app, run_command_line as run_command
from driftlens.config.spec import is_mergekit_recipe, load_spec, parse_recipe
from driftlens.data.sources import open_split
from driftlens.experiment.study_loading import open_architecture
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import SpecError, sanitize_text
from tests.pipelines.fixtures import light, world
from tests.reads.guard import CANARY, MOST_GROWTH, peak, within_bounds
from tests.reads.spoiling import NASTY, byte_spoils, places, spoiled_bytes, spoiled_tree, tree_spoils
from tests.zoo.tokenizers import word_tokenizer
from tests.zoo.world import World

__all__ = ["light", "world"]

CASES = int(os.environ.get("DRIFTLENS_FUZZ", "15"))

many = settings(
    max_examples=CASES,
    deadline=None,
    # Nothing is kept on disk: what failed is printed as an example to put here.
    database=None,
    derandomize=CASES < 10_000,  # so that what passed once passes again; only `make fuzz` looks further
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


class Trap:
    """An object whose unpickling would leave a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CANARY.touch, ()


class Right:
    """What is right and gets spoiled; too much to be shown whenever a test fails."""

    def __init__(self, holds: Any) -> None:
        self.holds = holds

    def __repr__(self) -> str:
        return "..."


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that tests work in; afterwards it holds no canary, and the process has not grown."""
    folder, before, home = tmp_path_factory.mktemp("reads"), peak(), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(home)
    assert not (folder / CANARY).exists()
    assert peak() - before < MOST_GROWTH


@pytest.fixture(scope="module")
def good(world: World) -> Right:
    """A spec that is right, as plain values."""
    return Right(load_spec(world.spec()).as_dict())


@many
@given(spoils=tree_spoils)
def test_specs_with_wrong_values(good: Right, spoils: Any) -> None:
    with within_bounds():
        read = load_spec(spoiled_tree(good.holds, spoils))
        assert load_spec(read.as_dict()) == read


@many
@given(spoils=byte_spoils)
def test_spoiled_text_of_a_spec(good: Right, spoils: Any) -> None:
    file = Path("spoiled.yaml")
    file.write_bytes(spoiled_bytes(yaml.safe_dump(good.holds).encode(), spoils))
    with within_bounds():
        load_spec(file)


WEIGHTS = ("state.safetensors", "state.pt", "old.pt", "trap.pt", "whole.pt")


@pytest.fixture(scope="module")
def weights(world: World, place: Path) -> Right:
    """Files of weights that are right, one that holds code, and a pickled model, as bytes."""
    state = world.state("base")
    small = {name: state[name] for name in list(state)[:6]}
    torch.save({"state_dict": small}, place / "state.pt")
    torch.save(small, place / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"weight": Trap()}, place / "trap.pt")
    torch.save(torch.nn.Sequential(torch.nn.Linear(3, 2)), place / "whole.pt")
    shutil.copy(world.weights("base"), place / "state.safetensors")
    return Right({name: (place / name).read_bytes() for name in WEIGHTS})


@many
@given(name=st.sampled_from(WEIGHTS), spoils=byte_spoils)
def test_spoiled_weights(weights: Right, name: str, spoils: Any) -> None:
    file = Path(f"spoiled-{name}").absolute()
    file.write_bytes(spoiled_bytes(weights.holds[name], spoils))
    with within_bounds():
        source = open_checkpoint(file)
        for key in source.headers:
            source.read(key)


@many
@given(which=st.sampled_from(("config.json", "index")), spoils=tree_spoils)
def test_spoiled_configurations_and_indices(world: World, good: Right, which: str, spoils: Any) -> None:
    folder = Path("spoiled-model").absolute()
    folder.mkdir(exist_ok=True)
    right = world.weights("base", "hf")
    shutil.copy(right / "model.safetensors", folder / "one.safetensors")
    config = json.loads((right / "config.json").read_text())
    keys = list(open_checkpoint(right).headers)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(keys, "one.safetensors")}
    found = {"config.json": config, "index": index}
    found[which] = spoiled_tree(found[which], spoils)
    (folder / "config.json").write_text(json.dumps(found["config.json"]))
    (folder / "model.safetensors.index.json").write_text(json.dumps(found["index"]))
    with within_bounds():
        open_checkpoint(folder)
    told = good.holds | {"architecture": {"loader": "hf-clip", "source": str(folder)}}
    with within_bounds():
        open_architecture(load_spec(told), Permissions())


@pytest.fixture(scope="module")
def adapter(place: Path) -> Right:
    """A base of one module, and the settings of adapters for it that are right."""
    save_file({"proj.weight": torch.zeros(3, 4)}, place / "small-base.safetensors")
    folder = place / "spoiled-adapter"
    folder.mkdir()
    lora = {
        f"base_model.model.proj.lora_{part}.weight": torch.ones(*of) for part, of in (("A", (2, 4)), ("B", (3, 2)))
    }
    save_file(lora, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["proj"], "bias": "none"}
    more = {"rank_pattern": {}, "alpha_pattern": {"proj": 4}, "modules_to_save": None, "use_rslora": False}
    return Right(settings | more)


@many
@given(spoils=tree_spoils)
def test_spoiled_settings_of_adapters(adapter: Right, place: Path, spoils: Any) -> None:
    folder = place / "spoiled-adapter"
    (folder / "adapter_config.json").write_text(json.dumps(spoiled_tree(adapter.holds, spoils)))
    base = open_checkpoint(place / "small-base.safetensors")
    with within_bounds():
        source = open_checkpoint(folder, base=base)
        for key in source.headers:
            source.read(key)


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Right:
    """The files of a tokenizer that is right, as values."""
    folder = place / "tokenizer"
    word_tokenizer().save_pretrained(folder)
    return Right({file.name: json.loads(file.read_text()) for file in folder.glob("*.json")})


@many
@given(which=st.sampled_from(("tokenizer.json", "tokenizer_config.json")), spoils=tree_spoils)
def test_spoiled_tokenizers(tokenizer: Right, which: str, spoils: Any) -> None:
    folder = Path("spoiled-tokenizer").absolute()
    folder.mkdir(exist_ok=True)
    for name, content in (tokenizer.holds | {which: spoiled_tree(tokenizer.holds[which], spoils)}).items():
        (folder / name).write_text(json.dumps(content))
    with within_bounds():
        hf_text_preprocess(str(folder), GPT2Config(vocab_size=100), True, "decoder").example()


RECIPE: dict[str, Any] = {
    "base_model": "base",
    "models": [
        {"model": "one", "parameters": {"weight": 1, "density": [0.2, 0.6]}},
        {"model": "two", "parameters": {"weight": [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}]}},
    ],
    "dtype": "float32",
}


@many
@given(method=st.sampled_from(("linear", "ties", "dare_linear", "dare_ties", "slerp")), spoils=tree_spoils)
def test_spoiled_recipes_of_mergekit(method: str, spoils: Any) -> None:
    right = RECIPE | {"merge_method": method, "parameters": {"normalize": True, "lambda": 0.5}}
    with within_bounds():
        spoiled = spoiled_tree(right, spoils)
        if isinstance(spoiled, dict) and is_mergekit_recipe(spoiled):
            parse_recipe(spoiled)


def _pictures(place: Path) -> dict[str, Any]:
    for name in ("cat", "dog"):
        (place / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(place / "pictures" / name / "a.png")
    return {"kind": "imagefolder", "calibration": "pictures", "test": "pictures"}


def _arrays(place: Path) -> dict[str, Any]:
    x, y = np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 1, 0])
    np.savez_compressed(place / "a.npz", x_train=x, y_train=y, x_test=x, class_names=np.array(["cat", "dog"]))
    return {"kind": "npz", "file": "a.npz"}


def _lines(place: Path) -> dict[str, Any]:
    rows = [{"input": f"a {row}", "target": "b"} for row in range(3)]
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "jsonl", "calibration": "a.jsonl", "test": "a.jsonl"}


def _table(place: Path) -> dict[str, Any]:
    (place / "a.csv").write_text("path,label\npictures/cat/a.png,cat\npictures/dog/a.png,dog\n")
    return {"kind": "table", "calibration": "a.csv", "test": "a.csv"}


def _columns(place: Path) -> dict[str, Any]:
    import pandas as pd

    pd.DataFrame({"path": ["pictures/cat/a.png"] * 2, "label": ["cat", "dog"]}).to_parquet(place / "a.parquet")
    return {"kind": "table", "calibration": "a.parquet", "test": "a.parquet"}


DATA: dict[str, Callable[[Path], dict[str, Any]]] = {
    "pictures/cat/a.png": _pictures,
    "a.npz": _arrays,
    "a.jsonl": _lines,
    "a.csv": _table,
    "a.parquet": _columns,
}


@pytest.fixture(scope="module")
def data(place: Path, world: World) -> Right:
    """Per file of data that is right, a spec that reads it and its bytes."""
    found = {}
    for file, write in DATA.items():
        entry = write(place)
        for key in ("file", "calibration", "test"):
            if key in entry:
                entry[key] = str(place / entry[key])
        spec = load_spec(world.one_task(data={world.tasks[0]: entry}, heads=None))
        found[file] = (spec, (place / file).read_bytes())
    return Right(found)


@many
@given(file=st.sampled_from([*DATA]), spoils=byte_spoils)
def test_spoiled_data(data: Right, file: str, spoils: Any) -> None:
    spec, right = data.holds[file]
    (entry,) = spec.data.tasks.values()
    Path(file).write_bytes(spoiled_bytes(right, spoils))
    try:
        with within_bounds():
            view = open_split(entry, "calibration", Permissions())
            for row in range(len(view)):
                view.label(row), view.read(row)
    finally:
        Path(file).write_bytes(right)


def told(*arguments: str) -> int:
    """The exit code of one command line, which writes nothing that steers a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with within_bounds(), redirect_stdout(out), redirect_stderr(err):
        code = run_command(list(arguments))
    written = out.getvalue() + err.getvalue()
    assert written == sanitize_text(written), repr(written)
    assert code in (0, 2, 3, 4), (code, written)
    assert "Traceback" not in written and len(err.getvalue().splitlines()) < 200
    return code


@pytest.fixture(scope="module")
def saved(light: DriftRun, place: Path) -> Right:
    """A copy of a finished run, by file what it holds."""
    copy = place / "spoiled-run"
    shutil.copytree(light.path, copy)
    files = (path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size)
    return Right({path: path.read_bytes() for path in files})


LOOKING = ("show", "ls", "check", "report --format md --force --out r", "compare")


@pytest.mark.slow
@many
@given(
    command=st.sampled_from(LOOKING),
    share=places,
    as_tree=st.booleans(),
    bytes_=byte_spoils,
    tree=tree_spoils,
)
def test_spoiled_runs(
    light: DriftRun, saved: Right, command: str, share: float, as_tree: bool, bytes_: Any, tree: Any
) -> None:
    file = [*saved.holds][int(share * len(saved.holds))]
    right = saved.holds[file]
    if file.suffix == ".json" and as_tree:
        file.write_text(json.dumps(spoiled_tree(json.loads(right), tree)))
    else:
        file.write_bytes(spoiled_bytes(right, bytes_))
    first = [str(light.path)] if command == "compare" else []
    try:
        told(*command.split(), *first, "spoiled-run")
    finally:
        file.write_bytes(right)


EVERY = get_command(build_app()).commands  # type: ignore[attr-defined]
COMMANDS = sorted({*EVERY} - {"demo"})
PARAMETERS = [each for name in COMMANDS for each in EVERY[name].params]
OPTIONS = sorted({option for each in PARAMETERS for option in each.opts if option[0] == "-"} | {"-q", "--"})


@pytest.fixture(scope="module")
def words(light: DriftRun, world: World, place: Path) -> Right:
    """What a command line may be made of: right words, and nasty ones."""
    (place / "good.yaml").write_text(yaml.safe_dump(world.one_task(metrics={"jacobian": False})))
    shutil.copytree(light.path, place / "a-run", dirs_exist_ok=True)
    nasty = [bad for bad in NASTY if isinstance(bad, str) and "\x00" not in bad]  # no system hands down a NUL
    right = ("a-run", "good.yaml", "good.yaml/below", "/proc/x", ".", "flowers", "pca", *WEIGHTS[1:])
    pairs = ("lam=1", "lam=", "=", "lam=!!int ''", "n=1e30", "seed=9" + "9" * 40, "lam=[1,2", "featcal:lam=x")
    pairs += ("all", "1,2", "²", "1-²")
    return Right([*OPTIONS, *OPTIONS, *right, *right, *pairs, *nasty])


@many
@given(command=st.sampled_from(COMMANDS), given_words=st.data())
def test_command_lines(words: Right, bounded: pytest.MonkeyPatch, command: str, given_words: Any) -> None:
    line = given_words.draw(st.lists(st.sampled_from(words.holds), max_size=6))
    told(command, *line)


@pytest.fixture(scope="module")
def bounded() -> Iterator[pytest.MonkeyPatch]:
    """Nothing that is started takes the place of the tests, or computes for long."""

    def started(*_: object) -> None:
        raise SpecError("started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.execve", started)
        yield patch
