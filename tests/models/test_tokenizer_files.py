"""Files of tokenizers that would exhaust a machine, refused before a library builds anything of them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.tokenizer_files import MOST_EXTRA, MOST_GROWTH, MOST_TOKENS, bounded_tokenizer
from tests.models.tokenizers import word_tokenizer

FAR = MOST_TOKENS + 1


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*texts: str) -> dict[str, Any]:
    """A table of SentencePiece with a tree of one word and these texts."""
    content = struct.pack("<II", 4, 0) + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def nested(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    """Steps in a Sequence in a Sequence."""
    return {"type": "Sequence", kind: [{"type": "Sequence", kind: list(steps)}]}


SPOILED: dict[str, tuple[str, dict[str, Any], str]] = {
    "numbers": ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": FAR}}}, "has the number 10,000,001"),
    "added": ("tokenizer.json", {"added_tokens": [{"id": FAR, "content": "x"}]}, "has the number"),
    "decoder": ("tokenizer_config.json", {"added_tokens_decoder": {str(FAR): {}}}, "has the number"),
    "vocabulary": ("vocab.json", {"a": FAR}, r"vocab\.json: a token has the number"),
    "beside": ("added_tokens.json", {"a": FAR}, r"added_tokens\.json: a token has the number"),
    "another version": ("tokenizer.4.0.json", {"model": {"vocab": {"b": FAR}}}, "has the number"),
    "counted": ("tokenizer_config.json", {"extra_ids": MOST_EXTRA + 1}, "extra_ids is 10,001"),
    "empty": ("tokenizer.json", {"normalizer": replace({"String": ""}, "x" * 9)}, "has an empty pattern"),
    "empty expression": ("tokenizer.json", {"normalizer": replace({"Regex": ""}, "x")}, "empty pattern"),
    "expressions": (
        "tokenizer.json",
        {"normalizer": nested("normalizers", *[replace({"Regex": "."}, "a" * 8)] * 9)},
        "its normalizer and pre_tokenizer may make a text 387,420,489 times longer",
    ),
    "letters": (
        "tokenizer.json",
        {"decoder": nested("decoders", *[replace({"String": "a"}, "a" * 8)] * 9)},
        "its post_processor and decoder may make a text 134,217,728 times longer",
    ),
    "bytes": (
        "tokenizer.json",
        {"pre_tokenizer": nested("pretokenizers", *[{"type": "ByteLevel"}] * 26)},
        "67,108,864 times longer",
    ),
    "a table": ("tokenizer.json", {"normalizer": charsmap("a" * (MOST_GROWTH + 1))}, "501 times longer"),
}


def write(folder: Path, **files: Any) -> None:
    """A tokenizer that is right, with these entries in its files."""
    word_tokenizer().save_pretrained(folder)
    for name, more in files.items():
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | more))


@pytest.mark.parametrize("case", SPOILED)
def test_what_would_exhaust_a_machine_is_refused_before_it_is_built(case: str, tmp_path: Path) -> None:
    name, more, words = SPOILED[case]
    write(tmp_path, **{name: more, "tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.0.json"]}})
    if name == "tokenizer_config.json":
        write(tmp_path, **{name: more})
    with pytest.raises(IncompatibleModelsError, match=words), bounded_tokenizer(str(tmp_path), offline=True):
        raise AssertionError("it was built")


@pytest.mark.parametrize("normalizer", [charsmap("a" * 18), replace({"Regex": " {2,}"}, "\u2581"), None])
def test_what_tokenizers_do_is_let_through(normalizer: Any, tmp_path: Path) -> None:
    steps = [replace({"String": " "}, "\u2581")] * 20
    write(
        tmp_path,
        **{
            "tokenizer.json": {"normalizer": nested("normalizers", *steps, *filter(None, [normalizer]))},
            "tokenizer_config.json": {"extra_ids": 100, "model_max_length": 10**30},
        },
    )
    with bounded_tokenizer(str(tmp_path), offline=True):
        pass


def test_what_a_library_breaks_down_on_is_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(tmp_path, **{"tokenizer.json": {"pre_tokenizer": {"type": "FixedLength", "length": 0}}})
    with (
        pytest.raises(IncompatibleModelsError, match="its tokenizer can't be used"),
        bounded_tokenizer(str(tmp_path), offline=True),
    ):
        AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)("a few words")
