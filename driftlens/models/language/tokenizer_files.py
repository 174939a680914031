"""Whether tokenizers' files in two folders mean the same tokens, read without torch."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from driftlens.base.errors import IncompatibleModelsError
from driftlens.base.files import from_json, plain_file
from driftlens.base.words import some_of
from driftlens.models.language.texts import MEANING, plain_part

_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
_BEGIN = ("bos_token", "cls_token", "sep_token", "unk_token")
"""Special tokens that decide which ids a text has; where one ends, or what pads, others say."""


def changed_files(base: pathlib.Path, other: pathlib.Path) -> list[str]:
    """The tokenizer files in both folders that give ids in another way."""
    shared = [file for file in _FILES if (base / file).is_file() and (other / file).is_file()]
    return [file for file in shared if not _same_content(base, other, file)]


def changed_special_tokens(base: pathlib.Path, other: pathlib.Path) -> dict[str, str]:
    """By name the special tokens that differ where both folders name them, as messages say it."""
    base_tokens, other_tokens = (
        _special_tokens(json_object(place, "tokenizer_config.json")) for place in (base, other)
    )
    return {
        key: f"{key} {other_tokens[key]!r} for {base_tokens[key]!r}"
        for key in base_tokens
        if other_tokens.get(key, base_tokens[key]) != base_tokens[key]
    }


def changed_ends(base: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Where both folders say with which tokens the model ends an answer, and these differ, as messages say it."""
    stated = [
        json_object(place, "generation_config.json").get("eos_token_id")
        or json_object(place, "config.json").get("eos_token_id")
        for place in (base, other)
    ]
    base_ends, other_ends = (ends if isinstance(ends, list) else [ends] for ends in stated)
    return (
        [f"eos_token_id {other_ends} for {base_ends}"]
        if None not in stated and base_ends != other_ends
        else []
    )


def require_same_tokenizer(base: pathlib.Path, other: pathlib.Path) -> None:
    """Refuse a model whose tokenizer gives texts other ids; tokens that only one of both has added are no reason."""
    files = changed_files(base, other)
    if "tokenizer.json" in files:
        base_parts, other_parts = (json_object(place, "tokenizer.json") for place in (base, other))
        parts = [
            part for part in MEANING if plain_part(base_parts.get(part)) != plain_part(other_parts.get(part))
        ]
        base_added, other_added = added_tokens(base_parts), added_tokens(other_parts)
        if "added_tokens" in parts and all(
            other_added[number] == base_added[number] for number in base_added.keys() & other_added.keys()
        ):
            parts.remove("added_tokens")
        changes = [f"{part} in tokenizer.json" for part in parts]
        ids, other_ids = token_ids(base_parts), token_ids(other_parts)
        unlike = [
            f"{token!r} {other_ids.get(token)} for {ids.get(token)}"
            for token in ids | other_ids
            if ids.get(token) != other_ids.get(token)
        ]
        changes += [f"ids {some_of(unlike)}"] if changes and unlike else []
    elif (base / "tokenizer.json").is_file() and (other / "tokenizer.json").is_file():
        changes = []  # what lies beside is older, and nobody reads it
    else:
        special = changed_special_tokens(base, other)
        changes = files + [special[key] for key in _BEGIN if key in special]
    if changes:
        raise IncompatibleModelsError(
            f"{other}: its tokenizer gives texts other ids than the base's ({', '.join(changes)})",
            hint="A merge of models that mean different tokens means nothing: name experts with the base's tokenizer.",
        )


def json_object(folder: pathlib.Path | None, file: str) -> dict[str, Any]:
    """The object in a file; nothing where it is missing or damaged, which others say."""
    try:
        value = {} if folder is None else from_json(plain_file(folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _same_content(base: pathlib.Path, other: pathlib.Path, file: str) -> bool:
    first, second = base / file, other / file
    if first.read_bytes() == second.read_bytes():
        return True
    if first.suffix == ".txt":
        return (
            first.read_text(encoding="utf-8").splitlines() == second.read_text(encoding="utf-8").splitlines()
        )
    if first.suffix != ".json":
        return False
    base_content, other_content = json_object(base, file), json_object(other, file)
    if file != "tokenizer.json":
        return base_content == other_content
    return all(plain_part(base_content.get(part)) == plain_part(other_content.get(part)) for part in MEANING)


def added_tokens(stated: Mapping[str, Any]) -> dict[Any, Any]:
    """Content of every added token by id."""
    tokens = stated.get("added_tokens")
    rows = tokens if isinstance(tokens, list) else []
    return {row.get("id"): row.get("content") for row in rows if isinstance(row, dict)}


def token_ids(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The id of every token, as `tokenizer.json` states it: by content, or in order with a score."""
    model = stated.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):
        words = {row[0]: number for number, row in enumerate(words) if isinstance(row, list) and row}
    ids = {str(token): number for token, number in words.items()} if isinstance(words, dict) else {}
    return ids | {str(content): number for number, content in added_tokens(stated).items()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
