"""Bad input through the command line: the right exit code, what is wrong by name, a remedy, nothing half-written."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from driftlens.runs.run import open_run
from tests.cli.conftest import Cli
from tests.zoo.world import CLASSES, LOGIT_SCALE, TASKS, World, write_images, write_spec

Spec = dict[str, Any]
TASK = TASKS[0]
KEY = "visual.transformer.resblocks.1.mlp.c_fc.weight"


@dataclass
class Bench:
    """A tiny spec that a case spoils, in a folder of its own."""

    world: World
    folder: Path
    spec: Spec = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.world.one_task(metrics={"jacobian": False})

    def expert(self, path: Path) -> str:
        """Make `path` the expert; returns its name."""
        self.spec["experts"] = {TASK: {"weights": str(path)}}
        return path.name

    def changed_expert(self, **tensors: torch.Tensor | None) -> str:
        """The expert with some tensors replaced, added or (None) taken out."""
        state = self.world.state(TASK) | {name: value for name, value in tensors.items() if value is not None}
        path = self.folder / "changed.safetensors"
        save_file({name: value for name, value in state.items() if tensors.get(name, value) is not None}, path)
        return self.expert(path)

    def images(self) -> Path:
        """Image folders in the place of the arrays, two images per class; returns the test split's folder."""
        for split in ("train", "test"):
            for name in CLASSES[TASK]:
                place = self.folder / split / name
                place.mkdir(parents=True)
                for row in range(2):
                    pixels = np.full((16, 16, 3), 40 * row, np.uint8)
                    Image.fromarray(pixels).save(place / f"{row}.png")
        entry = {
            "kind": "imagefolder",
            "calibration": str(self.folder / "train"),
            "test": str(self.folder / "test"),
        }
        self.spec["data"] = {"defaults": {"n": 4, "n_diagnosis": 4, "batch_size": 3}, TASK: entry}
        return self.folder / "test"

    def arrays(self, classes: tuple[str, ...] = CLASSES[TASK], **counts: int) -> Path:
        """An `.npz` file of one's own in the place of the world's."""
        file = self.folder / "images.npz"
        write_images(file, classes, **counts)
        self.spec["data"][TASK] = {"kind": "npz", "file": str(file)}
        return file


def missing_file(bench: Bench) -> list[str]:
    return [bench.expert(bench.folder / "nowhere.safetensors"), "relative to its folder"]


def truncated(bench: Bench) -> list[str]:
    path = bench.folder / "cut.safetensors"
    path.write_bytes(bench.world.weights(TASK).read_bytes()[:-1000])
    return [bench.expert(path), "copy or download it again"]


def wider(bench: Bench) -> list[str]:
    name = bench.changed_expert(**{KEY: torch.zeros(80, 16)})
    return [name, KEY.removeprefix("visual."), "[80, 16]", "[64, 16]", "another model size"]


def deeper(bench: Bench) -> list[str]:
    extra = {
        name.replace(".1.", ".3."): value for name, value in bench.world.state(TASK).items() if "blocks.1." in name
    }
    return [bench.changed_expert(**extra), "resblocks.3.", "one architecture"]


def missing_key(bench: Bench) -> list[str]:
    return [bench.changed_expert(**{KEY: None}), "lacks", KEY.removeprefix("visual.")]


def nan_weight(bench: Bench) -> list[str]:
    weight = bench.world.state(TASK)[KEY]
    weight[0, 0] = torch.nan
    return [bench.changed_expert(**{KEY: weight}), "1 NaN", KEY.removeprefix("visual."), "save it again"]


def infinite_features(bench: Bench) -> list[str]:
    huge = {KEY: torch.full((64, 16), 1e30), KEY.replace("c_fc", "c_proj"): torch.full((16, 64), 1e30)}
    bench.changed_expert(**huge)
    return [f"expert:{TASK}", "layer 3 (transformer.resblocks.1)", TASK, "sample 'test/"]


def unreadable_image(bench: Bench) -> list[str]:
    path = bench.images() / "rose" / "1.png"
    path.write_bytes(b"\x89PNG not really")
    return [str(path), "can't be read"]


def other_classes(bench: Bench) -> list[str]:
    bench.spec["heads"] = {TASK: {**bench.world.head(TASK), "classes": ["Lily", "rose", "tulip"]}}
    return [f"task {TASK}", "only in data: 'lily'", "only in head: 'Lily'"]


def no_such_layer(bench: Bench) -> list[str]:
    bench.spec["layers"] = {"select": "visual.transformer.resblocks.9"}
    return ["resblocks.9", "the nearest are transformer.resblocks."]


def unknown_key(bench: Bench) -> list[str]:
    bench.spec["experst"] = bench.spec.pop("experts")
    return ["experst", "unknown key", "Did you mean 'experts'?"]


def no_data(bench: Bench) -> list[str]:
    del bench.spec["data"][TASK]
    return [f"no data for {TASK}", f"Add data.{TASK}"]


def no_such_method(bench: Bench) -> list[str]:
    bench.spec["merge"] = {"method": "task_aritmetic"}
    return ["task_aritmetic", "Did you mean 'task_arithmetic'?"]


def no_gpu(bench: Bench) -> list[str]:
    bench.spec["compute"] = {"device": "cuda"}
    return ["device 'cuda' is not available", "Use `auto` or `cpu`"]


CASES: dict[Callable[[Bench], list[str]], int] = {
    **dict.fromkeys((missing_file, truncated, wider, deeper, missing_key, nan_weight), 4),
    **dict.fromkeys((infinite_features, unreadable_image, other_classes), 4),
    **dict.fromkeys((no_such_layer, unknown_key, no_data, no_such_method, no_gpu), 2),
}
"""What only opening or walking shows; every kind of file's own faults are those of tests/models and tests/data."""


@pytest.fixture
def bench(world: World, tmp_path: Path) -> Bench:
    return Bench(world, tmp_path)


def leftovers(out: Path) -> list[Path]:
    """Scratch folders and locks that should be gone."""
    return [path for path in out.rglob("*") if path.name.startswith(".partial-") or path.name == "run.lock"]


@pytest.mark.parametrize(("spoil", "code"), CASES.items(), ids=[spoil.__name__.replace("_", " ") for spoil in CASES])
def test_bad_input_is_named_and_leaves_nothing_behind(
    bench: Bench, run_cli: Cli, spec_file: Path, spoil: Callable[[Bench], list[str]], code: int
) -> None:
    if spoil is no_gpu and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = spoil(bench)
    out = bench.folder / "run"
    result = run_cli("analyze", write_spec(spec_file, bench.spec), "--out", out, "--progress", "none")
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ") and "Traceback" not in result.err
    for word in words:
        assert word in result.err
    assert not leftovers(out)
    if out.exists():
        status = open_run(out).status
        assert status is not None and status.state == "failed"
        assert status.error is not None and status.error.message == result.message


class _Trap:
    """An object whose unpickling would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("suffix", ["pt", "bin", "pkl"])
def test_code_in_a_checkpoint_is_not_run(bench: Bench, run_cli: Cli, spec_file: Path, suffix: str) -> None:
    trace, path = bench.folder / "trace", bench.folder / f"trap.{suffix}"
    torch.save({"weight": _Trap(trace)}, path)
    pickle.loads(pickle.dumps(_Trap(trace)))
    assert trace.exists(), "the trap should work where it is sprung"
    trace.unlink()
    bench.expert(path)
    result = run_cli("analyze", write_spec(spec_file, bench.spec), "--out", bench.folder / "run")
    assert result.code == 4 and str(path) in result.message
    assert "onvert it" in result.hint
    assert not trace.exists() and not (bench.folder / "run").exists()


@pytest.mark.parametrize(
    "given",
    [[], ["--set", "data.flowers={kind: python, target: os:getcwd}"]],
)
def test_code_that_a_spec_names_needs_trust_on_the_command_line(
    bench: Bench, run_cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setenv("DRIFTLENS_ANALYZE_TRUST", "1")
    if not given:
        bench.spec["data"][TASK] = {"kind": "python", "target": "os:getcwd"}
    result = run_cli("analyze", write_spec(spec_file, bench.spec), "--out", bench.folder / "run", *given)
    assert result.code == 2 and "--trust-code" in result.err


@pytest.mark.slow
@pytest.mark.parametrize("after", ["models/merged.safetensors", "tables/samples.parquet", "features/"])
def test_a_full_disk_fails_the_run_and_what_was_finished_stays(
    bench: Bench, run_cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    out = bench.folder / "run"
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if after in Path(target).as_posix():
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    arguments = ("analyze", write_spec(spec_file, bench.spec), "--out", out, "--progress", "none")
    result = run_cli(*arguments)
    assert result.code == 4, result.err
    assert "No space left on device" in result.message and "Free some space" in result.hint
    run = open_run(out)
    assert run.status is not None and run.status.state == "failed"
    assert not leftovers(out) and not [path for path in out.rglob("*") if path.as_posix().endswith(after)]
    monkeypatch.undo()
    assert run_cli(*arguments, "--resume").code == 0
    assert run_cli("check", out).code == 0


def one_image(bench: Bench) -> None:
    bench.arrays(train=1, test=1)
    bench.spec["data"]["defaults"] = {"n": 1, "n_diagnosis": 1, "batch_size": 3}
    bench.spec["heads"] = None


def one_class(bench: Bench) -> None:
    bench.arrays(("lily",))
    file = bench.folder / "head.safetensors"
    save_file({"only": torch.nn.functional.normalize(torch.ones(1, 8))}, file)
    bench.spec["heads"] = {TASK: {"file": str(file), "tensor": "only", "logit_scale": LOGIT_SCALE}}


def unlabelled(bench: Bench) -> None:
    file = bench.folder / "bare.npz"
    with np.load(bench.world.data(TASK)) as arrays:
        np.savez(file, x_train=arrays["x_train"], x_test=arrays["x_test"])
    bench.spec["data"][TASK] = {"kind": "npz", "file": str(file)}
    bench.spec["heads"] = None


def without_base(bench: Bench) -> None:
    bench.spec |= {"base": None, "merge": {"method": "average"}}


def strange_names(bench: Bench) -> None:
    name = "Blumen: 花/../🌸"
    for section in ("experts", "heads", "data"):
        bench.spec[section][name] = bench.spec[section].pop(TASK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [one_image, one_class, unlabelled, without_base, strange_names],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_unusual_input_is_no_error(
    bench: Bench, run_cli: Cli, spec_file: Path, change: Callable[[Bench], None]
) -> None:
    bench.spec["metrics"] = {"jacobian": {"samples": 2}, "cka": True}
    change(bench)
    spec = {key: value for key, value in bench.spec.items() if value is not None}
    out = bench.folder / "run"
    result = run_cli("analyze", write_spec(spec_file, spec), "--out", out, "--json", "--progress", "none")
    assert result.code == 0, result.err
    (row,) = [row for row in json.loads(result.out)["final"] if row["variant"] == "merged"]
    assert row["task"] == next(iter(spec["experts"])) and row["drift_l2_mean"] >= 0
    assert row["final_share"] is None or abs(row["final_share"]) < 10
    assert {path.parent for path in out.iterdir()} == {out} and not leftovers(bench.folder)
    assert run_cli("show", out).code == 0 and run_cli("check", out).code == 0


@pytest.mark.parametrize(
    "command", ["analyze X", "analyze .", "validate X", "merge X --out Y", "calibrate . --name x", "why X Y Z"]
)
def test_a_wrong_path_is_refused_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "driftlens", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (2, 4) and "error: " in done.stderr
    assert not {"torch", "pandas"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
