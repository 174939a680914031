"""What every input may provoke, and nothing else: an answer, or one of our errors within bounds."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftlens.utils.errors import wrap_library_error

SECONDS = 5.0
"""Of the processor, that reading one input may take."""
MOST_GROWTH = 1 << 20
"""Kibibytes by which the process may grow over all inputs together: a gibibyte."""

CANARY = Path("canary")
"""What code that an input smuggles in would create, in the folder that a test works in."""


class Hang(BaseException):
    """An input kept the processor busy for too long."""


def peak() -> int:
    """The most memory that this process ever held, in kibibytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def within_bounds() -> Iterator[None]:
    """A block that reads one input: it ends within limits, or raises an error, ours or a library's, that names a cause.

    Raises:
        Hang: it took too long.
        AssertionError: the error has no message, or the exit code of a defect.
    """

    def give_up(number: int, frame: object) -> None:
        raise Hang(f"more than {SECONDS:g} seconds of the processor")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    except Exception as error:
        told = wrap_library_error(error)
        if told is None:
            raise
        assert told.message and told.exit_code in (2, 3, 4), (told.exit_code, told.message)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert not CANARY.exists(), "code from an input was run"
