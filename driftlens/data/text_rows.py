"""Rows of columns as questions and answers: templates filled in, labels turned into words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from driftlens.base.errors import DataError, SpecError, did_you_mean
from driftlens.data.samples import SampleSet, Shown, Texts
from driftlens.data.sources import Split, SplitView, listed_classes, require_column
from driftlens.models.language.texts import Form, Text, TextReader

if TYPE_CHECKING:
    from driftlens.spec.data import TextEntry


def columns_asked(entry: TextEntry) -> dict[str, str]:
    """The columns whose text a prompt holds, by the name that each has there."""
    from driftlens.spec.data import fields_of

    asked = fields_of(entry.prompt or "{input}")
    return {name: entry.input if name == "input" and entry.input is not None else name for name in asked}


def text_view(
    entry: TextEntry,
    split: Split,
    ids: Sequence[str],
    columns: Collection[str],
    row: Callable[[int], Mapping[str, Any]],
    *,
    where: str,
    origin: str,
    unit: str = "row",
    names: Sequence[str] | None = None,
) -> SplitView:
    """The samples of a split whose rows are texts.

    A split that serves no scores may lack the answers; of the test split all have one, where the column is named in the
    spec.

    Args:
        entry: the task's entry in the spec.
        split: whose rows these are.
        ids: one per row.
        columns: all there are.
        row: position -> values of the columns that are asked.
        where: what messages call the rows.
        origin: where they lie.
        unit: what an id counts.
        names: what whole numbers among the targets mean.
    """
    from driftlens.spec.data import filled

    asked = columns_asked(entry)
    for name, column in asked.items():
        key = "input" if name == "input" else "prompt"
        require_column(column, columns, key, where)
    if split == "test" and entry.target is not None:
        require_column(entry.target, columns, "target", where)
    known = listed_classes(entry.classes)
    if entry.words is not None:
        known = tuple(dict.fromkeys(entry.words.values()))
    elif known is None and entry.classes is True and names is not None:
        known = tuple(names)

    def target(position: int) -> str:
        return _target(
            entry, row(position).get(entry.answers), names, known, f"{where}, {unit} {ids[position]}"
        )

    def read(position: int) -> Text:
        values, place = row(position), f"{where}, {unit} {ids[position]}"
        fields = {name: _text(values, column, place) for name, column in asked.items()}
        if not any(text.strip() for text in fields.values()):
            raise DataError(
                f"{place}: nothing is asked, {' and '.join(map(repr, asked.values()))} is empty",
                hint="Leave such rows out, or name the column that holds the text as `input`.",
            )
        return Text(filled(entry.prompt or "{input}", fields), target(position))

    def label(position: int) -> str | None:
        are_classes = entry.classes not in (None, False) or entry.words is not None
        return (target(position) or None) if are_classes else None

    return SplitView(origin, tuple(ids), known, label, read, holds="text")


def as_texts(
    samples: SampleSet,
    rows: Sequence[Text],
    entry: TextEntry,
    reader: TextReader | None,
    preprocess: Callable[[list[Text]], Any],
) -> SampleSet:
    """A set of samples whose rows are these, read by the task's own rules.

    Calibration samples may show their answers; all others are measured on the question alone.

    Args:
        samples: as they were drawn.
        rows: of all of them, in their order.
        entry: the task's entry in the spec.
        reader: of the model; None where its code reads texts in a way of its own.
        preprocess: that way.
    """
    task, split = samples.task, samples.split
    have = [bool(row.target) for row in rows]
    if any(have) and not all(have):
        raise DataError(
            f"task {task}: {split} sample {samples.ids[have.index(False)]} has no target, others have",
            hint="Give all rows one, or none.",
        )
    form = None if reader is None else reader.form
    if reader is not None and entry.max_length is not None:
        reader = reader.limited(entry.max_length, f"data.{task}.max_length")
    if reader is not None and entry.chat:
        asked = reader.chats([row.input for row in rows])
        rows = [Text(question, row.target) for question, row in zip(asked, rows, strict=True)]
    answer = entry.answer or (" {target}" if form == "decoder" and not entry.chat else "{target}")
    shown = _shown(task, entry, form, any(have)) if split == "calibration" else "none"
    texts = Texts(rows.__getitem__, reader, answer, shown)
    rows = [Text(row.input, texts.answered(row.target) if row.target else "") for row in rows]
    given = [row if shown == "target" else Text(row.input) for row in rows]
    on_answers = (f"{task}: calibration shows the expert's own greedy answers",) if shown == "expert" else ()
    return replace(
        samples,
        load=lambda positions: (reader or preprocess)([given[position] for position in positions]),
        notices=samples.notices
        + on_answers
        + (() if reader is None else _too_long(samples, given, entry, reader)),
        texts=replace(texts, read=rows.__getitem__),
    )


def _too_long(
    samples: SampleSet, given: Sequence[Text], entry: TextEntry, reader: TextReader
) -> tuple[str, ...]:
    """A notice of how many rows are cut, if any are."""
    long = [place for place, length in enumerate(reader.lengths(given)) if length > reader.max_length]
    if not long:
        return ()
    task = samples.task
    count = f"{len(long)} of {len(given)} {samples.split} samples are longer than {reader.max_length} tokens"
    if entry.too_long == "refuse":
        raise DataError(
            f"task {task}: {count}, the first is {samples.ids[long[0]]}",
            hint=f"Leave them out, set data.{task}.too_long: cut, or raise its max_length.",
        )
    return (f"{task}: {count}; {reader.rule}",)


def _shown(task: str, entry: TextEntry, form: Form | None, has_targets: bool) -> Shown:
    """The answers that calibration shows, as the entry says or as suits the data and the model."""
    if form == "encoder":
        if entry.decoder_inputs is not None:
            raise SpecError(f"data.{task}.decoder_inputs: the model has no decoder", hint="Take it out.")
        return "none"
    if entry.decoder_inputs == "target" and not has_targets:
        raise DataError(
            f"task {task}: decoder_inputs is target, but the calibration samples have no targets",
            hint=f"Name their column as data.{task}.target, or set decoder_inputs: expert.",
        )
    # Without answers a decoder still reads its question; the decoder of an encoder-decoder would read nothing.
    unlabelled: Shown = "expert" if form == "encoder-decoder" else "none"
    return entry.decoder_inputs or ("target" if has_targets else unlabelled)


def _text(values: Mapping[str, Any], column: str, where: str) -> str:
    value = values.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    problem = (
        f"{column!r} is {value!r}, expected text"
        if column in values
        else f"no key {column!r}; there are {', '.join(values)}"
    )
    raise DataError(f"{where}: {problem}", hint="Name the key that holds it as `input: KEY`.")


def _target(
    entry: TextEntry, value: Any, names: Sequence[str] | None, known: Sequence[str] | None, where: str
) -> str:
    """The answer that a row's target means; empty where it has none."""
    if value is None or value == "" or (names is not None and value == -1):
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(
            f"{where}: {entry.answers!r} is {value!r}, expected text or a number",
            hint="Name the key that holds it as `target: KEY`.",
        )
    spelled = [str(value).lower() if isinstance(value, bool) else str(value)]
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        spelled.append(names[value])
    if entry.words is not None:
        allowed: Sequence[str] = tuple(entry.words)
        answer = next((entry.words[text] for text in spelled if text in entry.words), None)
    else:
        allowed = spelled[-1:] if known is None else known
        answer = spelled[-1] if spelled[-1] in allowed else None
    if answer is not None:
        return answer
    key = "classes" if entry.words is None else "words"
    raise DataError(
        f"{where}: the target {spelled[-1]!r} is not one of the {key}: {', '.join(allowed)}",
        hint=f"{did_you_mean(spelled[-1], allowed)} Add it there, or leave the row out.".lstrip(),
    )
