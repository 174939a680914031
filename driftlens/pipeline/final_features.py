"""Final features of whole models, and how far two models' are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.data.samples import SampleSet
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import layer_states, waiting_bytes
from driftlens.linalg.cosine import expert_cosine
from driftlens.models.chain import Pool, pooled

CHUNK_BYTES = 256 << 20
"""Features that wait at a boundary at a time."""


@torch.no_grad()
def final_features(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Tensor:
    """What leaves the last layer of one model, one vector per sample, [n, d].

    Args:
        pool: the models.
        model: one of them.
        task: for messages.
        samples: at least one.
        pooling: how a vector per sample is taken.

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    return torch.cat(list(_by_batch(pool, model, task, samples, pooling)))


def _by_batch(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Iterator[Tensor]:
    per_sample = waiting_bytes(pool, model, samples.load([0]))
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    for first in range(0, len(samples), length):
        chunk = samples.batches(first, min(first + length, len(samples)))
        for layer, states in layer_states(pool, model, chunk, task=task):
            if layer.role == "head":
                for _, state, side in states:
                    yield pooled(state[layer.stream], pooling, side.get(f"{layer.stream}_mask"))


@dataclass(frozen=True)
class FinalDrift:
    """How far a model's final features are from the expert's; the columns of the layer table's last row.

    Attributes:
        drift_l2_mean: mean norm of the difference.
        drift_rel: sum of these norms against the sum of the expert's feature norms.
        cos_mean: mean cosine to the expert's feature, over samples that have one.
    """

    drift_l2_mean: float
    drift_rel: float
    cos_mean: float

    @classmethod
    def between(cls, found: Tensor, expert: Tensor) -> FinalDrift:
        """From the final features of a model and of the expert, [n, d] each, on the same samples."""
        drift = torch.linalg.vector_norm(found - expert, dim=1).double()
        size = float(torch.linalg.vector_norm(expert, dim=1).double().sum())
        relative = float(drift.sum()) / size if size else math.nan
        return cls(float(drift.mean()), relative, float(expert_cosine(found, expert).double().nanmean()))
