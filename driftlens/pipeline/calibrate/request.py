"""What a user asks a calibration to be, and the calibrator that follows from it, the preset and the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftlens.calibration.calibrator import Calibrator, calibrators, over_preset
from driftlens.errors import SpecError
from driftlens.settings import resolve

if TYPE_CHECKING:
    from driftlens.spec import Calibration


DEFAULT_METHOD = "featcal"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CalibrationRequest:
    """One calibration, as asked for; what is left out comes from the preset, then from the spec.

    Attributes:
        name: of the calibration; its variant is `calibrated:NAME`.
        method: a registered calibrator.
        preset: name of a published setting.
        parameters: hyperparameters over the preset's, for example `lam`, `rho`, `alpha`.
        samples: calibration samples per task; those the spec draws if left out.
        layers: patterns on module paths, or layer indices, to calibrate instead of all blocks.
        sites: patterns on site paths to calibrate instead of the linear and norm modules.
        top_layers: only so many layers, those that the run's own attribution finds most of the final drift in.

    Raises:
        SpecError: the name can't be one, or a count is not positive.
    """

    name: str
    method: str | None = None
    preset: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    samples: int | None = None
    layers: Sequence[str | int] | None = None
    sites: Sequence[str] | None = None
    top_layers: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} can't be the name of a calibration",
                hint="Use letters, digits, `-`, `_` and `.`, for example featcal.",
            )
        for what, count in (("samples", self.samples), ("top_layers", self.top_layers)):
            if count is not None and count < 1:
                raise SpecError(f"{what} is {count}, expected a whole number from 1 upwards")
        if self.layers is not None and self.top_layers is not None:
            raise SpecError("layers and top_layers both choose layers", hint="Give one of them.")


def method_of(request: CalibrationRequest, section: Calibration | None) -> str:
    """Name of the calibrator: the request's, the spec's, or FeatCal."""
    if request.method is not None:
        return request.method
    return section.method if section is not None else DEFAULT_METHOD


def method_called(calibrator: Calibrator) -> str:
    """The name under which the calibrator's class, or the one it extends, is registered.

    Raises:
        SpecError: it is not.
    """
    for known, kind in calibrators.items():
        if isinstance(calibrator, kind):
            return known
    raise SpecError(
        f"{type(calibrator).__name__} is no registered calibrator",
        hint=f"There are {', '.join(calibrators)}.",
    )


def calibrator_of(request: CalibrationRequest, section: Calibration | None) -> Calibrator:
    """The calibrator with all hyperparameters resolved: parameters over preset over spec over defaults.

    Args:
        request: what the user asks for.
        section: the spec's `calibration`, which counts if it is of the same method; its values stand over its preset.

    Raises:
        SpecError: no such method, preset or parameter, or a value out of its range.
    """
    method = method_of(request, section)
    given: dict[str, Any] = {}
    if section is not None and section.method == method:  # else its settings are another method's
        given |= over_preset(method, section.preset, section.parameters)
    given |= over_preset(method, request.preset, request.parameters)
    return calibrators[method](**resolve(calibrators[method], given, method))
