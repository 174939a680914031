"""Rounding of weight changes: how much of a change a number type loses, in numbers and sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Smallest share of a change lost to rounding that is reported.
SAID = 0.01
# Share of changed entries at one rounding step from which on rounding is as large as the change.
COARSE = 0.5


@dataclass(frozen=True)
class ModelChange:
    """Counts of entries in which one model differs from another, before and after rounding.

    Attributes:
        dtype: both models are rounded to it.
        entries: number of entries of the tensors that differ.
        changed: entries that differ before rounding.
        lost: changed entries that are equal in `dtype`.
        steps: changed entries that are one step of `dtype` apart.
        energy: squared norm of the difference.
        start: squared norm of the unchanged model.
    """

    dtype: str
    entries: int = 0
    changed: int = 0
    lost: int = 0
    steps: int = 0
    energy: float = 0.0
    start: float = 0.0

    def __add__(self, other: ModelChange) -> ModelChange:
        counts = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "dtype"}
        # Parts may be stored in different types; the one with more changed entries names the sum.
        return ModelChange(self.dtype if self.changed >= other.changed else other.dtype, **counts)

    @property
    def norm(self) -> float:
        """Length of the difference."""
        return math.sqrt(self.energy)

    @property
    def relative_norm(self) -> float:
        """The length of the difference, relative to the unchanged model."""
        return math.sqrt(self.energy / self.start) if self.start else 0.0

    @property
    def lost_share(self) -> float:
        """The share of changed entries that are equal again after rounding; 0 if there is no change."""
        return self.lost / self.changed if self.changed else 0.0


def lost_words(change: ModelChange, subject: str, whose: str = "the base's") -> str:
    """Describe what rounding loses of a change; empty if that is negligible.

    Args:
        change: counts of the change.
        subject: the subject that changes entries.
        whose: the owner of the unchanged entries.
    """
    if change.lost_share < SAID:
        return ""
    lost = f"{100 * change.lost_share:.1f} %"
    return f"about {lost} of the entries that {subject} changes equal {whose} again in {change.dtype}"


def saved_words(change: ModelChange, subject: str, whose: str = "the base's") -> list[str]:
    """Describe what saving in a narrower type loses of a change, and the option that keeps it; empty if negligible.

    Args:
        change: counts of the change.
        subject: the subject that changes entries.
        whose: the owner of the unchanged entries.
    """
    if not (text := lost_words(change, subject, whose)):
        return []
    return [f"{text}, the dtype of the output; `--out-dtype float32` keeps them"]


def coarse_words(change: ModelChange, subject: str) -> str:
    """Describe a change that is about as large as the steps of the number type both models are stored in; empty
    otherwise.
    """
    if not change.changed or change.steps / change.changed < COARSE:
        return ""
    steps, kept = change.steps / change.changed, 1 - change.changed / change.entries
    return (
        f"about {100 * steps:.1f} % of the entries that {subject} changes are one step of {change.dtype} from the "
        f"base's, and {100 * kept:.1f} % of these tensors' entries equal the base's: smaller changes were already "
        "lost"
    )
