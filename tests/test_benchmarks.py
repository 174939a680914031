"""Benchmarks are run by hand, seldom: what they take from the product is there."""

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__"]
)
def test_every_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
