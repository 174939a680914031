"""Samples of one task and split, in a fixed order, read batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Consecutive samples: positions in the set, and the model's raw inputs (tensor or dict of tensors)."""

    start: int
    stop: int
    inputs: Any


@dataclass(frozen=True)
class SampleSet:
    """What one split of one task offers, drawn once and kept in this order.

    Attributes:
        task: the task's name.
        split: calibration, diagnosis or test.
        ids: one identifier per sample (see contract: path, `test/17`, row index).
        labels: class name per sample, or None when the data has no labels.
        load: positions -> raw inputs of those samples, preprocessed and stacked.
        batch_size: samples per batch.
        notices: what a reader of the results must be told about the samples.
    """

    task: str
    split: str
    ids: tuple[str, ...]
    labels: tuple[str, ...] | None
    load: Callable[[Sequence[int]], Any]
    batch_size: int = 32
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches of the samples [start, stop), each read when it is asked for."""
        end = len(self.ids) if stop is None else stop
        for first in range(start, end, self.batch_size):
            last = min(first + self.batch_size, end)
            yield Batch(first, last, self.load(range(first, last)))
