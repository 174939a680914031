"""Which samples of a split are used: drawn without replacement, from seed, task and split alone."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np

from driftlens.data.sources import Split, SplitView
from driftlens.errors import DataError

COUNT_KEYS: Mapping[Split, str] = {"calibration": "n", "diagnosis": "n_diagnosis", "test": "n_test"}
"""The spec's key for the number of samples of each split."""


def draw(
    view: SplitView,
    n: int | Literal["all"],
    seed: int,
    *,
    task: str,
    split: Split,
    exclude_ids: Collection[str] = (),
) -> tuple[int, ...]:
    """Positions of the drawn samples, in the order drawn; `all` keeps the split's own order.

    The same arguments give the same samples on every machine, and a smaller `n` a beginning of a larger one.

    Args:
        view: the samples there are.
        n: how many to draw, or `all`.
        seed: decides which.
        task: the task's name; two tasks on the same data draw differently.
        split: what the samples are for.
        exclude_ids: samples that must not be drawn.

    Raises:
        DataError: fewer samples than `n` are left; the hint names the key to change.
    """
    excluded = frozenset(exclude_ids)
    left = [position for position, sample in enumerate(view.ids) if sample not in excluded]
    wanted = len(left) if n == "all" else n
    if wanted > len(left) or not left:
        raise _too_few(view, n, len(left), task, split)
    if n == "all":
        return tuple(left)
    return tuple(left[index] for index in shuffled(len(left), seed, task=task, split=split)[:wanted])


def shuffled(count: int, seed: int, *, task: str, split: Split) -> list[int]:
    """The numbers 0 to count - 1 in the order in which samples are drawn; `draw` says what decides it."""
    # Python's own hash() of text changes from process to process; this one does not.
    digest = hashlib.sha256(f"{split}/{task}".encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    generator = np.random.default_rng(np.random.SeedSequence([seed, *words]))
    return [int(index) for index in generator.permutation(count)]


def _too_few(view: SplitView, n: int | Literal["all"], left: int, task: str, split: Split) -> DataError:
    taken = len(view) - left
    also = f", {taken} of which serve calibration" if taken else ""
    hint = f"Set data.{task}.{COUNT_KEYS[split]}: {left}, or bring more samples."
    if not left:
        hint = "Give calibration a folder, file or split of its own."
    return DataError(
        f"task {task}: {n} {split} samples asked for, but {view.origin} holds {len(view)}{also}",
        hint=hint,
        asked=n,
        available=left,
    )


def unequal_counts(counts: Mapping[str, int], split: Split) -> tuple[str, ...]:
    """A notice that tasks use different numbers of samples, or nothing where they agree.

    Args:
        counts: samples per task.
        split: what the samples are for.
    """
    if len(set(counts.values())) < 2:
        return ()
    listed = ", ".join(f"{task} {count}" for task, count in sorted(counts.items()))
    return (f"the number of {split} samples differs between tasks: {listed}",)
