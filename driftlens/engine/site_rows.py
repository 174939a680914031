"""What chosen sites are fed and what they make of it, taken while a layer runs.

Such a pass may end as soon as nothing more is wanted of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from driftlens.errors import IncompatibleModelsError
from driftlens.models.chain import Layer, Parameters, SideInputs, State


@dataclass(frozen=True)
class SiteRows:
    """Inputs and outputs of sites by their names, [n, t, k] or [n, k] each."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _SeenAll(Exception):
    """Thrown out of a layer whose remaining work nobody needs."""


def rows_and_output(
    layer: Layer,
    parameters: Parameters,
    state: State,
    side: SideInputs,
    inputs: Collection[str],
    outputs: Collection[str] = (),
) -> tuple[SiteRows, State]:
    """What goes into some sites and comes out of some, and the state that leaves the layer.

    Raises:
        IncompatibleModelsError: a site runs twice, or not at all.
    """
    seen = SiteRows()

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        if site in seen.inputs or site in seen.outputs:
            raise IncompatibleModelsError(
                f"{layer.path} runs its module {site!r} twice, so it has no one input to calibrate on",
                hint="Leave it out with a pattern of sites.",
            )
        if site in inputs:
            seen.inputs[site] = x
        return partial(seen.outputs.__setitem__, site) if site in outputs else None

    out = layer.call(parameters, state, side, tap if inputs or outputs else None)
    _require_all(layer, seen, inputs, outputs)
    return seen, out


def rows_only(
    layer: Layer,
    parameters: Parameters,
    state: State,
    side: SideInputs,
    inputs: Collection[str],
    outputs: Collection[str] = (),
) -> SiteRows:
    """What goes into some sites and comes out of some; what the layer does after the last of them is not computed.

    Layers are pure functions of what they are given, so nothing is left behind by stopping one in the middle.

    Raises:
        IncompatibleModelsError: a site doesn't run at all.
    """
    seen = SiteRows()
    if not inputs and not outputs:
        return seen

    def stop_after_all() -> None:
        if len(seen.inputs) == len(inputs) and len(seen.outputs) == len(outputs):
            raise _SeenAll

    def hear(site: str, y: Tensor) -> None:
        seen.outputs[site] = y
        stop_after_all()

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        if site in inputs:
            seen.inputs[site] = x
            stop_after_all()
        return partial(hear, site) if site in outputs else None

    with contextlib.suppress(_SeenAll):
        layer.call(parameters, state, side, tap)
    _require_all(layer, seen, inputs, outputs)
    return seen


def _require_all(layer: Layer, seen: SiteRows, inputs: Collection[str], outputs: Collection[str]) -> None:
    missing = (set(inputs) - set(seen.inputs)) | (set(outputs) - set(seen.outputs))
    if missing:
        raise IncompatibleModelsError(
            f"{layer.path} never runs {', '.join(sorted(missing))}",
            hint="Leave it out with a pattern of sites.",
        )
