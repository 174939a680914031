"""What a process that is stopped at any moment has yet to put in order, so that it leaves nothing half-made behind.

Leaving a block does so, as a rule. An interrupt may fall between a step and the block that would undo it, or into the
block's own end; what is written down here is undone then, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

_unfinished: dict[tuple[int, object], Callable[[], None]] = {}
"""By process (a fork has its parent's entries, but must not touch them) and key: what undoes the step."""


def begin(key: object, undo: Callable[[], None]) -> None:
    """Before a step: `undo` is called should the process be stopped before `end(key)`; it must bear being late."""
    _unfinished[os.getpid(), key] = undo


def end(key: object) -> None:
    """The step is over, or undone."""
    _unfinished.pop((os.getpid(), key), None)


def is_unfinished(key: object) -> bool:
    """Whether this process has begun a step and not ended it."""
    return (os.getpid(), key) in _unfinished


def put_in_order() -> None:
    """Undo every step that this process has not ended, the last one first; what can't be undone is left."""
    for key in reversed([key for key in _unfinished if key[0] == os.getpid()]):
        undo = _unfinished.pop(key, None)
        if undo is not None:
            with contextlib.suppress(Exception):
                undo()
