"""Stands in for `python -m driftlens`: writes what the commands write, one step for each file a test lays down.

What it does follows from the name it is given: `steady` finishes, `failing` fails at its second step, `refused` is
refused before it begins, `deaf` does not hear that it should stop.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from driftlens.runs.manifest import LockOwner, RunFailure, RunStatus, calibration_marker
from driftlens.runs.writer import RunLock, append_event, write_status

STEPS = 3


def main(arguments: list[str]) -> int:
    """Play the command line `arguments`; returns its exit code."""
    command = arguments[0]
    if command == "init":
        return init(arguments[1:])
    print("called with", *arguments, flush=True)
    options = dict(part.split("=", 1) for part in arguments if part.startswith("--") and "=" in part)
    name = options.get("--name", "residual" if "--auto" in arguments else "steady")
    run = Path(arguments[arguments.index("--out") + 1] if "--out" in arguments else arguments[1])
    if name == "refused":
        print("error: lam is -1, expected at least 0\nhint: Choose another ridge.", file=sys.stderr)
        return 2
    if "--auto" in arguments and "--name" not in options:
        for phase in ("auto:choose", name):
            append_event(run, "phase", name=f"calibrate:{phase}", state="running")
    return work(run, name)


def answer(document: object) -> int:
    """Print a document, as `--json` does."""
    print(json.dumps(document))
    return 0


def init(arguments: list[str]) -> int:
    """A spec that names what it was asked for; a base called `nothing.pt` is of no known family."""
    options, (base, *experts) = arguments[: (at := arguments.index("--"))], arguments[at + 1 :]
    if "nothing" in base:
        print(f"error: nothing beside {base} says how it is built\nhint: Say it.", file=sys.stderr)
        return 2
    made = {"version": 1, "base": base, "experts": experts, "options": options}
    return answer({"spec": json.dumps(made, indent=1), "chosen": ["built-in texts are read"]})


def work(run: Path, name: str) -> int:
    """Take the lock and make one step for each file `step-N` that appears beside the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if name == "deaf" else signal.default_int_handler)
    run.mkdir(exist_ok=True)
    lock = RunLock(run)
    lock.acquire()
    begun = run / calibration_marker(name)
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.touch()
    try:
        for step in range(STEPS):
            say(run, "running", step)
            if name == "failing" and step == 1:
                say(
                    run,
                    "failed",
                    step,
                    RunFailure("SingularGramError", "the Gram matrix is *singular*", "Raise lam."),
                )
                print("error: the Gram matrix is *singular*\nhint: Raise lam.", file=sys.stderr)
                return 4
            wait_for(run.parent / f"step-{step}")
            append_event(run, "layer", metrics={"layer": step + 2, "drift_l2_mean": 1.5 / (step + 1)})
        begun.unlink()
        say(run, "done", STEPS)
        return 0
    except KeyboardInterrupt:
        say(run, "cancelled", 0)
        return 130
    finally:
        lock.release()


def say(run: Path, state: str, done: int, error: RunFailure | None = None) -> None:
    """Write status.json as the command does."""
    owner = LockOwner.this_process()
    status = RunStatus(
        state=state,  # type: ignore[arg-type]
        phase="calibrate",
        done=done,
        total=STEPS,
        label=f"layer {done + 2} of 6",
        seconds=float(done),
        heartbeat=owner.heartbeat,
        pid=owner.pid,
        error=error,
    )
    write_status(run, status)


def wait_for(file: Path) -> None:
    """Return once the file is there."""
    while not file.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
