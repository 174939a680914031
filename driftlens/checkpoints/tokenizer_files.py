"""Tokenizers of folders and Hub repositories, built here once a process apart has built and used them."""

from __future__ import annotations

import base64
import contextlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from driftlens.base.errors import CheckpointError, IncompatibleModelsError
from driftlens.base.files import plain_file
from driftlens.checkpoints.guarded import MOST_MEMORY, SECONDS, guarded
from driftlens.checkpoints.loading import files_beside_weights, read_json

MOST_GROWTH = 500
"""How many times longer a text may become before it is cut into tokens, or when it is put together again.

The longest of a real table (SentencePiece's, of a ligature in Arabic) has 18 characters for one. No trial shows this:
what makes a text grow may not occur in it.
"""
SECONDS_PER_BYTE, MEMORY_PER_BYTE = 0.5e-6, 64
"""Several times what 262,000 tokens in a file of 10 MiB took: a second, and 300 MB."""
_DOUBLING = ("ByteLevel", "BPEDecoder", "CTC")
"""Steps that may write two characters for one."""


def tokenizer_in(source: str, *, offline: bool, kind: str = "AutoTokenizer") -> Any:
    """The tokenizer of a folder or Hub repository; None where there is none, or its files are damaged.

    Args:
        source: where it is.
        offline: whether the network may not be asked.
        kind: the class of transformers that builds it.
    """
    folder = files_beside_weights(source, offline=offline)
    if folder is None:
        return None
    size = 0
    for file in folder.iterdir():
        if file.match("*token*.json") or file.name in ("vocab.json", "vocab.txt", "merges.txt"):
            size += plain_file(file).stat().st_size
        if file.match("tokenizer*.json"):
            with contextlib.suppress(CheckpointError):  # the library says whether it needs it
                _require_growth(read_json(file), f"{source}, {file.name}")
    seconds, memory = SECONDS + size * SECONDS_PER_BYTE, MOST_MEMORY + size * MEMORY_PER_BYTE
    try:
        if not guarded("tokenizer", str(folder), kind, seconds=seconds, memory=memory):
            return None
    except ValueError as error:
        raise IncompatibleModelsError(
            f"{source}: its tokenizer can't be used: {error}", hint="Restore its files from the original."
        ) from error
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _require_growth(stated: Mapping[str, Any], where: str) -> None:
    for parts in (("normalizer", "pre_tokenizer"), ("post_processor", "decoder")):
        growth = math.prod(_growth(step) for part in parts for step in _steps(stated.get(part)))
        if growth > MOST_GROWTH:
            raise IncompatibleModelsError(
                f"{where}: its {' and '.join(parts)} may make a text {growth:,} times longer",
                hint=f"At most {MOST_GROWTH} times is done; restore the tokenizer from the original.",
            )


def _steps(stated: Any) -> Iterator[dict[str, Any]]:
    """Everything that has a type, however it is nested."""
    nodes = [stated]
    while nodes:
        node = nodes.pop()
        nodes += node if isinstance(node, list) else node.values() if isinstance(node, dict) else ()
        if isinstance(node, dict) and isinstance(node.get("type"), str):
            yield node


def _growth(step: dict[str, Any]) -> int:
    """How many characters a step may write for one."""
    if step["type"] == "Replace":
        # An expression, or an empty text, may also fit between characters.
        fits_between = not isinstance(step.get("pattern"), dict) or not step["pattern"].get("String")
        return max(1, len(str(step.get("content") or ""))) + fits_between
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
