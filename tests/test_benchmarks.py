"""Benchmarks are run by hand, seldom: what they take from the product is there."""

import importlib
import pkgutil
from pathlib import Path

import pytest

import benchmarks
from benchmarks import device


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__"]
)
def test_every_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_what_a_machine_with_a_gpu_runs_in_one_go_runs_here_small(capsys: pytest.CaptureFixture[str]) -> None:
    device.main([*device.JOBS, "--device", "cpu", "--small"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[2].strip() for line in lines[3:]]
    assert len(rows) == len(device.JOBS) and all(float(seconds) > 0 for seconds in rows)
    assert all(Path(device.__file__).parents[1].joinpath(test).exists() for test in device.TESTS)
    device.main(["featcal", "--device", "cpu", "--small", "--minutes", "0"])
    assert "not begun" in capsys.readouterr().out
