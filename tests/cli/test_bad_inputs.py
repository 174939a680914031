"""Bad input through the command line: the right exit code, what is wrong by name, a remedy, nothing half-written."""

from __future__ import annotations

import errno
import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from driftlens.runs.run import DriftRun, open_run
from tests.cli.conftest import Cli
from tests.cli.spoiled import CASES, TASK, Bench, no_gpu
from tests.zoo.world import LOGIT_SCALE, World, write_spec


@pytest.fixture
def bench(world: World, tmp_path: pathlib.Path) -> Bench:
    return Bench(world, tmp_path)


def leftovers(out: pathlib.Path) -> list[pathlib.Path]:
    """Scratch folders and locks that should be gone."""
    return [path for path in out.rglob("*") if path.name.startswith(".partial-") or path.name == "run.lock"]


@pytest.mark.parametrize(
    ("spoil", "code"), CASES.items(), ids=[spoil.__name__.replace("_", " ") for spoil in CASES]
)
def test_bad_input_is_named_and_leaves_nothing_behind(
    bench: Bench, run_cli: Cli, spec_file: pathlib.Path, spoil: Callable[[Bench], list[str]], code: int
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

    def __init__(self, trace: pathlib.Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self.trace,)


@pytest.mark.parametrize("suffix", ["pt", "bin", "pkl"])
def test_code_in_a_checkpoint_is_not_run(
    bench: Bench, run_cli: Cli, spec_file: pathlib.Path, suffix: str
) -> None:
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
    bench: Bench, run_cli: Cli, spec_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setenv("DRIFTLENS_ANALYZE_TRUST", "1")
    if not given:
        bench.spec["data"][TASK] = {"kind": "python", "target": "os:getcwd"}
    result = run_cli("analyze", write_spec(spec_file, bench.spec), "--out", bench.folder / "run", *given)
    assert result.code == 2 and "--trust-code" in result.err


def test_a_run_of_a_newer_schema_is_refused_by_name(
    finished: DriftRun, run_cli: Cli, tmp_path: pathlib.Path
) -> None:
    manifest = json.loads((finished.path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": "9.0"}))
    result = run_cli("show", tmp_path)
    assert result.code == 4
    assert "schema 9.0" in result.message and "pip install --upgrade" in result.hint


@pytest.mark.parametrize("after", ["models/merged.safetensors", "tables/samples.parquet", "features/"])
def test_a_full_disk_fails_the_run_and_what_was_finished_stays(
    bench: Bench, run_cli: Cli, spec_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    out = bench.folder / "run"
    replace = pathlib.Path.replace

    def full(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if after in pathlib.Path(target).as_posix():
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(pathlib.Path, "replace", full)
    arguments = ("analyze", write_spec(spec_file, bench.spec), "--out", out, "--progress", "none")
    result = run_cli(*arguments)
    assert result.code == 4, result.err
    assert "No space left on device" in result.message and "Free some space" in result.hint
    run = open_run(out)
    assert run.status is not None and run.status.state == "failed"
    assert not leftovers(out) and not [path for path in out.rglob("*") if path.as_posix().endswith(after)]
    monkeypatch.undo()
    assert run_cli(*arguments, "--resume").code == 0
    assert run_cli("verify", out).code == 0


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


@pytest.mark.parametrize(
    "change",
    [one_image, one_class, unlabelled, without_base, strange_names],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_unusual_input_is_no_error(
    bench: Bench, run_cli: Cli, spec_file: pathlib.Path, change: Callable[[Bench], None]
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
    assert run_cli("show", out).code == 0 and run_cli("verify", out).code == 0
