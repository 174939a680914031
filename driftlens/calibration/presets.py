"""Published settings of FeatCal, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from driftlens.errors import SpecError

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The paper's text, all CLIP suites; also the defaults of `FeatCal`.
        "paper-clip": {"lam": 0.05, "rho": 2.0, "alpha": 0.3, "update": ("linear", "bias", "norm")},
        # The authors' script for eight ViT-B/32 tasks; of the last block only the class token counts fully.
        "demo-clip": {
            "lam": 0.05,
            "rho": 2.2,
            "alpha": 0.25,
            "update": ("linear", "bias", "norm"),
            "last_block_tokens": "cls_emphasis",
        },
    }
)
"""Name -> parameters of `FeatCal`, of models that can be loaded; what a preset leaves out keeps its default."""


def preset(name: str) -> dict[str, Any]:
    """The parameters of a preset, as a copy.

    Raises:
        SpecError: there is no such preset; the message names those there are.
    """
    if name not in PRESETS:
        raise SpecError(f"no calibration preset called {name!r}", hint=f"There are {', '.join(PRESETS)}.")
    return dict(PRESETS[name])
