"""Which layers of a chain a spec or a command means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from driftlens.base.errors import LayerNotFoundError


def select_layers(paths: Sequence[str], pattern: str | int | Sequence[str | int]) -> list[int]:
    """Indices of the layers to store and show, ascending; stem and head are always among them.

    `pattern`: `blocks`, `final` for the head, a glob on module paths, an index (1 is the stem), or a list of these.
    """
    patterns = [pattern] if isinstance(pattern, str | int) else pattern
    chosen = {1, len(paths)}
    for part in patterns:
        chosen.update(_matches(paths, part))
    return sorted(chosen)


def _matches(paths: Sequence[str], pattern: str | int) -> list[int]:
    count = len(paths)
    if isinstance(pattern, int):
        if not 1 <= pattern <= count:
            raise LayerNotFoundError(
                f"no layer {pattern}: the model has layers 1 (stem) to {count} (head)",
                hint="Blocks are counted from 2: block j of the library is layer j + 2.",
            )
        return [pattern]
    if pattern == "blocks":
        return list(range(2, count))
    if pattern == "final":
        return [count]
    indices = [index for index, path in enumerate(paths, start=1) if fnmatchcase(path, pattern)]
    if not indices:
        near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
        raise LayerNotFoundError(
            f"no layer matches {pattern!r}; the nearest are {', '.join(near)}",
            hint=f"Use `blocks`, a pattern such as `{paths[count // 2][:-1]}*`, or layer numbers.",
            nearest=near,
        )
    return indices
