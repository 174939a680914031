"""The settings of a calibration as a form gives them, checked by the rules of the spec."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from driftlens.calibration.presets import preset
from driftlens.errors import SpecError
from driftlens.spec.problems import spec_error
from driftlens.spec.types import Number, Part

UPDATES = ("linear", "bias", "norm")
"""Kinds of parameters that can be solved for."""

REPLACE = "Replace a calibration of this name"
"""What the form's field `replace` is called; an error points to it."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")
_COUNTED = re.compile(r"(.+)-(\d{1,9})")


class _Coefficients(Part):
    lam: Annotated[Number, Field(ge=0)] | None = None
    rho: Annotated[Number, Field(ge=0)] | None = None
    alpha: Annotated[Number, Field(ge=0, le=1)] | None = None
    update: tuple[Literal["linear", "bias", "norm"], ...] | None = None


@dataclass(frozen=True)
class CalibrationSettings:
    """One calibration, as a form asks for it. None leaves a value to the preset, then to the run's spec.

    Attributes:
        name: of the calibration; its variant is `calibrated:NAME`.
        preset: name of a published setting.
        lam: ridge, relative to a Gram matrix of norm 1.
        rho: the anchor is rho * merged + (1 - rho) * base.
        alpha: share of the expert in the target.
        samples: calibration samples per task.
        layers: pattern on module paths; empty is all blocks.
        update: kinds of parameters that are solved for; empty leaves it to the preset.
        auto: whether lambda, rho and alpha are chosen on held-out calibration samples.
        save_weights: whether a folder is written that the original library loads, with a model card.
        replace: whether a calibration of that name may be replaced.
        resume: whether an interrupted calibration of that name goes on where it stopped.
    """

    name: str = "featcal"
    preset: str | None = "paper-clip"
    lam: float | None = None
    rho: float | None = None
    alpha: float | None = None
    samples: int | None = None
    layers: str = ""
    update: tuple[str, ...] = ()
    auto: bool = False
    save_weights: bool = False
    replace: bool = False
    resume: bool = False

    def check(self) -> None:
        """Refuse what the command line would refuse.

        Raises:
            SpecError: a value is out of its range; says which, and what is allowed.
        """
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} can't be the name of a calibration",
                hint="Use letters, digits, `-`, `_` and `.`, for example featcal.",
            )
        if self.preset is not None:
            preset(self.preset)
        if self.samples is not None and self.samples < 1:
            raise SpecError(f"samples is {self.samples}, expected a whole number from 1 upwards")
        if not self.layers.isprintable() or self.layers.startswith("-"):
            raise SpecError(f"{self.layers!r} can't be a pattern on module paths")
        if self.auto and (self.lam, self.rho, self.alpha) != (None, None, None):
            raise SpecError(
                "lambda, rho and alpha are given, and are to be chosen too",
                hint="Leave them empty, or switch the automatic choice off.",
            )
        given = {"lam": self.lam, "rho": self.rho, "alpha": self.alpha, "update": list(self.update) or None}
        try:
            _Coefficients.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise spec_error(error, given, "calibration") from error

    def require_free_name(self, taken: Container[str]) -> None:
        """Refuse a name that a finished calibration has, unless that is to be replaced or gone on with.

        Raises:
            SpecError: the name is among `taken`; says what to do about it.
        """
        if self.name in taken and not (self.replace or self.resume):
            raise SpecError(
                f"the run has a calibration {self.name!r} already",
                hint=f"Tick '{REPLACE}', or choose another name.",
            )

    def with_free_name(self, taken: Container[str]) -> Self:
        """The same under the first name that is not among `taken`, replacing nothing: `featcal`, `featcal-2` ..."""
        counted = _COUNTED.fullmatch(self.name)
        stem, number = counted.groups() if counted is not None else (self.name, "1")
        numbered = (f"{stem}-{count}" for count in itertools.count(int(number) + 1))
        free = next(name for name in itertools.chain([self.name], numbered) if name not in taken)
        return dataclasses.replace(self, name=free, replace=False)

    def arguments(self, run: Path) -> tuple[str, ...]:
        """Options of `driftlens calibrate`, behind the run.

        Raises:
            SpecError: a value is out of its range.
        """
        self.check()
        values = {
            "--name": self.name,
            "--preset": self.preset,
            "--lam": self.lam,
            "--rho": self.rho,
            "--alpha": self.alpha,
            "--samples": self.samples,
            "--layers": self.layers or None,
            "--set": f"update=[{', '.join(self.update)}]" if self.update else None,
            "--save-weights": str(self.export_folder(run)) if self.save_weights else None,
        }
        flags = {"--auto": self.auto, "--replace": self.replace, "--resume": self.resume}
        # One argument each, so that no value can be taken for an option.
        options = [f"{option}={value}" for option, value in values.items() if value is not None]
        return (*options, *(flag for flag, is_given in flags.items() if is_given))

    def resumed(self) -> Self:
        """The same calibration, going on where it stopped."""
        return dataclasses.replace(self, resume=True, replace=False)

    def export_folder(self, run: Path) -> Path:
        """Where the folder that the original library loads goes: beside the run, which lists every file in it."""
        return run.parent / f"{run.name}-{self.name}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON knows it."""
        return {**dataclasses.asdict(self), "update": list(self.update)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave. What is missing or ill-typed stays at its default; values that can't be, all do."""
        known = {
            name: values[name]
            for name, kinds in _KINDS.items()
            if name in values and type(values[name]) in kinds
        }
        update = values.get("update")
        known["update"] = tuple(name for name in UPDATES if isinstance(update, list) and name in update)
        try:
            for name in {"lam", "rho", "alpha"} & known.keys():
                known[name] = None if known[name] is None else float(known[name])
            settings = cls(**known)
            settings.check()
        except (SpecError, OverflowError):
            return cls()
        # A field of a web page holds no larger whole number.
        return settings if (settings.samples or 0) < 2**53 else cls()


_NUMBER = (float, int, type(None))
_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "preset": (str, type(None)),
    **dict.fromkeys(("lam", "rho", "alpha"), _NUMBER),
    "samples": (int, type(None)),
    "layers": (str,),
    **dict.fromkeys(("auto", "save_weights", "replace", "resume"), (bool,)),
}
"""What may stand in a record, exactly: True is no number."""
