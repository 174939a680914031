"""Commands in processes of their own that need not import the libraries: each is forked from one that has."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _context() -> ForkServerContext:
    """Started with the first command, and gone with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    # It imports what lies in its working folder. A test that starts it without the variable would leave all commands
    # of later tests with more threads, which round differently.
    with contextlib.chdir(ROOT), mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()
    return context


def _play(module: str, arguments: list[str], environment: dict[str, str], streams: list[Connection]) -> None:
    """In the new process: run a module as a program, with what it writes going to the streams."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forked:
    """A running `python -m MODULE ARGUMENTS`, as `subprocess.Popen` has it."""

    def __init__(
        self, *arguments: str, module: str = "driftlens", environment: Mapping[str, str] | None = None
    ) -> None:
        context = _context()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        given = (module, list(arguments), {**os.environ, **(environment or {})}, [end for _, end in pipes])
        self._process = context.Process(target=_play, args=given)
        self._process.start()
        for _, end in pipes:
            end.close()
        self.stdout, self.stderr = (_opened(start) for start, _ in pipes)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until it ends, to both streams.

        Raises:
            subprocess.TimeoutExpired: it hangs.
        """
        with ThreadPoolExecutor(2) as readers:
            texts = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self._process.join(timeout)
            if self._process.is_alive():
                self.kill()
                raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
            out, err = (text.result() for text in texts)
        self.__exit__()
        return out, err

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, minus the signal that killed it."""
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()


def _opened(end: Connection) -> io.TextIOWrapper:
    stream = os.fdopen(os.dup(end.fileno()), encoding="utf-8", errors="replace")
    end.close()
    return stream
