"""Re-calibrated norms: FeatCal's closed form for scale and shift of norms, all else as merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import PRESETS, Alpha, Anchor, Eps, FeatCal, Precision, Rho, Ridge


@calibrators.register("norms")
class Norms(FeatCal):
    """What norms alone repair: Eq. 59 of FeatCal, weights and biases staying as merged; the reference for methods that
    change more.

    Args:
        lam: as for `FeatCal`, like all others.
        rho: of the anchor.
        alpha: of the target.
        eps: least Gram norm.
        anchor: `merged` or `none`.
        solve_dtype: of sums and solves.
    """

    title = "Norms only"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            name: {key: value for key, value in preset.items() if key not in ("update", "last_block_tokens")}
            for name, preset in PRESETS.items()
        }
    )
    ablations: ClassVar[Sequence[Mapping[str, Any]]] = ({"rho": 1}, {"alpha": 0}, {"anchor": "none"})

    def __init__(
        self,
        lam: Ridge = 0.05,
        rho: Rho = 2.0,
        alpha: Alpha = 0.3,
        eps: Eps = 1e-8,
        anchor: Anchor = "merged",
        solve_dtype: Precision = "float64",
    ) -> None:
        super().__init__(lam, rho, alpha, eps, ("norm",), anchor, None, solve_dtype)
