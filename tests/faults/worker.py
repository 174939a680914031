"""Commands with a fault, each in a process forked from one that has imported everything: a case costs its command."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked

CAN_BE_ANYBODY = os.geteuid() != 0 or sys.platform == "linux"
"""Whether a command may write only where files say that it may: root's have to give powers up for that."""
SECONDS = 300
"""Until a command that hangs is given up."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the signal; what it wrote, and how many moments it had."""

    code: int
    out: str
    err: str
    moments: int


def run(arguments: list[str], folder: Path, told: Path, fault: str = "nothing", at: int = -1, other: int = 0) -> Ended:
    """One command line with a fault below the folder that is watched; `told` is a file of ours outside."""
    told.unlink(missing_ok=True)
    case = {"arguments": arguments, "folder": str(folder), "fault": fault, "at": at, "other": other}
    process = Forked(json.dumps(case | {"told": str(told)}), module="tests.faults.worker")
    out, err = process.communicate(timeout=SECONDS)
    code = process.wait()
    assert code is not None
    return Ended(code, out, err, int(told.read_text()) if told.exists() else -1)


def be_anybody() -> None:
    """Give up what lets root read and write files whatever they say; what is started from here hasn't it either."""
    system = ctypes.CDLL(None, use_errno=True)
    overriding = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    for power in overriding:
        system.prctl(24, power, 0, 0, 0)  # PR_CAPBSET_DROP
    header, powers = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    system.capget(header, powers)
    for kind in range(3):  # effective, permitted, inheritable
        powers[kind] &= ~sum(1 << power for power in overriding)
    assert system.capset(header, powers) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    """Run the case that the command line names, as JSON, and end with its code."""
    from tests.faults.moments import play

    if os.geteuid() == 0 and CAN_BE_ANYBODY:
        be_anybody()
    case = json.loads(sys.argv[1])
    play(**case | {"told": Path(case["told"])})


if __name__ == "__main__":
    main()
