"""What changes from merged to calibrated, split by the anchor alone that stands between the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """One measure before, with the anchor alone, and after; NaN where it was not measured, and so in what follows.

    Attributes:
        before: of the merged model.
        control: with the calibration's anchor alone; the value before where the anchor is the merged model.
        after: of the calibrated model.
    """

    before: float
    control: float
    after: float

    @property
    def change(self) -> float:
        """After minus before: the sum of the two parts."""
        return self.after - self.before

    @property
    def rescaling(self) -> float:
        """What the anchor alone changes."""
        return self.control - self.before

    @property
    def calibration(self) -> float:
        """What the calibration changes beyond its anchor."""
        return self.after - self.control
