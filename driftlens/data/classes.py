"""Class names of data and head, compared by name, never by position."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from driftlens.errors import DataError

SHOWN = 10
"""How many names of a long difference a message lists."""


def require_same_classes(
    data: Iterable[str], head: Iterable[str], *, where: str, all_of_head: bool = True
) -> None:
    """Refuse data whose classes are not those of the head; order plays no part.

    Args:
        data: the classes as the data source names them.
        head: the classes of the head's rows.
        where: what messages call the data: task and split.
        all_of_head: whether the data must have every class; splits that serve no accuracy need not.

    Raises:
        DataError: the sets differ; the message lists what only one of them has, the hint names alike.
    """
    only_data = sorted(set(data) - set(head))
    only_head = sorted(set(head) - set(data))
    if not only_data and not (only_head and all_of_head):
        return
    parts = ["the classes of the data and of the head differ"]
    if only_data:
        parts.append(f"only in data: {_listed(only_data)}")
    if only_head and all_of_head:
        parts.append(f"only in head: {_listed(only_head)}")
    raise DataError(
        f"{where}: {'; '.join(parts)}",
        hint=_lookalikes(only_data, only_head) or _remedy(only_data),
        only_in_data=only_data,
        only_in_head=only_head,
    )


def _lookalikes(only_data: list[str], only_head: list[str]) -> str:
    by_plain_form = {_plain(name): name for name in only_head}
    pairs = [(name, by_plain_form[_plain(name)]) for name in only_data if _plain(name) in by_plain_form]
    if not pairs:
        return ""
    alike = ", ".join(f"{ours!r} looks like {theirs!r}" for ours, theirs in pairs[:SHOWN])
    return f"{alike}: names must agree letter by letter, so rename one of them."


def _remedy(only_data: list[str]) -> str:
    if only_data and all(name.isdecimal() for name in only_data):
        return "The data has numbers for class names: store the names with it (class_names, ClassLabel)."
    return "List the same names in `heads.<task>.classes` and in the data."


def _plain(name: str) -> str:
    """A name without case, spaces and punctuation, its accents encoded in one way."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "".join(character for character in folded if character.isalnum()) or folded


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
