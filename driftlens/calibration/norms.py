"""Re-calibrated norms: FeatCal's closed form for scale and shift of norms, all else as merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import PRESETS, FeatCal
from driftlens.settings import Bounds, Label


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
        lam: Annotated[
            float, Bounds(low=0), Label("Ridge λ"), "the pull towards the anchor, for Gram matrices of norm 1"
        ] = 0.05,
        rho: Annotated[
            float, Bounds(low=0), Label("Anchor ρ"), "the anchor is rho * merged + (1 - rho) * base"
        ] = 2.0,
        alpha: Annotated[
            float, Bounds(low=0, high=1), Label("Target α"), "share of the expert in the target"
        ] = 0.3,
        eps: Annotated[float, Bounds(low=0), Label("Least ε"), "least Gram norm"] = 1e-8,
        anchor: Annotated[
            Literal["merged", "none"], Label("Anchor"), "`none` drops the pull towards the anchor"
        ] = "merged",
        solve_dtype: Annotated[
            Literal["float64", "float32"], Label("Precision"), "of sums and solves"
        ] = "float64",
    ) -> None:
        super().__init__(lam, rho, alpha, eps, ("norm",), anchor, None, solve_dtype)
