"""Comparisons of texts: with the other text of a pair, or with passages that answer a query."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from driftlens.data.sources import Related, SplitView, open_split, require_column
from driftlens.models.texts import TextReader
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError

if TYPE_CHECKING:
    from driftlens.config.data import TextEntry


@dataclass(frozen=True)
class _Passages:
    """The passages that queries search.

    Attributes:
        texts: each once.
        keys: names used by queries -> positions; several passages may share a name.
        is_whole: True if every query searches all of them; otherwise each has its own.
    """

    texts: tuple[str, ...]
    keys: Mapping[str, tuple[int, ...]]
    is_whole: bool = True

    def candidates(self, row: Related) -> list[int]:
        """List the positions of the passages that a query searches, its own positives last."""
        # Positives come last, so that a tie counts as wrong: a model that scores all alike gets nothing right.
        if self.is_whole:
            return list(range(len(self.texts)))
        return [place for name in (*row.negative, *row.positive) for place in self.keys.get(name, ())]

    def answers(self, row: Related) -> frozenset[int]:
        """Return the positions of the passages that answer a query."""
        return frozenset(place for name in row.positive for place in self.keys.get(name, ()))


@dataclass(frozen=True)
class SimilarityTask:
    """The comparison of a task's test samples.

    Attributes:
        of: position -> the sample's counterpart.
        passages: the passages that queries search; None for pairs.
        reader: tokenizes the other texts.
    """

    of: Callable[[int], Related]
    reader: TextReader | None
    passages: _Passages | None = None

    @property
    def similarity(self) -> str:
        """The similarity of embeddings, as the model's folder defines it."""
        prompts = None if self.reader is None else self.reader.prompts
        return "cosine" if prompts is None else prompts.similarity

    def at(self, chosen: Sequence[int]) -> SimilarityTask:
        """Select samples."""
        return replace(self, of=lambda position: self.of(chosen[position]))


_COLUMNS = ("pair", "positive", "negative")


def related_columns(entry: TextEntry) -> dict[str, str]:
    """Map the entry's keys for related texts to their columns."""
    return {key: column for key in _COLUMNS if (column := getattr(entry, key)) is not None}


def related_in(
    entry: TextEntry,
    columns: Collection[str],
    row: Callable[[int], Mapping[str, Any]],
    where: Callable[[int], str],
) -> Callable[[int], Related] | None:
    """Return a function from a position to its related texts; None if the entry names none.

    Args:
        entry: the spec's entry.
        columns: existing columns.
        row: position -> values by column.
        where: position -> its place in messages.
    """
    from driftlens.config.data import fields_of, filled

    related = related_columns(entry)
    for key, column in related.items():
        require_column(column, columns, key, where(0).rpartition(",")[0])
    if not related:
        return None

    def read(position: int) -> Related:
        values, place = row(position), where(position)
        shown = {key: _several(values.get(column), column, place) for key, column in related.items()}
        if "pair" in shown and len(shown["pair"]) != 1:
            raise DataError(f"{place}: {entry.pair!r} has {len(shown['pair'])} texts, expected one")
        if not shown.get("positive", ("",)):
            raise DataError(
                f"{place}: {entry.positive!r} is empty, expected an answer",
                hint="Add one, or remove the row.",
            )
        pair = "".join(shown.get("pair", ()))
        if pair and entry.prompt is not None:
            # The second text takes the first one's place in the prompt.
            names = fields_of(entry.prompt)
            replaced = names if len(names) == 1 else ("input", entry.input)
            fields = {name: pair if name in replaced else str(values.get(name)) for name in names}
            pair = filled(entry.prompt, fields)
        return Related(pair, shown.get("positive", ()), shown.get("negative", ()))

    return read


def _several(value: Any, column: str, place: str) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [] if value is None or value == "" else [value]
    if odd := [one for one in values if isinstance(one, bool) or not isinstance(one, str | int | float)]:
        raise DataError(
            f"{place}: {column!r} holds {odd[0]!r}, expected text",
            hint="Give a text or a list of texts; in CSV files one text per row.",
        )
    return tuple(str(one) for one in values)


def comparison(
    task: str,
    entry: TextEntry,
    view: SplitView,
    drawn: Sequence[int],
    reader: TextReader | None,
    access: Access,
) -> SimilarityTask | None:
    """Return the comparison of a task's sampled test samples; None if the entry has none.

    Args:
        task: the task's name.
        entry: the spec's entry.
        view: the test split.
        drawn: positions of the sampled samples.
        reader: the tokenizer and its rules.
        access: permissions.

    Raises:
        DataError: a pair has no number, or a query no answer.
    """
    if view.related is None or not related_columns(entry):
        return None
    rows = [view.related(position) for position in drawn]
    if reader is not None:
        if entry.max_length is not None:
            reader = reader.limited(entry.max_length, f"data.{task}.max_length")
        # A prompt in the spec replaces that of the model's folder.
        if entry.prompt is not None or (entry.corpus is not None and entry.corpus.prompt is not None):
            reader = replace(reader, lead="")
        elif reader.prompts is not None and entry.pair is None:
            reader = replace(reader, lead=reader.prompts.before(*_PASSAGE))
    if entry.pair is None:
        passages = _passages(entry, rows, access)
        if lost := [number for number, row in enumerate(rows) if not passages.answers(row)]:
            raise DataError(
                f"task {task}: test: {len(lost)} of {len(rows)} queries have no positive in the corpus, such as "
                f"sample {view.ids[drawn[lost[0]]]}, whose {entry.positive!r} is "
                f"{', '.join(rows[lost[0]].positive)[:80]!r}",
                hint="Add these positives to the corpus (as texts, or in its `key` column), or remove the queries.",
            )
        return SimilarityTask(rows.__getitem__, reader, passages)
    for position in drawn:
        if math.isnan(number_of(target := view.read(position).target)):
            raise DataError(
                f"task {task}: test sample {view.ids[position]} has the similarity {target!r}, "
                "expected a number",
                hint="Set `target` to the column of numbers.",
            )
    return SimilarityTask(rows.__getitem__, reader)


# Prompt names that sentence-transformers uses for passages.
_PASSAGE = ("document", "passage", "corpus")


def number_of(text: str) -> float:
    """Parse a finite number; NaN for others."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _passages(entry: TextEntry, rows: Sequence[Related], access: Access) -> _Passages:
    """Read an entry's corpus; without one, collect what its queries name."""
    corpus = entry.corpus
    if corpus is None:
        named = dict.fromkeys(name for row in rows for name in (*row.positive, *row.negative))
        return _Passages(
            tuple(named), {name: (row,) for row, name in enumerate(named)}, is_whole=entry.negative is None
        )
    fields = {
        "input": corpus.text,
        "prompt": corpus.prompt,
        "target": corpus.key,
        "test": corpus.split or corpus.file,
    }
    fields |= dict.fromkeys(_COLUMNS) | {"corpus": None} | ({"file": None} if corpus.file else {})
    # Kinds of data have different fields; the corpus is read as a test split of the same kind.
    own_fields = {name: value for name, value in fields.items() if name in type(entry).model_fields}
    view = open_split(entry.model_copy(update=own_fields), "test", access)
    texts: dict[str, int] = {}
    keys: dict[str, dict[int, None]] = {}
    for position in range(len(view)):
        passage = view.read(position)
        place = texts.setdefault(passage.input, len(texts))
        keys.setdefault(passage.target if corpus.key else passage.input, {})[place] = None
    return _Passages(tuple(texts), {key: tuple(places) for key, places in keys.items()})
