"""Jobs of several real processes, as torchrun and SLURM start them, and what they leave."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from tests.forked import Forked

SECONDS = 240
"""Until a job that hangs is given up."""


def torchrun(
    size: int, *arguments: str, module: str = "driftlens", fault: str = ""
) -> subprocess.CompletedProcess[str]:
    """A job started by torchrun, when it has ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*launcher, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault},
    )


def started(size: int, *arguments: str, module: str = "driftlens", fault: str = "") -> list[Forked]:
    """The processes of a job, started as SLURM does: the first one holds the store, nobody watches over them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    place |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "FAULT": fault}  # `main` says so; torch is imported by then
    return [Forked(*arguments, module=module, environment={**place, "RANK": str(rank)}) for rank in range(size)]


def ended(size: int, *arguments: str, module: str = "driftlens", fault: str = "") -> tuple[list[int], str]:
    """Exit codes of such a job by rank, and all that its processes said on stderr."""
    jobs = started(size, *arguments, module=module, fault=fault)
    told = [job.communicate(timeout=SECONDS)[1] for job in jobs]
    return [job.wait() or 0 for job in jobs], "".join(told)


def said(job: subprocess.CompletedProcess[str]) -> str:
    """What our processes said on stderr, without torchrun's lines of a letter, date and time, and its traceback."""
    ours = job.stderr.partition("Traceback (most recent call last)")[0].splitlines()
    return "\n".join(line for line in ours if not re.match(r"[WE]\d{4} ", line))


def exit_codes(job: subprocess.CompletedProcess[str]) -> set[int]:
    """Those that torchrun tells of the processes which ended by themselves."""
    return {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", job.stderr)}
