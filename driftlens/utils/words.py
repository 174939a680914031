"""Words that every room says alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(n: int, noun: str) -> str:
    """How many there are, with the noun in the right number: "1 task", "2 tasks"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Names in a row: "lam, rho and alpha"."""
    return " and ".join(filter(None, ", ".join(names).rsplit(", ", 1)))


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
