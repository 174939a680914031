"""Processes of one job, as threads: who does what, what all know afterwards, and how all hear of one's end."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from driftlens.base.division import balanced
from driftlens.base.errors import Cancelled, DataError, NumericsError, RunError
from driftlens.base.progress import ProgressEvent, Reporter, TaskMeter
from driftlens.base.team import ALONE, Team, _runs
from tests.team.threads import teamed

TASKS = ("a", "b", "c", "d", "e")


def test_alone_every_question_is_answered_at_once() -> None:
    value = torch.ones(2)
    ALONE.sum([value], to=0)
    ALONE.share([value], of=0)
    assert value.tolist() == [1, 1]
    assert ALONE.leads and ALONE.once(lambda: 3) == 3 and ALONE.at(0, lambda: 4) == 4
    assert ALONE.each(TASKS, str.upper) == {task: task.upper() for task in TASKS}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_items_are_divided_evenly_and_alike_everywhere(size: int) -> None:
    owners = [Team.owners(_unjoined(rank, size), TASKS) for rank in range(size)]
    assert all(found == owners[0] for found in owners)
    counts = [list(owners[0].values()).count(rank) for rank in range(size)]
    assert max(counts) - min(counts) <= 1
    heavy = Team.owners(_unjoined(0, 2), TASKS, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4})
    assert [heavy[task] for task in "abcd"] == [1, 1, 1, 1] and heavy["e"] == 0


def test_the_busiest_process_is_never_idle_and_never_has_more_than_it_must() -> None:
    costs = [7.0, 5.0, 4.0, 3.0, 1.0]
    for number in (1, 2, 3, 5, 9):
        best = min(
            max(sum(c for c, at in zip(costs, places, strict=True) if at == one) for one in range(number))
            for places in itertools.product(range(min(number, 5)), repeat=len(costs))
        )
        assert best <= balanced(costs, number)[1] <= 4 / 3 * best
        owners, load = balanced(costs, number)
        assert load == max(sum(c for c, at in zip(costs, owners, strict=True) if at == one) for one in owners)
    assert balanced([], 4) == ([], 0)


def _unjoined(rank: int, size: int) -> Team:
    team = Team(rank)
    team.size = size
    return team


def test_sums_reach_one_process_and_shares_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "allreduce", None)  # twice as much on the wire

    def work(team: Team) -> tuple[list[float], float, list[float]]:
        matrix, number = torch.full((2, 3), team.rank + 1.0), torch.tensor(10.0**team.rank)
        team.sum([matrix[:, 1:], number], to=1)
        shared = torch.full((2,), float(team.rank))
        team.share([shared], of=2)
        return matrix[0].tolist(), float(number), shared.tolist()

    found = teamed(3, work)
    assert found[1] == ([2, 6, 6], 111, [2, 2])  # in place, also of a part of a tensor
    assert found[0] == ([1, 1, 1], 1, [2, 2])  # only where it was wanted


def test_what_one_makes_reaches_whom_it_is_for() -> None:
    large = "x" * 300_000  # more than goes through the store

    def work(team: Team) -> tuple[str, list[object], list[int], dict[str, str]]:
        once = team.once(lambda: f"by {team.rank}")
        made: list[object] = [team.at(owner, lambda: (team.rank, large)) for owner in (0, 1, 2, 1)]
        return once, made, team.gather(team.rank), team.each(TASKS, lambda task: f"{task}{team.rank}")

    first, *others = teamed(3, work)
    assert first[1] == [(0, large), (1, large), (2, large), (1, large)]
    assert first[0] == "by 0" and first[2] == [0, 1, 2]
    assert first[3] == {"a": "a0", "b": "b1", "c": "c2", "d": "d0", "e": "e1"}
    assert all(found == (first[0], [None] * 4, first[2], first[3]) for found in others)


def test_an_error_of_joint_work_is_raised_by_all_and_they_go_on() -> None:
    def broken() -> int:
        raise NumericsError("no number", hint="look")

    def work(team: Team) -> list[str]:
        said = []
        for attempt in (
            lambda: team.once(broken),
            lambda: team.together(lambda: broken() if team.rank == 1 else 0),
            lambda: team.each(TASKS, lambda task: broken() if task == "e" else 0),
        ):
            with pytest.raises(NumericsError, match="no number") as caught:
                attempt()
            assert team.agrees(caught.value)
            said.append(caught.value.hint)
        return [*said, team.once(lambda: "on")]

    assert teamed(2, work) == [["look"] * 3 + ["on"]] * 2


@pytest.mark.parametrize("where", ["once", "collective", "batch", "result"])
def test_what_ends_one_process_ends_those_that_wait_or_work(where: str) -> None:
    ended: dict[int, BaseException] = {}
    begun = threading.Event()

    def work(team: Team) -> None:
        try:
            if team.rank == 1:
                begun.wait(10)
                team.at(1, _fails)
            begun.set()
            token = team.token()
            if where == "once":
                team.meet()
            elif where == "collective":
                team.sum([torch.ones(2)], to=0)
            elif where == "result":
                team.at(1, lambda: None)
            until = time.monotonic() + 10
            while time.monotonic() < until:
                token.check()
        except BaseException as error:
            ended[team.rank] = error
            assert not team.agrees(error)
            with pytest.raises(DataError):  # there is no team any more, whoever thinks that he can go on
                team.meet()
            raise

    with pytest.raises(DataError, match="no picture"):
        teamed(2, work)
    assert [type(ended[rank]) for rank in (0, 1)] == [DataError, DataError]
    assert str(ended[0]) == "no picture\nlook there"


def _fails() -> None:
    raise DataError("no picture", hint="look there")


def test_a_process_that_is_gone_is_missed_also_by_one_that_was_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(team: Team) -> str:
        if team.rank == 1:
            return team.once(lambda: "")
        token = team.token()
        token.cancel()  # as a launcher asks as soon as one is gone
        with pytest.raises(Cancelled):
            token.check()
        monkeypatch.setattr(team, "_lost", lambda: [1])
        with pytest.raises(RunError, match="process 1 of 2 ended without a word") as caught:
            token.check()
        monkeypatch.undo()
        team._error = None
        team.once(lambda: "")
        return caught.value.hint

    assert "--resume" in teamed(2, work)[0]


def test_one_bar_goes_over_the_tasks_of_all() -> None:
    events: list[ProgressEvent] = []

    def work(team: Team) -> None:
        reporter, owners = Reporter(team.progress(events.append)), team.owners(TASKS)
        for task in TASKS:

            def measured(task: str = task) -> str:
                meter = TaskMeter(reporter, "analyze", dict.fromkeys(TASKS, 2), task)
                for done in range(2):
                    meter.step(done, f"layer {done + 1}")
                meter.finish()
                return task

            team.at(owners[task], measured)

    teamed(2, work)
    counts = [event.done for event in events]
    assert counts == sorted(counts) and counts[-1] == 10
    assert {event.label.partition(":")[0] for event in events} == {f"task {task}" for task in TASKS}


def test_on_another_machine_a_process_lives_as_long_as_it_gives_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("driftlens.base.team._SILENT_SECONDS", 0.05)
    beats = {"beat/1": b"1"}
    team = _unjoined(0, 2)
    team._store = SimpleNamespace(get=beats.__getitem__)
    team._peers = {0: ("here", 1, 0.0), 1: ("there", 1, 0.0)}
    assert team._lost() == []
    time.sleep(0.1)
    assert team._lost() == [1]
    beats["beat/1"] = b"2"
    assert team._lost() == []


def test_a_process_of_this_machine_is_known_by_its_number_and_its_beginning() -> None:
    own = psutil.Process()
    assert _runs(own.pid, own.create_time())
    assert not _runs(own.pid, own.create_time() - 60)  # another one had that number
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        started = psutil.Process(child.pid).create_time()
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not _runs(child.pid, started)  # nobody has asked yet how it ended
    assert not _runs(child.pid, started)


def test_batches_are_cut_only_where_whole_items_leave_processes_idle() -> None:
    assert _unjoined(0, 2).shares({"a": 3, "b": 3}) == {"a": [(0, 0, 3)], "b": [(1, 0, 3)]}
    cut = _unjoined(0, 3).shares({"a": 1, "b": 4, "c": 4})
    assert cut == {"a": [(0, 0, 1)], "b": [(0, 0, 2), (1, 2, 4)], "c": [(1, 0, 1), (2, 1, 4)]}
    for size in range(1, 9):  # every batch is somebody's, once
        runs = _unjoined(0, size).shares({"a": 2, "b": 5, "c": 1})
        for item, count in {"a": 2, "b": 5, "c": 1}.items():
            assert [at for _, first, last in runs[item] for at in range(first, last)] == list(range(count))
    assert _unjoined(0, 4).shares({"a": 0, "b": 4})["a"] == [
        (1, 0, 0)
    ]  # whose owner says that there are no samples


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_of_an_item_come_in_order_to_the_first_that_has_some(size: int) -> None:
    large = "x" * (1 << 17)  # more than goes through the store

    def work(team: Team) -> list[object]:
        found: list[object] = []
        for runs in team.shares({"a": 2, "b": 5, "c": 1}).values():
            pieces = team.pieces(runs, lambda first, last: (team.rank, first, last, large))
            found.append(pieces if pieces is None else [piece[:3] for piece in pieces])
            assert (pieces is not None) == (team.rank == runs[0][0])
        return found

    runs = _unjoined(0, size).shares({"a": 2, "b": 5, "c": 1})
    assert any(len(of) > 1 for of in runs.values())
    for made in zip(*teamed(size, work), runs.values(), strict=True):
        assert [of for of in made[:-1] if of is not None] == [made[-1]]


def test_an_error_in_a_piece_ends_the_job() -> None:
    def work(team: Team) -> None:
        runs = team.shares({"a": 2})["a"]
        team.pieces(runs, lambda first, last: _fails() if first else None)

    with pytest.raises(DataError, match="no picture"):
        teamed(2, work)
