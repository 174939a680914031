"""What a whole model with all weights in memory scores, as a differentiable function of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from driftlens.checkpoints.sources import TensorHeader
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import ModelPool
from driftlens.models.chain import Pool
from driftlens.models.heads import LmHead, ScoreMap


class Asked:
    """One task's samples before a score map; `pool` tells how a model computes."""

    def __init__(self, pool: ModelPool, samples: SampleSet, head: ScoreMap, pooling: Pool) -> None:
        self._samples, self._pool, self._head, self._pooling = samples, pool, head, pooling

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def keys(self) -> tuple[str, ...]:
        """The weights that scores depend on."""
        more = self._head.lm.keys if isinstance(self._head, LmHead) else ()
        return tuple(dict.fromkeys((*self._pool.chain.parameter_keys(), *more)))

    @property
    def parts(self) -> tuple[tuple[str, tuple[int, int] | None], ...]:
        """The parameter tensors behind them: keys, and the rows of what a file fuses."""
        slots = [slot for layer in self._pool.chain.layers for slot in layer.parameters.values()]
        rows: dict[str, list[tuple[int, int] | None]] = {key: [] for key in self.keys}
        for key, place in dict.fromkeys((slot.key, slot.rows) for slot in slots):
            rows[key].append(place)
        fused = {key: places for key, places in rows.items() if places and None not in places}
        return tuple((key, place) for key in rows for place in fused.get(key, [None]))

    def placed(self, weight: Tensor) -> Tensor:
        """A weight where and in what it is computed."""
        return weight.to(self._pool.device, self._pool.dtype)

    def log_probabilities(self, rows: Sequence[int], weights: Mapping[str, Tensor]) -> Tensor:
        """Of the classes, [n, classes], for some of the samples; `weights` are as stored, by their keys."""
        state, side = self._pool.begun(self._samples.load(rows))
        held = _Held(weights)
        for layer in self._pool.chain.layers:
            parameters = {
                name: slot.own(held.read(slot.key, slot.rows)) for name, slot in layer.parameters.items()
            }
            state = layer.call(parameters, state, side)
        head = self._head.of(held) if isinstance(self._head, LmHead) else self._head
        return torch.log_softmax(head.scores(layer.vectors(state, side, self._pooling)), dim=-1)


class _Held:
    """Weights as a source that keeps their gradients."""

    name = "the weights in memory"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.headers = {key: TensorHeader(tuple(value.shape), value.dtype) for key, value in weights.items()}
        self._weights = weights

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows [start, stop) of it."""
        return self._weights[key] if rows is None else self._weights[key][slice(*rows)]
