"""The process that does what a stranger's file may blow up: it ends what doesn't end, and goes on serving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from driftlens.checkpoints import guarded as module
from driftlens.checkpoints.guarded import guarded

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def served_by() -> int:
    """The process that answers, once it is seen to."""
    assert guarded("patterns", ["b", "a|c"], ["x.a", "d", "b"]) == [1, None, 0]
    return module._worker().pid


def test_what_takes_too_long_or_too_much_is_stopped_and_the_next_is_served() -> None:
    first = served_by()
    with pytest.raises(ValueError, match=r"it takes too long: more than 0\.2 s"):
        guarded("template", ENDLESS, {}, ["hello"], seconds=0.2)
    with pytest.raises(ValueError, match="it takes more than 64 MiB"):
        guarded("template", "{{ 'a' * 100000000 }}", {}, ["hello"], memory=64 << 20)
    with pytest.raises(ValueError, match="is no pattern"):
        guarded("patterns", ["("], ["a"])
    assert served_by() == first


@pytest.mark.slow
def test_a_process_that_is_gone_is_named_and_another_one_serves() -> None:
    first = served_by()
    os.kill(first, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (first, signal.SIGSEGV)).start()
    threading.Timer(0.3, os.kill, (first, signal.SIGCONT)).start()
    with pytest.raises(
        ValueError, match=r"512 MiB of memory, or breaks its library down \(exit status -11\)"
    ):
        guarded("patterns", ["a"], ["a"])
    assert served_by() != first


@pytest.mark.slow
def test_too_long_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER", 1000)
    with pytest.raises(ValueError, match="it gives more than 1,000 characters"):
        guarded("template", "{{ 'a' * 5000 }}", {}, ["hello"])
    served_by()


def test_what_is_cancelled_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, cancel)
    try:
        served_by()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            guarded("template", ENDLESS, {}, ["hello"])
    finally:
        signal.signal(signal.SIGALRM, before)
    served_by()


SCRIPT = """
import sys
from driftlens.checkpoints.guarded import guarded, _worker
from driftlens.checkpoints.loading import open_checkpoint

open_checkpoint(sys.argv[1])
assert not _worker.cache_info().currsize, "plain weights need no such process"
print(guarded("patterns", ["a"], ["a"]), _worker().pid, flush=True)
"""


@pytest.mark.slow
def test_it_starts_when_it_is_needed_imports_nothing_from_the_folder_and_ends_with_whom_it_serves(
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / "re.py").write_text("open('canary', 'w').close()")
    ran = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "a.safetensors")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    answer, _, pid = ran.stdout.strip().rpartition(" ")
    assert answer == "[0]" and not (tmp_path / "canary").exists()
    until = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(pid))
