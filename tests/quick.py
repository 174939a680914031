"""Parameters of which a newcomer's tests run few, and the slow ones all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The names, or tuples of values, as parameters, all but the quick ones slow.

    Raises:
        AssertionError: a quick one is none of them.
    """
    names = list(names)
    assert set(quick) <= set(names), set(quick) - set(names)
    values = [name if isinstance(name, tuple) else (name,) for name in names]
    marks = [() if name in quick else pytest.mark.slow for name in names]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]
