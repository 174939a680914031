"""Live modules and their data, as a caller hands them in; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.config.types import require_name
from driftlens.utils.variants import baseline, expert_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from driftlens.config.requests import LiveSettings
    from driftlens.data.sources import Split
    from driftlens.models.heads import ScoreMap


REQUIRED = ("merged", "experts", "data")
"""What no study can do without."""


@dataclass(frozen=True)
class Modules:
    """What the caller has built and keeps. No file is needed, and none of it is changed.

    Attributes:
        merged: the merged model.
        experts: one per task, of the same class and shape.
        data: per task: a tensor, a tuple `(inputs, labels)`, a Dataset, a DataLoader or other batches, labelled or not.
        base: the common base, if there is one.
        baselines: other merged models to compare with, by name.
        heads: score maps per task, or linear classifiers whose rows are numbered; with labels they give accuracy.
        calibration: samples per task for calibrating, as `data`; a calibration takes those of `data` if left out.
        device: where it is computed; the merged model's own device by default.
    """

    merged: Any = None
    experts: Mapping[str, nn.Module] | None = None
    data: Mapping[str, Any] | None = None
    base: nn.Module | None = None
    baselines: Mapping[str, nn.Module] | None = None
    heads: Mapping[str, ScoreMap | nn.Linear] | None = None
    calibration: Mapping[str, Any] | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        for by_name in (self.experts, self.data, self.baselines, self.heads, self.calibration):
            for name in by_name or ():
                require_name(name)

    @property
    def missing(self) -> list[str]:
        """What of it is not there that no study can do without."""
        return [name for name in REQUIRED if getattr(self, name) is None]

    @property
    def by_variant(self) -> dict[str, nn.Module]:
        """All models by what tables call them."""
        models = {} if self.base is None else {"base": self.base}
        models |= {expert_of(task): expert for task, expert in sorted((self.experts or {}).items())}
        models |= {"merged": self.merged}
        return models | {baseline(name): model for name, model in (self.baselines or {}).items()}

    def splits(self, settings: LiveSettings) -> dict[Split, tuple[Mapping[str, Any], int | None]]:
        """By split the data of every task, and how many samples of each are kept; None keeps all."""
        splits: dict[Split, tuple[Mapping[str, Any], int | None]] = {
            "diagnosis": (self.data or {}, settings.n)
        }
        return splits | (
            {"calibration": (self.calibration, settings.n_calibration)} if self.calibration else {}
        )
