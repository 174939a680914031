"""Parameters of which a newcomer's tests run few, CI some, and `make every` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from driftlens.utils.registry import Registry


def few(names: Iterable[Any], quick: Collection[Any], some: Collection[Any] | None = None) -> list[Any]:
    """The names as parameters: all but the quick ones slow, and all but these and `some`, if given, `every`'s.

    Raises:
        AssertionError: one of those that are picked is none of them.
    """
    names, picked = list(names), {*quick, *(some or ())}
    assert picked <= set(names), picked - set(names)
    return [pytest.param(name, marks=paced(name, quick, some)) for name in names]


def paced(name: Any, quick: Collection[Any], some: Collection[Any] | None = None) -> list[pytest.MarkDecorator]:
    """The marks of one of these parameters."""
    is_quick = name in quick
    is_picked = is_quick or some is None or name in some
    return [*([] if is_quick else [pytest.mark.slow]), *([] if is_picked else [pytest.mark.every])]


def temporary_entries(registry: Registry[Any]) -> AbstractContextManager[Any]:
    """Unregister, at the end of the block, all entries registered inside it."""
    len(registry)  # imports the others
    return patch.dict(registry._entries)
