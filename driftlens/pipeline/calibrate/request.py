"""What a user asks a calibration to be, and the calibrator that follows from it, the preset and the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.errors import SpecError, did_you_mean
from driftlens.settings import settings_of

if TYPE_CHECKING:
    from driftlens.spec.sections import Calibration


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
        section: the spec's `calibration`; its own values stand over its own preset.

    Raises:
        SpecError: no such method, preset or parameter, or a value out of its range.
    """
    method = method_of(request, section)
    kind = calibrators[method]
    given: dict[str, Any] = {}
    if section is not None:
        given |= _preset(kind, section.preset) | _explicit(section)
    given |= _preset(kind, request.preset) | dict(request.parameters)
    known = [setting.name for setting in settings_of(kind)]
    for name in given:
        if name not in known:
            raise SpecError(
                f"{method} has no parameter {name!r}; it has {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
    return kind(**given)


def _explicit(section: Calibration) -> dict[str, Any]:
    """The hyperparameters that a spec writes down itself; its sites choose modules and are none."""
    values = section.model_dump(exclude={"method", "preset", "sites"}, exclude_none=True)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _preset(kind: type[Calibrator], name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in kind.presets:
        raise SpecError(
            f"no preset is called {name!r}; there are {', '.join(kind.presets) or 'none'}",
            hint=did_you_mean(name, kind.presets),
        )
    return dict(kind.presets[name])
