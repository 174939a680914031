"""A few dozen texts and pictures of no task in particular, for models that come without data."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from driftlens.suites.drawing import Pixels, tasks

PICTURES = 96
"""How many pictures there are: of every drawn task as many."""


def texts() -> tuple[str, ...]:
    """Short texts of many kinds: news, questions, instructions, dialogue, reviews, mathematics, code."""
    return tuple(filter(None, files(__package__).joinpath("probe.txt").read_text("utf-8").splitlines()))


def pictures() -> Pixels:
    """Pictures [n, h, w, 3] of all drawn tasks, the same on every machine."""
    each = PICTURES // len(tasks)
    return np.concatenate([task.pictures("test", each, seed=0)[0] for task in tasks.values()])
