"""The command line that repeats a calibration, from what the manifest says of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from driftlens.records.manifest import CalibrationInfo
from driftlens.spec.yaml_text import from_yaml

_FLAGS = ("lam", "rho", "alpha")


def calibration_command(name: str, info: CalibrationInfo) -> str:
    """`driftlens calibrate RUN ...` with every setting written out, for a run of the same spec.

    No preset is used and nothing is chosen again, so that neither a newer preset nor the spec's own section can change
    the outcome.

    Args:
        name: of the calibration.
        info: what the manifest says; `seed` is None where an older DriftLens did not record which sites were meant.

    Returns:
        One line for a POSIX shell; empty where the calibration can't be repeated from `info` alone.
    """
    if info.seed is None:
        return ""
    return shlex.join(["driftlens", "calibrate", "RUN", "--name", name, *_flags(info)])


def _flags(info: CalibrationInfo) -> Iterator[str]:
    yield from ("--method", info.method)
    for setting, value in info.settings.items():
        if setting in _FLAGS:
            yield from (f"--{setting}", f"{value}")
        else:
            yield from ("--set", f"{setting}={_as_yaml(value)}")
    yield from ("--layers", ",".join(map(str, info.layers)))
    for pattern in info.sites:
        yield from ("--sites", pattern)
    counts = set(info.samples.values())
    if len(counts) == 1:  # unequal ones are the spec's own
        yield from ("--samples", str(*counts))


def _as_yaml(value: Any) -> str:
    """The value as `--set` reads it back; words stand as they are where YAML takes them for nothing else."""
    is_word = isinstance(value, str) and value.isidentifier() and from_yaml(value, "--set") == value
    return value if is_word else json.dumps(value, separators=(",", ":"))
