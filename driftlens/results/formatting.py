"""How numbers read: the same digits in terminal, card, page and dashboard, none that was not measured."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

from driftlens.utils.intervals import Interval

Kind = Literal["text", "count", "number", "share", "points", "error", "p", "signed", "relative"]
"""How values are written: as they are, whole, with three digits, in percent, a change in points, with an exponent; p;
a change with its sign, and one of a length in percent."""

NOT_MEASURED = "not measured"

NO_VALUE = "–"
"""Stands in a table where nothing was measured; a line below the table says so."""


def is_measured(value: Any) -> bool:
    """Whether there is a value; a null of a table is NaN or None here."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def written(value: Any, kind: Kind, gap: str = NO_VALUE) -> str:
    """One value as a reader sees it; `gap` where nothing was measured."""
    if not is_measured(value):
        return gap
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or kind in ("text", "count"):
        return str(value)
    if kind == "relative":
        return f"{points(value)} %"
    writers = {"number": number, "share": percent, "points": points, "error": error, "p": p_value}
    return {**writers, "signed": signed}[kind](value)


def number(value: float, digits: int = 3) -> str:
    """A number with that many significant digits, as people write them: no exponent before 15 digits."""
    if not is_measured(value):
        return NOT_MEASURED
    text = f"{value:#.{digits}g}".removesuffix(".")
    is_plain = "e" not in text or not 1e-9 < abs(value) < 1e15
    return (
        text
        if is_plain
        else format(Decimal(f"{value:.{digits - 1}e}" if abs(value) < 1 else f"{value:.0f}"), "f")
    )


def brief(value: float, sign: str = "") -> str:
    """Three significant digits without zeros behind them, `sign` as in a format ("+" shows both); no exponent."""
    value += 0.0  # takes the sign off a zero
    text = f"{value:{sign}.3g}"
    return f"{value:{sign}.0f}" if "e+" in text and abs(value) < 1e15 else text


def signed(value: float) -> str:
    """The same with its sign, as a change is told."""
    return brief(value, "+")


def p_value(value: float) -> str:
    """A p value, never 0."""
    return "< .001" if value < 0.001 else f"{value:.3f}"


def error(value: float) -> str:
    """Two significant digits with an exponent, for errors that should be tiny."""
    return f"{value:.1e}" if is_measured(value) else NOT_MEASURED


def percent(value: float) -> str:
    """A fraction as a percentage with one decimal."""
    # Adding zero takes the sign off a zero that was rounded from below.
    return f"{round(100 * value, 1) + 0.0:.1f} %" if is_measured(value) else NOT_MEASURED


def points(value: float) -> str:
    """A change of a fraction in percentage points, signed; empty where it was not measured."""
    return f"{round(100 * value, 1) + 0.0:+.1f}" if is_measured(value) else ""


def half(value: float, kind: Kind) -> str:
    """Half of an interval, a length with two digits."""
    return percent(value) if kind == "share" else f"{value:#.2g}".removesuffix(".")


def points_interval(low: float, high: float) -> str:
    """Both ends of an interval in percentage points; empty where it was not measured."""
    return f"{points(low)} to {points(high)}" if is_measured(low) else ""


def percent_interval(low: float, high: float) -> str:
    """Both ends of an interval of a relative change, in percent; empty where it was not measured."""
    return f"{points_interval(low, high)} %" if is_measured(low) else ""


def estimate(found: Interval, kind: Kind, *, counted: bool = False) -> str:
    """A number and its 95 % interval where it is known, "79.1 % (77.4 to 80.7 %)"; its n too where wanted."""
    parts = []
    if is_measured(found.low):
        low, high = (written(end, kind) for end in (found.low, found.high))
        parts.append(f"{low.removesuffix(' %')} to {high}")
    if counted and found.n:
        parts.append(f"n = {found.n}")
    text = written(found.value, kind, NOT_MEASURED)
    return f"{text} ({', '.join(parts)})" if parts else text


_MINUS = re.compile(r"(?<![\w.)-])-(?=\d)|(?<=\w )-(?= \w)")
_GLUE = re.compile(
    r"(?<=\d) (?=%|±|points\b)|(?<=±) |(?<=\bn) (?=\\?= ?\d)|(?<=[=]) (?=\d)|(?<=\d) (?=to .?\d)|(?<=\bto) (?=.?\d)"
)


def signs(text: str) -> str:
    """A sentence with the signs of a typesetter, ± and −; what stands between backticks stays."""
    return with_code(text, lambda part: _MINUS.sub("−", part.replace("+-", "±")), "`{}`".format)


def unbroken(text: str) -> str:
    """A sentence in which no line ends between a number, its sign, its unit and the end of its interval."""
    return with_code(text, lambda part: _GLUE.sub("\N{NO-BREAK SPACE}", part), "`{}`".format)


def setting_text(value: object) -> str:
    """A setting's value: lists without brackets, "none" for None."""
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def size(num_bytes: int) -> str:
    """An amount of bytes with three digits: "1.18 GB", "46 MB", "300 kB", "12 bytes"."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * step:
            amount = num_bytes / step
            text = f"{amount:,.{max(0, 2 - math.floor(math.log10(max(1.0, 1.0005 * amount))))}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    return f"{num_bytes} bytes"


def with_code(text: str, plain: Callable[[str], str], code: Callable[[str], str]) -> str:
    """What stands between backticks by `code`, all else by `plain`; a backtick without its twin is a letter."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return plain(text)
    return "".join(code(part) if place % 2 else plain(part) for place, part in enumerate(parts))


def printable(text: str) -> str:
    """`text` on one line, without control characters: a name in a run must not steer the terminal.

    Narrow and unbreakable spaces, which Python takes for unprintable and many fonts lack, are plain ones.
    """
    plain_spaces = (" " if unicodedata.category(character) == "Zs" else character for character in text)
    return "".join(character if character.isprintable() else "\ufffd" for character in plain_spaces)
