"""Teams whose processes are threads of the test's own: gloo between them, and a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from driftlens.team import Team

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
                raise
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a process hangs"
    if errors:
        raise errors[min(errors)]
    return [found[rank] for rank in range(size)]
