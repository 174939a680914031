"""What is refused, and what the refusal names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from driftlens.utils.errors import DriftLensError


@contextmanager
def refusing(
    error: type[DriftLensError],
    *words: str,
    match: str | None = None,
    hint: str | tuple[str, ...] = "",
    code: int | None = None,
) -> Iterator[None]:
    """The block ends with this error, with all words in its message and all of `hint` in a hint.

    Args:
        error: its class.
        words: what its message holds.
        match: a pattern found in message and hint.
        hint: what the hint holds; "" asks for none.
        code: the exit code that it stands for.
    """
    with pytest.raises(error, match=match) as refusal:
        yield
    assert all(word in refusal.value.message for word in words), refusal.value
    assert all(word in refusal.value.hint for word in ((hint,) if isinstance(hint, str) else hint)), refusal.value
    assert code in (None, refusal.value.exit_code)
