"""Teams whose processes are threads of the test's own: gloo between them, and a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from driftlens.base.team import Team
from driftlens.base.threads import exact_products

T = TypeVar("T")


def teamed(size: int, work: Callable[[Team], T]) -> list[T]:
    """What each of `size` processes makes, by rank; the first error of any is raised when all have ended."""
    store = HashStore()
    found: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            group = ProcessGroupGloo(PrefixStore("group", store), rank, size, timedelta(seconds=60))
            team = Team(rank, size, group, PrefixStore("team", store))
            try:
                found[rank] = work(team)
                team.leave()
            except BaseException as error:
                team.fail(error)
                team.told()
                raise
            finally:
                team.close()
                # Tracebacks keep the team; whenever they go, its group would wait a minute for what it had begun.
                team._group = group = None  # type: ignore[assignment]
        except BaseException as error:
            errors[rank] = error

    # What every thread switches on and off for all comes back in the end.
    fused = torch.backends.mha.get_fastpath_enabled()
    with exact_products():
        _run_all(run, size)
    torch.backends.mha.set_fastpath_enabled(fused)
    if errors:
        raise errors[min(errors)]
    return [found[rank] for rank in range(size)]


def _run_all(run: Callable[[int], None], size: int) -> None:
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a process hangs"
