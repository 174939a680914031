"""The command line in processes of a job, one of which goes wrong where `FAULT` says so: `what:rank`."""

from __future__ import annotations

import os
import signal
from typing import Any

import driftlens.pipelines.evaluation as evaluation
from driftlens.cli import main
from driftlens.engine.calibrating import LayerwiseLoop
from driftlens.utils.errors import DataError

LAYER = 3


def fail() -> None:
    """Let this process go wrong, if it is the one."""
    what, _, rank = os.environ.get("FAULT", "").partition(":")
    if rank != os.environ["RANK"]:
        return
    calibrate = LayerwiseLoop._calibrate_layer

    def killed(self: LayerwiseLoop, layer: Any, *given: Any, **named: Any) -> Any:
        if layer.index == LAYER:
            os.kill(os.getpid(), signal.SIGKILL)
        return calibrate(self, layer, *given, **named)

    def stopped(self: LayerwiseLoop, layer: Any, *given: Any, **named: Any) -> Any:
        if layer.index == LAYER:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        return calibrate(self, layer, *given, **named)

    def refused(*_: Any) -> Any:
        raise DataError("picture seven can't be read", hint="Look at it.")

    def mistaken(*_: Any) -> Any:
        raise KeyError("nobody thought of that")

    if what in ("killed", "stopped"):
        LayerwiseLoop._calibrate_layer = {"killed": killed, "stopped": stopped}[what]  # type: ignore[method-assign]
    elif what:
        evaluation.correct_predictions = {"refused": refused, "mistaken": mistaken}[what]


if __name__ == "__main__":
    fail()
    main()
