"""A process that has imported everything and forks one for every command, so that a case costs its command alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_POWERS = "-dac_override,-dac_read_search"
AS_ANYBODY = ["setpriv", "--bounding-set", _POWERS, "--inh-caps", _POWERS] if shutil.which("setpriv") else []
"""Before a command of root's: it keeps its files, and may not write where they say that nobody may."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the signal; what it wrote, and how many moments it had."""

    code: int
    out: str
    err: str
    moments: int


class Server:
    """Asks the process for one command after the other."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def run(
        self, arguments: list[str], folder: Path, fault: str = "nothing", at: int = -1, other: int = 0
    ) -> Ended:
        """One command line with a fault below the folder that is watched."""
        told = self._folder / "moments"
        told.unlink(missing_ok=True)
        streams = {name: str(self._folder / name) for name in ("out", "err")}
        case = {"arguments": arguments, "folder": str(folder), "fault": fault, "at": at, "other": other}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(case | streams | {"told": str(told)}), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        out, err = (Path(streams[name]).read_text(errors="replace") for name in ("out", "err"))
        return Ended(code, out, err, int(told.read_text()) if told.exists() else -1)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server that keeps what commands write in a folder; it is gone after the block."""
    before = AS_ANYBODY if os.geteuid() == 0 else []
    command = [*before, sys.executable, "-m", "tests.faults.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process, folder)
        finally:
            process.kill()


def main() -> None:
    """Run every case that standard input names, a line of JSON each, and answer with its code."""
    import torch

    import tests.preloaded  # noqa: F401
    from tests.faults.moments import play

    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # that a process with threads forks; no thread here has a lock
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            streams = [
                os.open(case.pop(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")
            ]
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
            code = 99
            try:
                code = play(**case | {"told": Path(case["told"])})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
