"""Compare and align tokenizers, vocabularies and heads of language models of one base."""

from __future__ import annotations

import filecmp
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.loading import decode_json_floats
from driftlens.checkpoints.tensor_sources import CompositeSource, StateSource, TensorHeader, rename_keys
from driftlens.models.heads import LmHeadSpec
from driftlens.models.texts import MEANING, normalize_merges
from driftlens.utils.errors import IncompatibleModelsError, shorten_list
from driftlens.utils.files import read_json_object

_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
# Special tokens that affect the ids of a text. Experts may end or pad texts with other tokens than the base.
_BEGIN = ("bos_token", "cls_token", "sep_token", "unk_token")


def tokenizer_changes(base: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Return descriptions of the tokenizer files, special tokens and end tokens that differ between two folders."""
    stated = [
        read_json_object(folder, "generation_config.json").get("eos_token_id")
        or read_json_object(folder, "config.json").get("eos_token_id")
        for folder in (base, other)
    ]
    changes = [*_changed_tokenizer_files(base, other), *_changed_special_tokens(base, other).values()]
    base_ends, other_ends = (ends if isinstance(ends, list) else [ends] for ends in stated)
    if None not in stated and base_ends != other_ends:
        changes.append(f"eos_token_id {other_ends} for {base_ends}")
    return changes


def _changed_tokenizer_files(base: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Return the tokenizer files in both folders that lead to other ids."""
    shared = [file for file in _FILES if (base / file).is_file() and (other / file).is_file()]
    return [
        file
        for file in shared
        # Equal files, the usual case, need not be parsed.
        if not filecmp.cmp(base / file, other / file, shallow=False)
        and _tokenizer_file_content(base, file) != _tokenizer_file_content(other, file)
    ]


def num_token_ids(folder: pathlib.Path | None) -> int:
    """Return the largest id in a folder's tokenizer.json, plus one; 0 without the file."""
    stated = read_json_object(folder, "tokenizer.json")
    model = stated.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [*range(len(vocabulary or ()))]
    return 1 + max((number for number in (*ids, *added_tokens(stated)) if isinstance(number, int)), default=-1)


def _tokenizer_file_content(folder: pathlib.Path, file: str) -> Any:
    """Return the content of a tokenizer file that determines token ids."""
    if file == "tokenizer.json":
        parts = read_json_object(folder, file)
        return [normalize_merges(parts.get(part)) for part in MEANING]
    if file.endswith(".json"):
        return read_json_object(folder, file)
    content = (folder / file).read_bytes()
    return content.splitlines() if file.endswith(".txt") else content


def _changed_special_tokens(base: pathlib.Path, other: pathlib.Path) -> dict[str, str]:
    """Return descriptions of the special tokens that both folders name and that differ."""
    base_tokens, other_tokens = (
        _special_token_texts(read_json_object(folder, "tokenizer_config.json")) for folder in (base, other)
    )
    return {
        key: f"{key} {other_tokens[key]!r} for {base_tokens[key]!r}"
        for key in base_tokens
        if other_tokens.get(key, base_tokens[key]) != base_tokens[key]
    }


def require_same_tokenizer(base: pathlib.Path, other: pathlib.Path) -> None:
    """Raise if the tokenizer of a model gives texts other ids; tokens added in one of both alone are allowed."""
    changes = _changed_tokenizer_files(base, other)
    # Libraries prefer tokenizer.json to all other files, so it decides alone where both folders have it.
    if all((folder / "tokenizer.json").is_file() for folder in (base, other)):
        # Some have 30 MB and take seconds to parse.
        if "tokenizer.json" not in changes:
            return
        one, two = (read_json_object(folder, "tokenizer.json") for folder in (base, other))
        parts = [part for part in MEANING if normalize_merges(one.get(part)) != normalize_merges(two.get(part))]
        one_added, two_added = added_tokens(one), added_tokens(two)
        if all(one_added[number] == two_added[number] for number in one_added.keys() & two_added.keys()):
            parts = [part for part in parts if part != "added_tokens"]
        changes = [f"{part} in tokenizer.json" for part in parts]
    else:
        special = _changed_special_tokens(base, other)
        changes += [special[key] for key in _BEGIN if key in special]
    if changes:
        raise IncompatibleModelsError(
            f"{other}: its tokenizer differs from the base's ({', '.join(changes)})",
            hint="Use experts with the base's tokenizer: rows of merged embeddings must mean the same tokens.",
        )


def added_tokens(stated: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the content of every added token by id."""
    tokens = stated.get("added_tokens")
    rows = tokens if isinstance(tokens, list) else []
    return {row.get("id"): row.get("content") for row in rows if isinstance(row, dict)}


def _special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


_ROWS = 4096
_SHOWN = 5


def vocabulary_row_counts(skeleton: nn.Module) -> dict[str, int]:
    """Return the number of rows of every parameter with one row per token, by key."""
    get_inputs = getattr(skeleton, "get_input_embeddings", None)
    embedding = get_inputs() if callable(get_inputs) else None
    if not isinstance(embedding, nn.Embedding):
        return {}
    get_outputs = getattr(skeleton, "get_output_embeddings", None)
    head = get_outputs() if callable(get_outputs) else None
    rows: dict[str, int] = {}
    # An encoder and a decoder may have a table each. Tied ones are one module, so duplicates are listed too.
    for path, module in skeleton.named_modules(remove_duplicate=False):
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == embedding.num_embeddings
        if module is head or is_table:
            rows |= {f"{path}.{name}": len(value) for name, value in module.named_parameters(recurse=False)}
    return rows


def untied_head_key(stored: StateSource, source: StateSource, lm: LmHeadSpec) -> str | None:
    """Return the key of a language-model head that differs from the embeddings, or None.

    Args:
        stored: the model under its own key names.
        source: the model under the skeleton's key names, where the head is the embeddings.
        lm: the head of the architecture.
    """
    head = next((name for name in stored.headers if f".{name}".endswith(f".{lm.head}")), None)
    if head is None or lm.key not in source.headers:
        return None
    size = min(stored.headers[head].shape[0], source.headers[lm.key].shape[0])
    # Piece by piece, because two whole tables may not fit into memory; the first that differs ends the comparison.
    pieces = ((start, min(start + _ROWS, size)) for start in range(0, size, _ROWS))
    is_copy = all(torch.equal(stored.read(head, rows), source.read(lm.key, rows)) for rows in pieces)
    return None if is_copy else head


def align_head(
    source: StateSource, stored: StateSource, folder: pathlib.Path | None, lm: LmHeadSpec, table: str
) -> tuple[StateSource, str]:
    """Return a language model with its head under the base's key, and a description of the change, if any.

    Args:
        source: the model under the skeleton's key names.
        stored: the same under its own.
        folder: the folder of its configuration, which may tie the head to the embeddings.
        lm: the head of the architecture, which may be its embeddings.
        table: key of the embeddings.
    """
    if lm.key in source.headers:
        head = None if lm.is_untied else untied_head_key(stored, source, lm)
        if head is None:
            names = {name: name for name in source.headers if lm.is_untied or name != lm.head}
            return rename_keys(source, names), ""
        raise IncompatibleModelsError(
            f"{stored.name} has an untied head ({head!r}); the base's is tied to its embeddings",
            hint="Use a base with an untied head (tie_word_embeddings: false).",
        )
    if not _is_head_tied_by_config(folder):
        raise IncompatibleModelsError(
            f"{stored.name} lacks {lm.key!r}, and no config.json next to it ties its head to its embeddings",
            hint="Save it with its head, or give a folder whose config.json has tie_word_embeddings: true.",
        )
    places = {name: (source, name) for name in source.headers} | {lm.key: (source, table)}
    text = f"{stored.name}: its head is tied, others are not; using a copy of its embeddings as head"
    return CompositeSource(source.name, places), text


def _is_head_tied_by_config(folder: pathlib.Path | None) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    stated = read_json_object(folder, "config.json")
    if stated.get("model_type") not in CONFIG_MAPPING:
        return False
    config = CONFIG_MAPPING[stated["model_type"]].from_dict(decode_json_floats(stated))
    return bool(getattr(config, "tie_word_embeddings", False))


def align_vocabulary(
    source: StateSource,
    rows: Mapping[str, int],
    base: StateSource | None,
    folder: pathlib.Path | None = None,
    *,
    align: bool,
) -> tuple[StateSource, str]:
    """Return a model whose vocabulary has as many rows as the base's, and a description of the change, if any.

    Args:
        source: the model under the skeleton's key names.
        rows: the base's number of rows by key.
        base: the base, which provides missing rows.
        folder: the model's folder, whose tokenizer names additional tokens.
        align: True to drop additional rows and fill in missing ones, False to raise.
    """
    counts = {key: source.headers[key].shape[0] for key in rows if key in source.headers}
    differing = {key: count for key, count in counts.items() if count != rows[key]}
    if not differing:
        return source, ""
    key, count = next(iter(differing.items()))
    added = added_tokens(read_json_object(folder, "tokenizer.json"))
    beyond = [text for row, text in added.items() if isinstance(row, int) and row >= rows[key]]
    tokens = f", additional tokens {shorten_list([*map(repr, beyond)], _SHOWN)}" if beyond else ""
    problem = f"{source.name}: its vocabulary has {count} rows, the base's {rows[key]} ({key}){tokens}"
    if not align:
        hint = "Set architecture.vocab: {rows: base} to drop additional rows and fill missing ones from the base."
        raise IncompatibleModelsError(problem, hint=hint)
    if count < rows[key] and base is None:
        raise IncompatibleModelsError(problem, hint="Set a base with the missing rows.")
    dropped = count - rows[key]
    done = f"dropped {dropped} rows" if dropped > 0 else f"filled {-dropped} rows from the base"
    return _AlignedTables(source, {key: rows[key] for key in differing}, base), f"{problem}: {done}"


class _AlignedTables:
    """A tensor source whose vocabulary tables are cut or extended to the base's number of rows."""

    def __init__(self, source: StateSource, rows: Mapping[str, int], base: StateSource | None) -> None:
        self.name, self._source, self._base, self._rows = source.name, source, base, rows
        headers = dict(source.headers)
        for key, count in rows.items():
            headers[key] = TensorHeader((count, *headers[key].shape[1:]), headers[key].dtype)
        self.headers: Mapping[str, TensorHeader] = headers

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return the tensor, or rows [start, stop) of it; rows that the model lacks are the base's."""
        if key not in self._rows:
            return self._source.read(key, rows)
        start, stop = rows or (0, self._rows[key])
        size = self._source.headers[key].shape[0]
        parts = []
        if start < min(stop, size):
            parts.append(self._source.read(key, (start, min(stop, size))))
        if self._base is not None and max(start, size) < stop:
            filled = self._base.read(key, (max(start, size), stop))
            parts.append(filled.to(self.headers[key].dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
