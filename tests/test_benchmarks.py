"""Benchmarks are run by hand, seldom: what they take from the product is there."""

import importlib
import pkgutil
from pathlib import Path

import pytest

import benchmarks
from benchmarks import device, figures, table

PACKAGE = "benchmarks."
MODULES = {module.name.removeprefix(PACKAGE) for module in pkgutil.walk_packages(benchmarks.__path__, PACKAGE)}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if not name.endswith("__main__")))
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


def test_the_page_is_made_from_the_stored_figures() -> None:
    stored = figures.read_figures()
    assert table.PAGE.read_text(encoding="utf-8") == table.page(stored), "run: python -m benchmarks.table"
    assert len({(figure.benchmark, figure.figure) for figure in stored}) == len(stored)
    assert all(figure.value and figure.date and figure.commit and figure.machine for figure in stored)
    on_page = [name for subject in table.SUBJECTS for name in subject.benchmarks]
    assert {figure.benchmark for figure in stored} <= set(on_page) <= MODULES and len(on_page) == len(set(on_page))


def test_a_recorded_figure_replaces_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [
        figures.Figure(name, "peak", "2 GB", "", "2026-01-01", "0" * 8, "A", "2.0") for name in ("memory", "mixtures")
    ]
    monkeypatch.setattr(figures, "FILE", tmp_path / "figures.csv")
    figures.write_figures(old)
    figures.record("memory", "peak", "1 GB", "at most 3 GB")
    assert figures.read_figures() == old
    monkeypatch.setenv("DRIFTLENS_RECORD", "1")
    figures.record("memory", "peak", "1 GB", "at most 3 GB")
    figures.record("memory", "size", "3 GB")
    new, size, kept = figures.read_figures()
    assert (new.value, new.target, size.figure, kept) == ("1 GB", "at most 3 GB", "size", old[1])
    assert capsys.readouterr().out.startswith("memory: peak: 1 GB (target: at most 3 GB) [")
