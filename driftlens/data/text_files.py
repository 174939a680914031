"""Files of text, which are not always in the encoding, or have not always the separators, that one expects."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path

from driftlens.base.errors import DataError

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""What stands between columns, in the programs that people export tables from."""
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_PACKED = {
    b"\x1f\x8b": ("packed by gzip", "Unpack it first (gunzip)."),
    b"BZh": ("packed by bzip2", "Unpack it first (bunzip2)."),
    b"\xfd7zXZ": ("packed by xz", "Unpack it first (unxz)."),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "Unpack it first (unzstd)."),
    b"PK\x03\x04": ("a zip archive or a workbook", "Unpack it first; of a workbook, save the sheet as CSV."),
    b"\xd0\xcf\x11\xe0": ("a workbook", "Save the sheet as CSV."),
    b"version https://git-lfs": ("a Git LFS pointer", "Run `git lfs pull` in its folder."),
    **dict.fromkeys(
        (b"<html", b"<!DOCTYPE html", b"<!doctype html"), ("a web page", "Download the file itself.")
    ),
    b"PAR1": ("a Parquet file", "Give it the ending .parquet, and read it as `kind: table`."),
}
"""How files begin that are no text, whatever their name says: what they are, and what to do."""
_SEP_LINE = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)
"""The first line by which Excel is told a separator."""
_LOOKED_AT = 4096
"""Characters of a file, by which it is told whether they are text."""


def require_text(file: Path, content: bytes) -> None:
    """Refuse what is packed, or another program's."""
    for start, (what, hint) in _PACKED.items():
        if content.startswith(start):
            raise DataError(f"{file} is {what}, not text", hint=hint)


def encoding_of(content: bytes, expected: str) -> str | None:
    """What a text's bytes are in: what is expected, if they can be, or else what they look like; None for no text."""
    text = _decoded(content, expected)
    if text is not None and "\0" not in text:
        return expected
    marked = [name for mark, name in _MARKS.items() if content.startswith(mark)]
    wide = ["utf-16-be" if content[:1] == b"\0" else "utf-16-le"] if b"\0" in content[:4] else []
    likely = [*marked[:1], *wide, "utf-8", "cp1252"]
    return next((name for name in likely if _is_written(_decoded(content, name))), None)


def separated_text(file: Path, encoding: str, separator: str, wanted: Collection[str | None]) -> str:
    """The text of a CSV file, if it is of this encoding and has this separator; `wanted` are names of columns.

    Raises:
        DataError: it looks like another encoding, or has another separator in its first line.
        ValueError: it is no text.
    """
    content = file.read_bytes()
    require_text(file, content)
    likely = encoding_of(content, encoding)
    if likely is None:
        raise ValueError(f"not {encoding} text")
    text = _decoded(content, likely) or ""
    first = _SEP_LINE.match(text)
    text = text if first is None else text[first.end() :]
    header = text.partition("\n")[0]
    between = max(_SEPARATORS, key=header.count)
    if first is not None:
        between = first[1]
    elif separator in header or between not in header or header.strip() in wanted:
        between = separator
    if (likely, between) == (encoding, separator):
        return text
    differing = {"encoding": (likely, encoding), "separator": (between, separator)}
    settings = [f"{key}: {json.dumps(there)}" for key, (there, read) in differing.items() if there != read]
    words = [f"looks like {likely} text, not {encoding}{_odd_word(text)}"] * (likely != encoding)
    there, read = (_SEPARATORS.get(one, repr(one)) for one in (between, separator))
    words += [f"has {there} between its columns, not {read}"] * (between != separator)
    load = f"{file.name!r}, sep={between!r}, encoding={likely!r}, dtype=str, keep_default_na=False"
    load += ", skiprows=1" if first is not None else ""
    converted = f"{file.stem}-utf8.csv"
    raise DataError(
        f"{file} {' and '.join(words)}",
        hint=f"Add to its entry `{', '.join(settings)}`; or convert it, in its folder:\n"
        f'python -c "import pandas; pandas.read_csv({load}).to_csv({converted!r}, index=False)"',
    )


def _decoded(content: bytes, encoding: str) -> str | None:
    """Text in an encoding, without the mark at its start; None where it is no such text."""
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeError:
        return None


def _is_written(text: str | None) -> bool:
    """Whether somebody wrote it: wrong encodings seldom fail, they give characters that nobody writes."""
    start = (text or "\0")[:_LOOKED_AT].translate(dict.fromkeys(map(ord, "\t\n\r")))
    return not any(unicodedata.category(one) in ("Cc", "Cn", "Co", "Cs") for one in start)


def _odd_word(text: str) -> str:
    """The first word with an accent or of another script, by which readers see whether an encoding is right."""
    word = next((word for word in re.findall(r"\w+", text) if not word.isascii()), None)
    return "" if word is None else f" (its {word!r} tells whether that is right)"
