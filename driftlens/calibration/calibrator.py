"""The registry of calibrators."""

from __future__ import annotations

from collections.abc import Callable

from driftlens.engine.problems import Calibrator
from driftlens.registry import Registry

calibrators: Registry[Callable[..., Calibrator]] = Registry("calibrator", "driftlens.calibration")
"""Names to classes; calling one with settings as keyword arguments gives a calibrator."""
