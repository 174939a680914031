"""Formats of numbers and tables for terminal, model card, report and dashboard. Entry points: `written`, `Table`."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from driftlens.runs.tables import json_value
from driftlens.utils.intervals import Interval

# Formats of values: text, integers, three digits, percent, changes in percentage points, exponents, p
# values, signed changes, and relative changes in percent.
Kind = Literal["text", "count", "number", "share", "points", "error", "p", "signed", "relative"]

NOT_MEASURED = "not measured"

# Placeholder in a table for a missing value; a note below the table explains it.
NO_VALUE = "–"


def is_measured(value: Any) -> bool:
    """Return True unless the value is None or NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def format_value(value: Any, kind: Kind, gap: str = NO_VALUE) -> str:
    """Format a number, text, boolean or None.

    Args:
        value: the value.
        kind: the format.
        gap: text for a missing value.
    """
    if not is_measured(value):
        return gap
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or kind in ("text", "count"):
        return str(value)
    return _FORMATTERS[kind](value)


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits; no exponent below 15 digits."""
    if not is_measured(value):
        return NOT_MEASURED
    # `#` keeps trailing zeros, which are significant digits.
    text = f"{value:#.{digits}g}".removesuffix(".")
    # Beyond these bounds an exponent is shorter than the zeros.
    if "e" not in text or not 1e-9 < abs(value) < 1e15:
        return text
    return format(Decimal(f"{value:.{digits - 1}e}" if abs(value) < 1 else f"{value:.0f}"), "f")


def format_short(value: float, sign: str = "") -> str:
    """Format a number with three significant digits without trailing zeros or exponent; `sign` as in a format."""
    value += 0.0  # takes the sign off a zero
    text = f"{value:{sign}.3g}"
    # `g` switches to an exponent from 1000 on with three digits.
    return f"{value:{sign}.0f}" if "e+" in text and abs(value) < 1e15 else text


def format_signed(value: float) -> str:
    """Format a change with its sign and three significant digits."""
    return format_short(value, "+")


def format_p_value(value: float) -> str:
    """Format a p value with three decimals, "< .001" below that."""
    # A p of 0.000 would claim certainty.
    return "< .001" if value < 0.001 else f"{value:.3f}"


def format_error(value: float) -> str:
    """Format an error that should be near 0: two significant digits with an exponent."""
    return f"{value:.1e}" if is_measured(value) else NOT_MEASURED


def format_percent(value: float) -> str:
    """Format a fraction as a percentage with one decimal."""
    # Adding zero takes the sign off a zero that was rounded from below.
    return f"{round(100 * value, 1) + 0.0:.1f} %" if is_measured(value) else NOT_MEASURED


def format_points(value: float) -> str:
    """Format a change of a fraction in percentage points, signed; empty if it was not measured."""
    return f"{round(100 * value, 1) + 0.0:+.1f}" if is_measured(value) else ""


def format_interval(low: float, high: float) -> str:
    """Format both ends of an interval in percentage points; empty if it was not measured."""
    return f"{format_points(low)} to {format_points(high)}" if is_measured(low) else ""


def format_estimate(interval: Interval, kind: Kind, *, counted: bool = False) -> str:
    """Format a number with its 95 % interval, "79.1 % (77.4 to 80.7 %)".

    Args:
        interval: the number with its interval.
        kind: the format.
        counted: append the number of samples.
    """
    parts = []
    if is_measured(interval.low):
        low, high = (format_value(end, kind) for end in (interval.low, interval.high))
        parts.append(f"{low.removesuffix(' %')} to {high}")
    if counted and interval.n:
        parts.append(f"n = {interval.n}")
    text = format_value(interval.value, kind, NOT_MEASURED)
    return f"{text} ({', '.join(parts)})" if parts else text


_FORMATTERS: Mapping[Kind, Callable[[float], str]] = {
    **{"number": format_number, "share": format_percent, "points": format_points, "error": format_error},
    **{"p": format_p_value, "signed": format_signed, "relative": lambda value: f"{format_points(value)} %"},
}

# A hyphen is a minus before a number or between spaces, and not inside names, dates and ranges.
_MINUS = re.compile(r"(?<![\w.)-])-(?=\d)|(?<=\w )-(?= \w)")
_GLUE = re.compile(
    r"(?<=\d) (?=%|±|points\b)|(?<=±) |(?<=\bn) (?=\\?= ?\d)|(?<=[=]) (?=\d)|(?<=\d) (?=to .?\d)|(?<=\bto) (?=.?\d)"
)


def typeset_signs(text: str) -> str:
    """Replace +- by ± and hyphens before numbers by minus signs, except in code between backticks."""
    return map_code_spans(text, lambda part: _MINUS.sub("−", part.replace("+-", "±")), "`{}`".format)


def keep_units_together(text: str) -> str:
    """Insert no-break spaces between a number, its sign, its unit and its interval."""
    return map_code_spans(text, lambda part: _GLUE.sub("\N{NO-BREAK SPACE}", part), "`{}`".format)


def format_setting(value: object) -> str:
    """Format a setting's value: lists without brackets, "none" for None."""
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with three digits: "1.18 GB", "46 MB", "300 kB", "12 bytes"."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # 0.9995 is where three digits round up to the next unit.
        if num_bytes >= 0.9995 * step:
            return f"{format_short(num_bytes / step)} {unit}"
    return f"{num_bytes} bytes"


def map_code_spans(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> str:
    """Apply `code` to text between backticks and `plain` to all other text."""
    parts = text.split("`")
    # An odd number of backticks: there is no pair to rely on.
    if len(parts) % 2 == 0:
        return plain(text)
    return "".join(code(part) if place % 2 else plain(part) for place, part in enumerate(parts))


def strip_control_chars(text: str) -> str:
    """Return text on one line for printing: control characters replaced, narrow and unbreakable spaces plain."""
    plain_spaces = (" " if unicodedata.category(character) == "Zs" else character for character in text)
    return "".join(character if character.isprintable() else "\ufffd" for character in plain_spaces)


# One value at full precision; None where nothing was measured.
Cell = str | int | float | bool | None
INTERVAL = "95 % interval"
_GAPS = "A dash: not measured."
# Whole numbers stay whole where some are missing; all others are floats.
_DTYPES = {"text": "object", "count": "Int64"}


class ReportPart(BaseModel):
    """Base class of report elements: immutable, unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


class Column(ReportPart):
    """One column of a table."""

    name: str = Field(description="Heading, unique within the table.")
    kind: Kind = Field(description="Format of rounded values.")
    unit: str = Field(default="", description="Unit, as in the run's tables; may be empty.")


_HALF, _CHANGE = (" ± ", ""), (" → ", "")
# Endings of headings whose columns form one cell, and the text after each of its numbers.
_TOGETHER: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("", " +-"), _HALF),
    (("", " low", " high"), (" (", " to ", ")")),
    ((" low", " high"), (" to ", "")),
    ((" before", " after"), _CHANGE),
)


@dataclass(frozen=True)
class _CellColumns:
    """Table columns printed in one cell: heading, format, positions, and the text after each number."""

    head: str
    kind: Kind
    at: tuple[int, ...]
    joints: tuple[str, ...] = ("",)


class Table(ReportPart):
    """A table of unrounded values with a format per column.

    Headings connect the columns of one cell: `X +-` has half of the interval of `X`, `X low` and `X high` its ends,
    `X before` and `X after` a change.
    """

    name: str = Field(description="Unique name, used for files, anchors and labels.")
    title: str
    note: str = Field(default="", description="Note on the rows.")
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...] = Field(description="One value per column; null: not measured.")

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        kinds: Mapping[str, Kind],
        rows: Sequence[Sequence[object]],
        note: str = "",
    ) -> Table:
        """Build a table from lists of values; missing and non-finite values become None.

        Args:
            name: unique name, used for files, anchors and labels.
            title: the title.
            kinds: formats by heading.
            rows: one value per heading.
            note: note below the table.
        """
        columns = tuple(
            Column(name=head, kind=kind, unit="1" if kind in ("share", "points") else _UNITS.get(head, ""))
            for head, kind in kinds.items()
        )
        cells = tuple(tuple(map(json_value, row)) for row in rows)
        return cls(name=name, title=title, note=note, columns=columns, rows=cells)

    @classmethod
    def from_rows(
        cls,
        name: str,
        title: str,
        columns: Mapping[str, tuple[Kind, str]],
        rows: Sequence[Mapping[Any, object]],
        note: str = "",
    ) -> Table:
        """Build a table from rows given as mappings.

        Args:
            name: unique name, used for files, anchors and labels.
            title: the title.
            columns: format and key in a row, by heading.
            rows: the rows.
            note: note below the table.
        """
        kinds = {head: kind for head, (kind, _) in columns.items()}
        cells = [[row.get(key) for _, key in columns.values()] for row in rows]
        return cls.of(name, title, kinds, cells, note)

    @property
    def column_formats(self) -> dict[str, Kind]:
        """The number format of each column, by heading."""
        return {column.name: column.kind for column in self.columns}

    def frame(self) -> pd.DataFrame:
        """Return the table as a pandas data frame."""
        frame = {}
        for place, column in enumerate(self.columns):
            dtype = _DTYPES.get(column.kind, "float64")
            frame[column.name] = pd.Series([row[place] for row in self.rows], dtype=dtype)
        return pd.DataFrame(frame)

    def display_columns(self) -> Iterator[_CellColumns]:
        """Yield the printed columns, each joining the table's columns for a number and its interval."""
        places, taken = {column.name: place for place, column in enumerate(self.columns)}, set[int]()
        for name, place in places.items():
            if place not in taken:
                head, group, joints = _find_columns_of_cell(name, places)
                taken |= {*group}
                yield _CellColumns(head, self.columns[place].kind, group, joints)

    def format_cell(self, row: Sequence[Cell], shown: _CellColumns, gap: str = NO_VALUE) -> list[tuple[str, str]]:
        """Format the numbers of one cell, each with its separator; a value without interval is alone."""
        values = [row[place] for place in shown.at]
        texts = [format_value(value, shown.kind, gap) for value in values]
        # A value without interval, or without visible change, is shown alone.
        if None in values or (shown.joints == _CHANGE and len({*texts}) == 1):
            return [(texts[0], "")]
        if shown.joints == _HALF and isinstance(values[1], int | float):
            texts[1] = format_percent(values[1]) if shown.kind == "share" else f"{values[1]:#.2g}".removesuffix(".")
        return [
            (text.removesuffix(" %") if joint == " to " else text, joint)
            for text, joint in zip(texts, shown.joints, strict=True)
        ]

    def formatted_rows(self, *, ascii_only: bool = False, gap: str = NO_VALUE) -> list[list[str]]:
        """Return the headings, then all rows with their values formatted as text."""
        columns, lines = [*self.display_columns()], list[list[str]]()
        for row in self.rows:
            cells = ["".join(map("".join, self.format_cell(row, shown, gap))) for shown in columns]
            lines.append([_replace_non_ascii_signs(cell) for cell in cells] if ascii_only else cells)
        return [[shown.head for shown in columns], *lines]

    def notes(self) -> str:
        """Return the note below the table; it explains the dash if a value is missing."""
        has_gaps = any(cell is None for row in self.rows for cell in row)
        return " ".join(filter(None, (self.note, _GAPS if has_gaps else "")))

    def __repr__(self) -> str:
        heads, *rows = self.formatted_rows()
        table = pd.DataFrame(rows, columns=heads).to_string(index=False)
        return "\n".join(map(strip_control_chars, [self.title, *table.split("\n"), self.notes()]))

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the table as HTML without line breaks in numbers, for notebooks."""
        heads, *rows = ([keep_units_together(cell) for cell in row] for row in self.formatted_rows())
        table = pd.DataFrame(rows, columns=heads).to_html(index=False)
        return f"<b>{escape(self.title)}</b>{table}<p>{escape(strip_control_chars(self.notes()))}</p>"


def with_interval_ends(head: str, kind: Kind, keys: Sequence[str]) -> dict[str, tuple[Kind, str]]:
    """Return the column definitions of a number and the ends of its interval, for `Table.from_rows`."""
    return {f"{head}{end}": (kind, key) for end, key in zip(("", " low", " high"), keys, strict=True)}


def _find_columns_of_cell(name: str, places: Mapping[str, int]) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """Return heading, column positions and separators of the cell that begins with the column `name`."""
    for ends, joints in _TOGETHER:
        stem = name.removesuffix(ends[0])
        shown = tuple(places[stem + end] for end in ends if stem + end in places)
        # A column alone stays alone: "X low" without "X high" is no interval.
        if name == stem + ends[0] and len(shown) == len(ends):
            return INTERVAL if ends[0] == " low" else stem, shown, joints
    return name, (places[name],), ("",)


def _replace_non_ascii_signs(text: str) -> str:
    return text.replace("±", "+-").replace("→", "->")


# Units of columns by heading, in the words of the run's schema; a heading means the same in every table.
_UNITS = {
    **dict.fromkeys(("L2 drift", "L2 drift +-", "mean drift", "10 % quantile", "90 % quantile"), "feature"),
    **dict.fromkeys(("mismatch", "propagation", "drift"), "feature"),
    **dict.fromkeys(("score drift", "secant", "directional", "spectral", "certified"), "score"),
    **dict.fromkeys(("relative drift", "of base distance", "drift / base distance", "amplification"), "1"),
    **dict.fromkeys(
        ("cosine", "cosine +-", "mean cosine", "cosine of task vectors", "cosine gain", "cka", "cross term"),
        "1",
    ),
    **dict.fromkeys(("accuracy", "score", "value", "share of final drift"), "1"),
    **dict.fromkeys(("n", "test n", "samples", "test samples", "calibration", "diagnosis", "test"), "samples"),
    **{"seconds": "s", "peak memory (GiB)": "GiB", "peak GPU memory (GiB)": "GiB", "energy (Wh)": "Wh"},
}
