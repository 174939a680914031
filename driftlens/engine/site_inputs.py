"""Inputs of chosen sites, taken while a layer runs; a pass ends as soon as the last of them has been seen."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from torch import Tensor

from driftlens.errors import IncompatibleModelsError
from driftlens.models.chain import Layer, Parameters, SideInputs, State


class _SeenAll(Exception):
    """Thrown out of a layer whose remaining work nobody needs."""


def inputs_and_output(
    layer: Layer, parameters: Parameters, state: State, side: SideInputs, sites: Collection[str]
) -> tuple[dict[str, Tensor], State]:
    """Inputs of the named sites, [n, t, k] or [n, k] each, and the state that leaves the layer.

    Raises:
        IncompatibleModelsError: a site runs twice, or not at all.
    """
    seen: dict[str, Tensor] = {}

    def tap(site: str, x: Tensor) -> None:
        if site in seen:
            raise IncompatibleModelsError(
                f"{layer.path} runs its module {site!r} twice, so it has no one input to calibrate on",
                hint="Leave it out with a pattern of sites.",
            )
        if site in sites:
            seen[site] = x

    out = layer.call(parameters, state, side, tap if sites else None)
    missing = set(sites) - set(seen)
    if missing:
        raise IncompatibleModelsError(
            f"{layer.path} never runs {', '.join(sorted(missing))}",
            hint="Leave it out with a pattern of sites.",
        )
    return seen, out


def inputs_only(
    layer: Layer, parameters: Parameters, state: State, side: SideInputs, sites: Collection[str]
) -> dict[str, Tensor]:
    """Inputs of the named sites; what the layer does after the last of them is not computed.

    Layers are pure functions of what they are given, so nothing is left behind by stopping one in the middle.
    """
    seen: dict[str, Tensor] = {}

    def tap(site: str, x: Tensor) -> None:
        if site in sites:
            seen[site] = x
        if len(seen) == len(sites):
            raise _SeenAll

    with contextlib.suppress(_SeenAll):
        layer.call(parameters, state, side, tap)
    return seen
