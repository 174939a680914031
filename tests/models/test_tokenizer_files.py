"""Tokenizers whose files would exhaust a machine, which a process apart finds out before they are built here."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from driftlens.base.errors import IncompatibleModelsError
from driftlens.checkpoints.loading import MOST_GROWTH, tokenizer_in
from tests.zoo.tokenizers import word_tokenizer


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*texts: str) -> dict[str, Any]:
    """A table of SentencePiece with a tree of one word and these texts."""
    content = struct.pack("<II", 4, 0) + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def nested(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    """Steps in a Sequence in a Sequence."""
    return {"type": "Sequence", kind: [{"type": "Sequence", kind: list(steps)}]}


def write(folder: Path, **files: Any) -> None:
    """A tokenizer that is right, with these entries in its files."""
    word_tokenizer().save_pretrained(folder)
    for name, more in files.items():
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | more))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXTS = "its normalizer and pre_tokenizer may make a text"
SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "expressions": (
        {"normalizer": nested("normalizers", *[replace({"Regex": "."}, "a" * 8)] * 9)},
        f"{TEXTS} 387,420,489 times longer",
    ),
    "letters": (
        {"decoder": nested("decoders", *[replace({"String": "a"}, "a" * 8)] * 9)},
        "its post_processor and decoder may make a text 134,217,728 times longer",
    ),
    "between": ({"normalizer": nested("normalizers", *[replace({"String": ""}, "xx")] * 6)}, f"{TEXTS} 729"),
    "bytes": (
        {"pre_tokenizer": nested("pretokenizers", *[BYTES] * 26)},
        f"{TEXTS} 67,108,864 times longer",
    ),
    "a table": ({"normalizer": charsmap("a" * (MOST_GROWTH + 1))}, f"{TEXTS} 501 times longer"),
    "pieces of nothing": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "its tokenizer can't be used: chunk size must be non-zero",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_would_exhaust_a_machine_is_refused_before_it_is_built(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, words = SPOILED[case]
    write(tmp_path, **{"tokenizer.json": more})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(IncompatibleModelsError, match=words):
        tokenizer_in(str(tmp_path), offline=True)


def test_tokens_by_their_count_alone_have_to_find_memory(tmp_path: Path) -> None:
    write(tmp_path, **{"tokenizer_config.json": {"extra_ids": 10**9, "tokenizer_class": "T5Tokenizer"}})
    with pytest.raises(IncompatibleModelsError, match=r"takes more than 51[23] MiB of memory"):
        tokenizer_in(str(tmp_path), offline=True)


@pytest.mark.parametrize("normalizer", [replace({"Regex": " {2,}"}, "\u2581"), None])
def test_what_tokenizers_do_is_let_through(normalizer: Any, tmp_path: Path) -> None:
    steps = [replace({"String": " "}, "\u2581")] * 20
    write(
        tmp_path,
        **{
            "tokenizer.json": {"normalizer": nested("normalizers", *steps, *filter(None, [normalizer]))},
            "tokenizer_config.json": {"extra_ids": 100, "model_max_length": 10**30},
        },
    )
    assert tokenizer_in(str(tmp_path), offline=True)("is it red")["input_ids"]


def test_where_there_are_no_files_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_in(str(tmp_path), offline=True) is None
    assert tokenizer_in(str(tmp_path / "nothing"), offline=True) is None
