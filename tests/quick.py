"""Parameters of which a newcomer's tests run few, and the slow ones all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The names as parameters, all but the quick ones slow.

    Raises:
        AssertionError: a quick one is none of them.
    """
    names = list(names)
    assert set(quick) <= set(names), set(quick) - set(names)
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]
