"""Calibrations that walk side by side, and what they still have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from driftlens.engine.layer_sums import LayerSums
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import Calibrator
from driftlens.models.chain import Layer


@dataclass(frozen=True)
class Lane:
    """One calibration among many.

    Attributes:
        calibrator: its settings and closed forms.
        parts: numbers of the parts of the samples that it may read.
    """

    calibrator: Calibrator
    parts: frozenset[int]


@dataclass
class LaneSolution:
    """What one lane solved.

    Attributes:
        updates: (layer index, own parameter name) -> calibrated value, as the checkpoint's dtype can hold it.
        seconds: its own work, and an equal share of what it had in common with others.
    """

    updates: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class Branch:
    """Lanes that still have the merged model's features in common.

    `sums` holds the moments of the layer at hand, once for all lanes that want the same ones.
    """

    def __init__(self, name: str, lanes: Mapping[int, Lane]) -> None:
        self.name = name
        self.lanes = lanes
        self.parts = frozenset[int]().union(*(lane.parts for lane in lanes.values()))
        self.sums: dict[tuple[Any, ...], LayerSums] = {}

    def start(self, layer: Layer, names: Collection[str], pool: ModelPool) -> None:
        """Begin to sum up for the sites of a layer."""
        self.sums = {}
        for lane in self.lanes.values():
            if moments_key(lane) not in self.sums:
                self.sums[moments_key(lane)] = LayerSums(
                    pool.chain, layer, names, lane.calibrator, objectives=False
                )

    def readers(self, part: int) -> list[LayerSums]:
        """The sums that a part of the samples belongs in."""
        keys = {moments_key(lane): None for lane in self.lanes.values() if part in lane.parts}
        return [self.sums[key] for key in keys]


def moments_key(lane: Lane) -> tuple[Any, ...]:
    """What a layer's moments depend on besides its features; ridge and anchor only enter the solve."""
    calibrator = lane.calibrator
    return calibrator.alpha, calibrator.last_block_tokens, calibrator.solve_dtype, lane.parts
