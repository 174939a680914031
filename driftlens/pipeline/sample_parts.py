"""Some of the samples of a set, as a set of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from driftlens.data.samples import SampleSet


def part_of(samples: SampleSet, positions: Sequence[int]) -> SampleSet:
    """The samples at some positions, in this order.

    Args:
        samples: the whole set.
        positions: of samples in it; none are needed.
    """
    chosen = tuple(positions)

    def load(wanted: Sequence[int]) -> Any:
        return samples.load([chosen[position] for position in wanted])

    return dataclasses.replace(
        samples,
        ids=tuple(samples.ids[position] for position in chosen),
        labels=None if samples.labels is None else tuple(samples.labels[position] for position in chosen),
        load=load,
    )


def without(samples: SampleSet, ids: Collection[str]) -> SampleSet:
    """The samples whose ids are not among `ids`; the very same set where that is all of them."""
    gone = frozenset(ids)
    kept = [position for position, sample in enumerate(samples.ids) if sample not in gone]
    return samples if len(kept) == len(samples) else part_of(samples, kept)
