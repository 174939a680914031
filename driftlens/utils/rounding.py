"""What a number type leaves of a change of weights: numbers, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

SAID = 0.01
"""Share of a change, lost to a number type, from which on it is said."""
COARSE = 0.5
"""Share of a change, lost or at one step of a number type, from which on rounding is as large as the change."""


@dataclass(frozen=True)
class Change:
    """Counts of entries in which one model differs from another, before and after rounding.

    Attributes:
        dtype: what both are rounded to.
        entries: all that were looked at, of tensors that differ.
        changed: those that differ before rounding.
        lost: of the changed, those that are equal in `dtype`.
        steps: of the changed, those that are one step of `dtype` apart.
        energy: squared norm of the difference.
        start: squared norm of what is changed.
    """

    dtype: str
    entries: int = 0
    changed: int = 0
    lost: int = 0
    steps: int = 0
    energy: float = 0.0
    start: float = 0.0

    def __add__(self, other: Change) -> Change:
        counts = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "dtype"}
        return Change(self.dtype if self.changed >= other.changed else other.dtype, **counts)

    @property
    def norm(self) -> float:
        """Length of the difference."""
        return math.sqrt(self.energy)

    @property
    def distance(self) -> float:
        """The same relative to what is changed."""
        return math.sqrt(self.energy / self.start) if self.start else 0.0

    @property
    def lost_share(self) -> float:
        """Which part of the changed entries is equal again after rounding; 0 where nothing is changed."""
        return self.lost / self.changed if self.changed else 0.0


def lost_words(change: Change, what: str, whose: str = "the base's") -> str:
    """What rounding loses of a change; empty where that is next to nothing."""
    if change.lost_share < SAID:
        return ""
    lost = f"{100 * change.lost_share:.1f} %"
    return f"about {lost} of the entries that {what} changes equal {whose} again in {change.dtype}"


def saved_words(change: Change, what: str, whose: str = "the base's") -> list[str]:
    """The same of what was computed in more digits than it is saved in, with what keeps them; empty elsewhere."""
    if not (text := lost_words(change, what, whose)):
        return []
    return [f"{text}, in which it is saved; with `--out-dtype float32` it keeps them"]


def coarse_words(change: Change, what: str) -> str:
    """That a change which both models store in one number type is about as large as its steps; empty elsewhere."""
    if not change.changed or change.steps / change.changed < COARSE:
        return ""
    steps, kept = change.steps / change.changed, 1 - change.changed / change.entries
    return (
        f"about {100 * steps:.1f} % of the entries that {what} changes are one step of {change.dtype} from the "
        f"base's, and {100 * kept:.1f} % of the same tensors' entries are the base's: what was smaller is lost "
        "already, and how much that is, no file tells"
    )
