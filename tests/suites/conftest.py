"""A suite of the usual kind, but with few pictures and next to no training; built once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest

from driftlens.suites import cache as caches
from driftlens.suites import training
from driftlens.suites.cache import Suite
from driftlens.suites.embedded import embedded_suite
from driftlens.suites.recipe import Recipe, Schedule, TextRecipe
from driftlens.suites.training import Worker

BRIEF = Schedule(steps=3, batch=16, matrix_rate=0.02, rate=2e-3)
TINY = Recipe(
    num_base=30,
    num_train=40,
    num_test=30,
    base=BRIEF,
    expert=BRIEF,
    width=32,
    layers=1,
    embed_dim=16,
    text_width=16,
    text_layers=1,
)
TINY_TEXT = TextRecipe(
    num_base=30,
    num_train=200,
    num_test=130,
    coded=0.5,
    base=BRIEF,
    expert=BRIEF,
    lora=BRIEF,
    width=32,
    layers=1,
    heads=2,
    inner=40,
    rank=2,
)


@pytest.fixture(scope="session")
def cache(common: Path) -> Path:
    """One for all processes: the suite has a lock of its own, so that only the first of them builds it."""
    return common / "suites"


@contextmanager
def alone(kind: type[Worker] = Worker) -> Iterator[None]:
    """This process does all that two would share; those two import what takes longer than the work."""

    def work_alone(work: Any, arguments: Any, on_news: Any, num_values: int) -> None:
        news = SimpleNamespace(send=lambda told: on_news(*told))
        work(kind(0, news, Lock(), Barrier(1), bytearray(4 * 2 * num_values)), *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "NUM_WORKERS", 1)
        patch.setattr(caches, "work_together", work_alone)
        yield


@pytest.fixture(scope="session")
def suite(cache: Path) -> Suite:
    """Shared: tests that change files work on a copy."""
    with alone():
        return embedded_suite(cache=cache, recipe=TINY)
