"""Refusals of settings, in words."""

from __future__ import annotations

import math
from collections.abc import Collection

from driftlens.errors import SpecError


def require_number(name: str, value: object, at_least: float = -math.inf, at_most: float = math.inf) -> None:
    """Refuse what is not a finite number in a range.

    Raises:
        SpecError: names the setting, its value and the range.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not at_least <= value <= at_most:  # type: ignore[operator]
        bounds = [f"at least {at_least:g}"] * (at_least > -math.inf) + [f"at most {at_most:g}"] * (
            at_most < math.inf
        )
        wanted = " ".join(["a finite number", " and ".join(bounds)]).strip()
        raise SpecError(f"{name} is {value!r}; expected {wanted}", setting=name)


def require_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse what is not one of a few words.

    Raises:
        SpecError: names the setting, its value and the words.
    """
    if value not in allowed:
        raise SpecError(f"{name} is {value!r}; expected one of {', '.join(allowed)}", setting=name)
