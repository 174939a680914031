"""A team of one, and what the environment says of others; real processes are in `test_processes`."""

from __future__ import annotations

import pytest

from driftlens.utils.distributed import ALONE, ProcessGroup, world_size
from driftlens.utils.errors import DataError

TASKS = ("a", "b", "c", "d", "e")


def test_one_process_answers_every_call_at_once() -> None:
    assert ALONE.is_main_process and ALONE.run_on_main(lambda: 3) == 3 and ALONE.run_on_rank(0, lambda: 4) == 4
    assert ALONE.gather(5) == [5] and ALONE.own_items(TASKS) == [*TASKS]
    assert ALONE.map(TASKS, str.upper) == {task: task.upper() for task in TASKS}
    error = DataError("no picture")
    assert ALONE.is_raised_on_all(error) and ALONE.broadcast_error(error)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_task_belongs_to_one_process(size: int) -> None:
    shares = [ProcessGroup(rank, size).own_items(TASKS) for rank in range(size)]
    assert sorted(task for share in shares for task in share) == [*TASKS]
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    owners = ProcessGroup(0, size).owner_ranks(TASKS)
    assert all(owners[task] == rank for rank, share in enumerate(shares) for task in share)


@pytest.mark.parametrize(
    ("said", "count"),
    [({}, 1), ({"WORLD_SIZE": "4"}, 1), ({"WORLD_SIZE": "4", "RANK": "0"}, 4), ({"WORLD_SIZE": "many"}, 1)],
)
def test_the_environment_says_how_many_processes_there_are(
    said: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert world_size() == count
