"""Two processes and one run: real processes, killed for real."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import shutil
from pathlib import Path

import pytest

from driftlens.results.listing import find_runs
from driftlens.runs.manifest import LOCK, LockOwner, live_lock_owner, read_lock_owner
from driftlens.runs.run import current_state, open_run
from driftlens.runs.writer import RunLock, RunWriter
from driftlens.utils.errors import RunLockedError
from tests.refusing import refusing
from tests.runs.stopping import process

HOLD = """
import sys
from driftlens.runs.writer import RunWriter
with RunWriter.create(sys.argv[1], spec_yaml="", spec_digest="", name="held"):
    print("ready", flush=True)
    sys.stdin.read()
"""

HALF_A_TABLE = """
import sys
import pandas as pd
from driftlens.runs import tables
from driftlens.runs.writer import RunWriter

def half_a_table(rows, path, **options):
    path.write_bytes(b"PAR1 half of it")
    print("ready", flush=True)
    sys.stdin.read()

row = {"task": "cars", "variant": "merged", "metric": "accuracy", "value": 0.5}
with RunWriter.create(sys.argv[1], spec_yaml="", spec_digest="", name="killed") as writer:
    writer.update_manifest(tasks=["cars"], variants=["merged"])
    with writer.phase("load"):
        pass
    with writer.phase("evaluate"):
        writer.append("accuracy", pd.DataFrame([row]))
        tables.pq.write_table = half_a_table
        writer.append("accuracy", pd.DataFrame([row | {"metric": "top5"}]))
"""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, int]:
    """A run whose writer was killed in the middle of a table, and that writer's process id."""
    with process(HALF_A_TABLE, tmp_path / "run") as writer:
        writer.kill()
        writer.wait()
    return tmp_path / "run", writer.pid


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with process(HOLD, tmp_path / "run") as first:
        for attempt in (
            lambda: RunWriter.resume(tmp_path / "run"),
            lambda: RunWriter.create(tmp_path / "run", spec_yaml="", spec_digest="", name="second", force=True),
        ):
            with pytest.raises(RunLockedError, match=f"process {first.pid}") as caught:
                attempt()
            assert caught.value.exit_code == 5
            assert caught.value.context["pid"] == first.pid
        assert current_state(open_run(tmp_path / "run")) == "running"
        first.communicate()
        assert first.returncode == 0
    RunWriter.resume(tmp_path / "run").__exit__(None, None, None)
    run = open_run(tmp_path / "run")
    assert run.name == "held" and list(run.manifest.notices) == []


def test_a_killed_writer_leaves_a_readable_run(killed: tuple[Path, int]) -> None:
    folder, _ = killed
    run = open_run(folder)
    assert run.accuracy()["metric"].tolist() == ["accuracy"]
    assert current_state(run) == "stopped"
    assert [summary.state for summary in find_runs(folder.parent)] == ["stopped"]


def test_a_dead_owner_is_taken_over_with_a_notice(killed: tuple[Path, int]) -> None:
    folder, pid = killed
    assert list(folder.rglob(".partial-*")), "the killed writer should have left half a file behind"
    with RunWriter.resume(folder) as writer:
        assert writer.done("load") and not writer.done("evaluate")
        assert list(writer.manifest.notices) == [
            f"took over from process {pid}, which ended without releasing the run"
        ]
    assert not list(folder.rglob(".partial-*"))
    assert current_state(open_run(folder)) == "done"
    assert read_lock_owner(folder) is None


def test_a_process_id_used_again_is_not_the_owner() -> None:
    this = LockOwner.this_process()
    assert this.is_alive
    earlier = LockOwner(this.pid, (this.process_started or 0) - 3600, this.host, this.heartbeat)
    assert not earlier.is_alive


@pytest.mark.parametrize(
    ("heartbeat", "is_alive"), [("2020-01-01T00:00:00Z", False), (None, True)], ids=["silent", "just now"]
)
def test_on_another_machine_the_heartbeat_decides(heartbeat: str | None, is_alive: bool) -> None:
    this = LockOwner.this_process()
    there = LockOwner(this.pid, this.process_started, "another-machine", heartbeat or this.heartbeat)
    assert there.is_alive is is_alive
    assert "another-machine" in str(there)


@pytest.mark.slow
def test_a_note_of_a_live_process_counts_even_where_the_guard_was_removed(tmp_path: Path) -> None:
    with process(HOLD, tmp_path / "run") as first:
        (tmp_path / "run/run.lock.guard").unlink()
        with pytest.raises(RunLockedError, match=f"process {first.pid}"):
            RunLock(tmp_path / "run").acquire()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_on_a_disk_without_locks_the_note_says_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And a file that was left, or copied along, locks nothing for good."""
    lacking = f"import errno, fcntl\ndef flock(*_): raise OSError(errno.{name}, 'lacking')\nfcntl.flock = flock\n"

    def flock(*_: object) -> None:
        raise OSError(getattr(errno, name), "lacking")

    monkeypatch.setattr(fcntl, "flock", flock)
    with process(lacking + HOLD, tmp_path / "run") as first:
        with pytest.raises(RunLockedError, match=f"process {first.pid}"):
            RunLock(tmp_path / "run").acquire()
        first.kill()
        first.wait()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for folder in (tmp_path / "run", tmp_path / "copy"):
        for _ in range(2):
            with RunLock(folder) as lock:
                assert lock.is_own_folder and live_lock_owner(folder) is not None
        assert read_lock_owner(folder) is None


@pytest.mark.slow
def test_who_waits_for_a_machine_whose_clock_is_ahead_is_told_the_way_out(tmp_path: Path) -> None:
    with process(HOLD, tmp_path / "run") as first:
        first.communicate()
    there = LockOwner(7, None, "another-machine", "2999-01-01T00:00:00Z")
    (tmp_path / "run" / LOCK).write_text(json.dumps(dataclasses.asdict(there)))
    hint = ("by its clock: 2999-01-01", f"remove {tmp_path / 'run' / LOCK}")
    with refusing(RunLockedError, "process 7 on another-machine", hint=hint):
        RunLock(tmp_path / "run").acquire()
    (tmp_path / "run" / LOCK).unlink()
    with RunLock(tmp_path / "run"):
        pass


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells it")
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_makes_nobody_another_process(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    psutil = pytest.importorskip("psutil._pslinux")
    this, booted = LockOwner.this_process(), psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: booted + 3600 * hours)  # as the system tells it from then on
    assert this.is_alive and LockOwner.this_process().process_started == this.process_started


@pytest.mark.parametrize(
    "spoiled",
    [
        *({"pid": bad} for bad in ("x", -1, 2**40, True, None)),
        *({"process_started": bad} for bad in ("5", [])),
        *({"heartbeat": bad} for bad in ("2026-01-01", 5, "2026-13-01T00:00:00Z")),
        {"host": 5},
    ],
    ids=str,
)
def test_a_note_of_the_wrong_kinds_is_nobodys(own: Path, spoiled: dict[str, object]) -> None:
    right = dataclasses.asdict(LockOwner.this_process()) | {"host": "another-machine"}
    (own / "run.lock").write_text(json.dumps(right))
    assert live_lock_owner(own) is not None
    (own / "run.lock").write_text(json.dumps(right | spoiled))
    assert live_lock_owner(own) is None


def test_a_damaged_note_blocks_nobody(own: Path) -> None:
    (own / "run.lock").write_text("{not json")
    RunWriter.resume(own).__exit__(None, None, None)
    assert not (own / "run.lock").exists()
