"""Options and fixtures shared by the whole suite: one device and one dtype for every test that computes."""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# The tensors of these tests are tiny: handing them to several threads takes longer than computing them, and processes
# that the tests start must round like this one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NUMBA_NUM_THREADS"] = "1"  # else UMAP, once it has run, leaves OpenMP and with it torch with more threads

import pytest
import torch
from hypothesis import settings

from tests.accelerator import NAME, plugged
from tests.families import SHOWN, shown

# No test asserts on time, so no example has a deadline either.
settings.register_profile("driftlens", deadline=None, max_examples=20)
settings.register_profile("slow", deadline=None, max_examples=50)
settings.load_profile("driftlens")

torch.set_num_threads(1)
gc.disable()  # until all is collected: nearly all that imports make stays

MOST_WORKERS = 8
"""Every worker imports all libraries and takes a gigabyte of memory before it computes anything."""

REAL = Path(__file__).resolve().parents[2] / "shared" / "real"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device on which tests compute (cpu, cuda, sim)")
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device").startswith(NAME):
        devices = ExitStack()
        devices.enter_context(plugged())
        config.add_cleanup(devices.close)
    if config.getoption("--slow"):
        settings.load_profile("slow")


def named_alone(config: pytest.Config) -> bool:
    """Whether the tests to run were named one by one."""
    return bool(config.args) and all("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for every core that this process may use; none for tests named one by one, which run here at once."""
    if named_alone(config):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)  # before some are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[SHOWN] = shown(items)
    left_out: list[pytest.Item] = []
    for item in items:  # keywords would have the names of folders, too
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
            left_out.append(item)
        elif item.get_closest_marker("every") and not os.environ.get("DRIFTLENS_EVERY"):
            item.add_marker(pytest.mark.skip(reason="one more of a kind; `make every` runs it"))
            left_out.append(item)
    # Who names tests one by one is told why they don't run; thousands of such reports would take their time.
    if not named_alone(config):
        config.hook.pytest_deselected(items=left_out)
        skipped = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in skipped]
    items[:] = deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def deal(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Order tests so that each worker, whose share is one part of the list, begins with tests that take minutes.

    At the end, all but one worker would wait for them.
    """
    minutes = [item for item in items if item.get_closest_marker("timeout")]
    others = [item for item in items if not item.get_closest_marker("timeout")]
    size = -(-len(others) // num_workers)
    shares = [minutes[at::num_workers] + others[at * size : (at + 1) * size] for at in range(num_workers)]
    return [item for share in shares for item in share]


def pytest_collection_finish() -> None:
    """Let garbage be looked for seldom, and not among libraries and thousands of tests, which stay to the end.

    And let all that is logged come to the root logger: on each that keeps its records to itself, and torch has dozens,
    pytest would hang handlers of its own six times a test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Weights that a test leaves to chance are the same whatever ran before it, and differ from fixture to fixture."""
    torch.default_generator.manual_seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    torch.default_generator.manual_seed(0)


def arithmetic() -> dict[str, object]:
    """What of torch's process-wide state decides over the last bits of a result."""
    return {
        "threads": torch.get_num_threads(),
        "products": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fused attention": torch.backends.mha.get_fastpath_enabled(),
    }


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Only a machine that loses power tells a flushed file from another, and no test takes the power away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    """No test, and nothing it calls, may leave torch computing in another way: others would round differently."""
    before = arithmetic()
    yield
    assert arithmetic() == before


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def rounding(device: torch.device) -> float:
    """How far float64 identities may be off, relative to what they are about; GPUs sum in another order each time."""
    return {"cpu": 1e-12, NAME: 1e-12}.get(device.type, 1e-10)


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of these tests share; who makes something in it takes a lock."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "common"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real images and checkpoints, where it exists."""
    if not REAL.is_dir():
        pytest.skip("the folder of real checkpoints is not on this machine")
    return REAL


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
