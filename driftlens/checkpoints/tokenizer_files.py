"""What a tokenizer's files ask of the library that builds it: bounds, beyond which it would not end or find memory."""

from __future__ import annotations

import base64
import contextlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from driftlens.base.errors import CheckpointError, DriftLensError, IncompatibleModelsError
from driftlens.checkpoints.loading import config_file, read_json

MOST_TOKENS = 10_000_000
"""Number of a token: libraries make room for all below the highest."""
MOST_EXTRA = 10_000
"""Tokens that a configuration may ask for by their count alone."""
MOST_GROWTH = 500
"""How many times longer a text may become before it is cut into tokens, or when it is put together again."""

_CONFIG = "tokenizer_config.json"
_NUMBERED = ("vocab.json", "added_tokens.json")
_COUNTS = ("extra_ids", "num_madeup_words", "offset")
_DOUBLING = ("ByteLevel", "BPEDecoder", "CTC")
"""Steps that may write two characters for one."""


@contextlib.contextmanager
def bounded_tokenizer(source: str, *, offline: bool) -> Iterator[None]:
    """A block that builds the tokenizer of a folder or Hub repository, which has been looked at before.

    Raises:
        IncompatibleModelsError: it asks for more than any machine has, or the library breaks down on it.
    """
    for file, stated in _stated(source, offline):
        if file == _CONFIG:
            _require_counts(stated, f"{source}, {file}")
        elif file in _NUMBERED:
            _require_numbers(stated.values(), f"{source}, {file}")
        else:
            _require_numbers(_numbers(stated), f"{source}, {file}")
            _require_growth(stated, f"{source}, {file}")
    try:
        yield
    except DriftLensError:
        raise
    except BaseException as error:
        # What libraries in Rust break down with is no Exception, so that nobody catches it.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise IncompatibleModelsError(
            f"{source}: its tokenizer can't be used: {error}",
            hint="Restore tokenizer.json from the original.",
        ) from error


def _stated(source: str, offline: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files that the library may read, by name; what is missing or damaged others say."""
    config = _read(source, _CONFIG, offline)
    yield _CONFIG, config
    further = config.get("fast_tokenizer_files")
    names = [name for name in further if isinstance(name, str)] if isinstance(further, list) else []
    for file in ("tokenizer.json", *(name for name in names if "/" not in name)):
        yield file, (whole := _read(source, file, offline))
        # With a whole tokenizer, what lies beside it is older: nothing of that is fetched.
        offline = offline or bool(whole)
    for file in _NUMBERED:
        yield file, _read(source, file, offline)


def _read(source: str, file: str, offline: bool) -> Mapping[str, Any]:
    with contextlib.suppress(CheckpointError):
        place = config_file(source, file, offline=offline)
        return {} if place is None else read_json(place)
    return {}


def _numbers(stated: Mapping[str, Any]) -> Iterator[Any]:
    """The numbers that a tokenizer.json gives to tokens; those of a list are its rows."""
    model, added = stated.get("model"), stated.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    yield from vocabulary.values() if isinstance(vocabulary, dict) else ()
    yield from (
        (token.get("id") for token in added if isinstance(token, dict)) if isinstance(added, list) else ()
    )


def _require_numbers(numbers: Iterator[Any] | Any, where: str) -> None:
    highest = max((number for number in numbers if isinstance(number, int)), default=0)
    if highest > MOST_TOKENS:
        raise _refused(f"{where}: a token has the number {highest:,}", f"At most {MOST_TOKENS:,} are read")


def _require_counts(config: Mapping[str, Any], where: str) -> None:
    decoder = config.get("added_tokens_decoder")
    keys = decoder if isinstance(decoder, dict) else {}
    _require_numbers([int(key) for key in keys if key.isdecimal() and len(key) < 100], where)
    for name in _COUNTS:
        if isinstance(count := config.get(name), int | float) and count > MOST_EXTRA:
            raise _refused(f"{where}: {name} is {count:,}", f"At most {MOST_EXTRA:,} tokens are added")


def _require_growth(stated: Mapping[str, Any], where: str) -> None:
    for parts in (("normalizer", "pre_tokenizer"), ("post_processor", "decoder")):
        growth = math.prod(_growth(node, where) for part in parts for node in _steps(stated.get(part)))
        if growth > MOST_GROWTH:
            raise _refused(
                f"{where}: its {' and '.join(parts)} may make a text {growth:,} times longer",
                f"At most {MOST_GROWTH} times is done",
            )


def _steps(stated: Any) -> Iterator[dict[str, Any]]:
    """Everything that has a type, however it is nested."""
    nodes = [stated]
    while nodes:
        node = nodes.pop()
        nodes += node if isinstance(node, list) else node.values() if isinstance(node, dict) else ()
        if isinstance(node, dict) and isinstance(node.get("type"), str):
            yield node


def _growth(step: dict[str, Any], where: str) -> int:
    """How many characters a step may write for one."""
    if step["type"] == "Replace":
        given = step.get("pattern")
        pattern = given if isinstance(given, dict) else {"String": given}
        if "" in pattern.values():
            raise _refused(f"{where}: a Replace has an empty pattern", "It would fit everywhere, without end")
        # An expression may also fit between characters.
        return max(1, len(str(step.get("content") or ""))) + ("Regex" in pattern)
    if step["type"] == "Prepend":
        return max(1, len(str(step.get("prepend") or "")))
    if step["type"] == "Precompiled":
        return _longest(step.get("precompiled_charsmap"))
    return 2 if step["type"] in _DOUBLING else 1


def _longest(charsmap: Any) -> int:
    """Characters of the longest text that SentencePiece's table, behind the tree that finds them, has for one."""
    if not charsmap:
        return 1
    try:
        content = base64.b64decode(charsmap)
        (size,) = struct.unpack_from("<I", content)
    except (ValueError, TypeError, struct.error):
        return 1  # the library can't read it either
    return max(1, *map(len, content[4 + size :].decode("utf-8", "replace").split("\0")))


def _refused(what: str, bound: str) -> IncompatibleModelsError:
    return IncompatibleModelsError(what, hint=f"{bound}; restore the tokenizer from the original.")
