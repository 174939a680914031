"""Rows of tables and of JSON lines: images by path, or columns that become questions and answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlens.data.images import read_image
from driftlens.data.library import UTF8, read_rows, read_table
from driftlens.data.related import SimilarityTask, related_columns, related_in
from driftlens.data.samples import SampleSet, Shown, Texts
from driftlens.data.sources import (
    Split,
    SplitView,
    data_sources,
    listed_classes,
    named,
    refused,
    require_column,
)
from driftlens.models.texts import Form, Pictured, PictureReader, Text, TextReader
from driftlens.utils.distributed import Access
from driftlens.utils.errors import DataError, SpecError, did_you_mean
from driftlens.utils.files import from_json

if TYPE_CHECKING:
    from driftlens.config.data import JsonlData, TableData, TextEntry


def columns_asked(entry: TextEntry) -> dict[str, str]:
    """Map the names in a prompt to their columns."""
    from driftlens.config.data import fields_of

    names = fields_of(entry.prompt or "{input}")
    return {name: entry.input if name == "input" and entry.input is not None else name for name in names}


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
    beside: Callable[[int], Sequence[Callable[[], Any]]] | None = None,
) -> SplitView:
    """Build the split of rows that are texts.

    A split without scores may lack answers; in the test split all rows have one if the spec names the column.

    Args:
        entry: the spec's entry.
        split: the split.
        ids: one identifier per row.
        columns: existing columns.
        row: position -> values by column.
        where: the place in messages.
        origin: the origin of the samples.
        unit: what an id counts.
        names: meaning of integers among the targets.
        beside: position -> readers of the row's images.
    """
    from driftlens.config.data import filled

    prompt_columns = columns_asked(entry)
    for name, column in prompt_columns.items():
        key = name if name == "input" else "prompt"
        require_column(column, columns, key, where)
    if split == "test" and entry.target is not None:
        require_column(entry.target, columns, "target", where)
    classes = listed_classes(entry.classes)
    if entry.words is not None:
        classes = tuple(dict.fromkeys(entry.words.values()))
    elif classes is None and entry.classes is True and names is not None:
        classes = tuple(names)

    def target(position: int) -> str:
        return _target(
            entry, row(position).get(entry.answers), names, classes, f"{where}, {unit} {ids[position]}"
        )

    def read(position: int) -> Text | Pictured:
        values, place = row(position), f"{where}, {unit} {ids[position]}"
        fields = {name: _text(values, column, place) for name, column in prompt_columns.items()}
        if not any(text.strip() for text in fields.values()):
            raise DataError(
                f"{place}: the text is empty ({', '.join(map(repr, prompt_columns.values()))})",
                hint="Remove such rows, or set `input` to the text column.",
            )
        question = filled(entry.prompt or "{input}", fields)
        if beside is not None:
            images = tuple(beside(position))
            if not images:
                raise DataError(f"{place}: no image", hint="Add one, or remove the row.")
            return Pictured(question, target(position), images)
        return Text(question, target(position))

    def place(position: int) -> str:
        return f"{where}, {unit} {ids[position]}"

    def label(position: int) -> str | None:
        are_classes = entry.classes not in (None, False) or entry.words is not None
        return (target(position) or None) if are_classes else None

    related = related_in(entry, columns, row, place) if ids and split == "test" else None
    return SplitView(origin, tuple(ids), classes, label, read, holds="text", related=related)


def as_texts(
    samples: SampleSet,
    rows: Sequence[Text],
    entry: TextEntry,
    reader: TextReader | None,
    preprocess: Callable[[list[Text]], Any],
    compared: SimilarityTask | None = None,
) -> SampleSet:
    """Turn samples into text samples, read by the task's rules; without a `reader`, by the model's code.

    Calibration samples may show their answers; all others are measured on the question alone.

    Args:
        samples: the samples.
        rows: question and answer of each.
        entry: the spec's entry.
        reader: the tokenizer and its rules.
        preprocess: converts texts to raw inputs without a reader.
        compared: the comparison of test samples.
    """
    task, split = samples.task, samples.split
    have = [bool(row.target) for row in rows]
    if any(have) and not all(have):
        raise DataError(
            f"task {task}: {split} sample {samples.ids[have.index(False)]} has no target, others do",
            hint="Give all rows a target, or none.",
        )
    form = None if reader is None else reader.form
    reads_images = isinstance(reader, PictureReader)
    if reader is not None and any(isinstance(row, Pictured) != reads_images for row in rows):
        content, reads = ("no images", "images and texts") if reads_images else ("images", "texts alone")
        raise DataError(
            f"task {task}: {split} samples have {content}, but the model reads {reads}",
            hint="For images with texts use the loader hf-vlm and `image: COLUMN`.",
        )
    if reader is not None and entry.max_length is not None:
        reader = reader.limited(entry.max_length, f"data.{task}.max_length")
    if reader is not None and entry.prompt is not None:
        # The task's prompt replaces the model's.
        reader = replace(reader, lead="")
    if reader is not None and entry.chat:
        questions = reader.chats([reader.message(row) for row in rows])
        rows = [row._replace(input=question) for question, row in zip(questions, rows, strict=True)]
    answer = entry.answer or (" {target}" if form == "decoder" and not entry.chat else "{target}")
    shows = split == "calibration" and not related_columns(entry)
    shown = _shown(task, entry, form, any(have)) if shows else "none"
    texts = Texts(rows.__getitem__, reader, answer, shown, compared)
    rows = [row._replace(target=texts.answered(row.target) if row.target else "") for row in rows]
    shown_rows = [row if shown == "target" else row._replace(target="") for row in rows]
    on_answers = (f"{task}: calibration uses the expert's greedy answers",) if shown == "expert" else ()
    read = reader or preprocess
    return replace(
        samples,
        load=lambda positions: read([shown_rows[position] for position in positions]),
        preprocess=read,
        notices=samples.notices
        + on_answers
        + (() if reader is None else _too_long(samples, shown_rows, entry, reader)),
        texts=replace(texts, read=rows.__getitem__),
    )


def _beside(
    entry: TextEntry, rows: Sequence[Mapping[str, Any]], file: Path, where: str
) -> Callable[[int], Sequence[Callable[[], Any]]] | None:
    """Return a function from a row to readers of its images; None if the entry names no image column."""
    column = entry.pictures
    if column is None:
        return None
    cells = [cell if isinstance(cell := row.get(column), list) else [cell] for row in rows]
    _require_there([path for listed in cells for path in listed], file.parent, where)
    return lambda position: [partial(read_image, file.parent / str(path)) for path in cells[position]]


def _too_long(
    samples: SampleSet, texts: Sequence[Text], entry: TextEntry, reader: TextReader
) -> tuple[str, ...]:
    """Return a notice of how many rows are cut, if any; rows with images are only estimated from one."""
    # Counting the tokens of an image means decoding it.
    if isinstance(reader, PictureReader):
        reader(texts[:1])
        return ()
    long = [place for place, length in enumerate(reader.lengths(texts)) if length > reader.max_length]
    if not long:
        return ()
    task = samples.task
    count = f"{len(long)} of {len(texts)} {samples.split} samples are longer than {reader.max_length} tokens"
    if entry.too_long == "refuse":
        raise DataError(
            f"task {task}: {count}, such as {samples.ids[long[0]]}",
            hint=f"Remove them, set data.{task}.too_long: cut, or raise max_length.",
        )
    return (f"{task}: {count}; {reader.rule}",)


def _shown(task: str, entry: TextEntry, form: Form | None, has_targets: bool) -> Shown:
    """Return which answers calibration shows, by the entry or the data and model."""
    if form == "encoder":
        if entry.decoder_inputs is not None:
            raise SpecError(f"data.{task}.decoder_inputs: the model has no decoder", hint="Remove it.")
        return "none"
    if entry.decoder_inputs == "target" and not has_targets:
        raise DataError(
            f"task {task}: decoder_inputs is target, but calibration has no targets",
            hint=f"Set data.{task}.target, or decoder_inputs: expert.",
        )
    # Without answers a decoder still reads its question; the decoder of an encoder-decoder would read nothing.
    unlabelled: Shown = "expert" if form == "encoder-decoder" else "none"
    return entry.decoder_inputs or ("target" if has_targets else unlabelled)


def _text(values: Mapping[str, Any], column: str, where: str) -> str:
    value = values.get(column)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise DataError(f"{where}: {column!r} is {value!r}, expected text; columns are {', '.join(values)}")
    return str(value)


def _target(
    entry: TextEntry, value: Any, names: Sequence[str] | None, classes: Sequence[str] | None, where: str
) -> str:
    """Return the answer of a row's target; empty without one."""
    # `datasets` marks unlabelled rows of a ClassLabel column with -1.
    if value is None or value == "" or (names is not None and value == -1):
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(f"{where}: {entry.answers!r} is {value!r}, expected text or a number")
    # As in JSON and YAML, not as Python prints a bool.
    spelled = [str(value).lower() if isinstance(value, bool) else str(value)]
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        spelled.append(names[value])
    if entry.words is not None:
        allowed: Sequence[str] = tuple(entry.words)
        answer = next((entry.words[text] for text in spelled if text in entry.words), None)
    else:
        allowed = spelled[-1:] if classes is None else classes
        answer = spelled[-1] if spelled[-1] in allowed else None
    if answer is not None:
        return answer
    key = "classes" if entry.words is None else "words"
    raise DataError(
        f"{where}: target {spelled[-1]!r} is not in the {key}: {', '.join(allowed)}",
        hint=f"{did_you_mean(spelled[-1], allowed)} Add it, or remove the row.".lstrip(),
    )


@data_sources.register("jsonl")
def open_jsonl(entry: JsonlData, split: Split, access: Access) -> SplitView:
    """Open the rows of a split's file; ids are line numbers from 1. Blank lines are skipped.

    Args:
        entry: the spec's entry.
        split: the split.
        access: permissions.
    """
    file = Path(getattr(entry, split))
    # Read as lines and parsed here: the JSON reader of `datasets` would turn some texts into dates, and a 1 in
    # a column with 2.5 into 1.0.
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(read_rows("text", file, encoding=UTF8)[:].get("text", []), start=1):
        if line.strip():
            with refused(f"{file}, line {number}"):
                rows[str(number)] = {**from_json(line)}
    ids, values = list(rows), list(rows.values())
    keys = dict.fromkeys(key for row in values for key in row)
    if entry.pictures is not None:
        require_column(entry.pictures, keys, "image", str(file))
    beside = _beside(entry, values, file, str(file))
    named = {"where": str(file), "origin": str(file.resolve()), "unit": "line"}
    return text_view(entry, split, ids, keys, values.__getitem__, **named, beside=beside)


@data_sources.register("table")
def open_table(entry: TableData, split: Split, access: Access) -> SplitView:
    """Open the images or texts of a split's rows; ids of images are their paths as written, ids of texts row numbers.

    Relative paths start at the file's folder. Labels are text, or numbers that index `classes`; only the test split
    needs them.

    Args:
        entry: the spec's entry.
        split: the split.
        access: permissions.
    """
    if entry.holds_texts:
        return _open_texts(entry, split)
    column_of = {"image": entry.paths, "label": entry.label}
    file, where, origin, _, columns = _rows(entry, split, column_of)
    paths = columns[entry.paths]
    _require_there(paths, file.parent, where)
    if twice := [path for path, count in Counter(_places(paths, file.parent)).items() if count > 1]:
        raise DataError(f"{where}: {twice[0]} occurs more than once", hint="List every image once.")
    labels = [None if label == "" else label for label in columns.get(entry.label or "", [None] * len(paths))]
    names, class_names = named(labels, listed_classes(entry.classes), where)
    if split != "calibration" and getattr(entry, split) != entry.calibration:
        _require_apart(entry, _places(paths, file.parent), where, origin)
    return SplitView(
        origin=origin,
        ids=tuple(paths),
        class_names=class_names,
        label=lambda position: names[position],
        read=lambda position: read_image(file.parent / paths[position]),
    )


def _open_texts(entry: TableData, split: Split) -> SplitView:
    column_of = {
        **{f"{{{name}}}": column for name, column in columns_asked(entry).items()},
        "target": entry.answers,
        "image": entry.pictures,
        **related_columns(entry),
    }
    file, where, origin, rows, columns = _rows(entry, split, column_of)

    def row(position: int) -> dict[str, Any]:
        return {name: values[position] for name, values in columns.items()}

    beside = _beside(entry, [*map(row, range(len(rows)))], file, where)
    ids = list(map(str, rows))
    return text_view(entry, split, ids, columns, row, where=where, origin=origin, beside=beside)


def _rows(
    entry: TableData, split: Split, column_of: Mapping[str, str | None]
) -> tuple[Path, str, str, Sequence[int], dict[str, list[Any]]]:
    """Return a split's file, the name of its rows in messages, their place, their numbers and the requested columns."""
    value = getattr(entry, split)
    file, where = Path(entry.file or value), f"{entry.file}, {entry.split} {value}" if entry.file else value
    column_of = {**column_of, "split": entry.split if entry.file else None}
    columns = read_table(file, column_of.values(), entry.encoding, entry.separator)
    # Splits without scores need neither labels nor answers.
    optional = {"target"} if entry.target is None else set()
    optional |= {"label", "target", *related_columns(entry)} if split != "test" else set()
    column_of = {key: column for key, column in column_of.items() if key not in optional or column in columns}
    for key, column in column_of.items():
        if column is not None:
            require_column(column, columns, key, str(file))
    rows: Sequence[int] = range(max(map(len, columns.values()), default=0))
    if entry.file:
        splits = [str(chosen) for chosen in columns[entry.split]]
        rows = [row for row in rows if splits[row] == value]
    origin = f"{file.resolve()}[{entry.split}={value}]" if entry.file else str(file.resolve())
    chosen = {column: [columns[column][row] for row in rows] for column in column_of.values() if column}
    return file, where, origin, rows, chosen


def _require_apart(entry: TableData, places: Iterable[str], where: str, origin: str) -> None:
    """Refuse images that are calibration samples too, unless one list serves both: then drawing keeps them apart."""
    file, _, calibration, _, columns = _rows(entry, "calibration", {"image": entry.paths})
    listed = [path for path in columns[entry.paths] if isinstance(path, str)]
    shared = sorted(set(places).intersection(_places(listed, file.parent)))
    if shared and calibration != origin:
        raise DataError(
            f"{where}: images shared with calibration: {len(shared)}, such as {shared[0]}",
            hint="List different images, or the same rows in both splits, which then get different samples.",
        )


def _places(paths: Iterable[str], folder: Path) -> list[str]:
    """Normalize paths for comparison without following links."""
    folder = folder.resolve()
    return [os.path.normpath(folder / path) for path in paths]


def _require_there(paths: Sequence[Any], folder: Path, where: str) -> None:
    """Refuse paths of images that are not there."""
    missing = [path for path in paths if not (folder / path).is_file()]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(paths)} images are missing, such as {missing[0]}",
            hint=f"Paths are relative to {folder}.",
        )
