"""Words that every room says alike."""

from __future__ import annotations

from collections.abc import Iterable


def counted(n: int, noun: str) -> str:
    """How many there are, with the noun in the right number: "1 task", "2 tasks"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Names in a row: "lam, rho and alpha"."""
    return " and ".join(filter(None, ", ".join(names).rsplit(", ", 1)))
