"""What open_clip's own modules give for the samples of a run, in float64; no engine, no adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from driftlens.runs.run import DriftRun
from tests.reference.drift import Row, drift_rows, open_clip_steps
from tests.zoo.world import LOGIT_SCALE, World, clip, labels, merged_weights, pixels

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Library:
    """The world's models as open_clip builds them, asked about the samples of one run."""

    world: World
    run: DriftRun
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, world: World, run: DriftRun) -> Library:
        states = {name: world.state(name) for name in world.names} | {"merged": merged_weights(world)}
        return cls(world, run, {name: clip(state).double() for name, state in states.items()})

    def pixels(self, task: str, split: str = "diagnosis") -> Tensor:
        return pixels(self.world.data(task), self.run.sample_ids(task, split))

    def labels(self, task: str, split: str = "diagnosis") -> list[str]:
        return labels(self.world.data(task), self.run.sample_ids(task, split))

    def rows(self, task: str, variant: str) -> list[list[Row]]:
        """[layer - 1][sample], layer by layer and sample by sample."""
        steps = [open_clip_steps(self.modules[name].visual) for name in (variant, task)]
        samples = drift_rows(*steps, self.pixels(task))
        return [list(layer) for layer in zip(*samples, strict=True)]

    def states(self, task: str, model: str) -> list[Tensor]:
        """States at boundaries 1..L of an ordinary forward pass, read off by hooks."""
        visual = self.modules[model].visual
        found: list[Tensor] = []
        watched = [visual.ln_pre, *visual.transformer.resblocks]
        handles = [module.register_forward_hook(lambda *call: found.append(call[-1])) for module in watched]
        with torch.no_grad():
            final = visual(self.pixels(task))
        for handle in handles:
            handle.remove()
        return [*found, final]

    def scores(self, task: str, model: str, split: str = "diagnosis") -> Tensor:
        """Class scores [n, classes]."""
        embeddings = load_file(self.world.folder / "heads.safetensors")[task].double()
        with torch.no_grad():
            features = self.modules[model].encode_image(self.pixels(task, split))
        return LOGIT_SCALE * F.normalize(features, dim=1) @ embeddings.T


def stacked(rows: list[Row], name: str) -> Values:
    """One field of all samples' rows, [n, ...]."""
    return np.stack([np.asarray(getattr(row, name)) for row in rows])


def norms(vectors: Values) -> Values:
    return np.linalg.norm(vectors, axis=1)
